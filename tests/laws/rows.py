"""What a component declares to be held to the laws: one row, or several where it has modes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eigengraft import Stage, StepContext
from eigengraft.component import validated
from eigengraft.preconditioners import BasisSolver, PolarSolver, RootSolver, walk
from eigengraft.testing.samples import TRAJECTORY_STEPS
from eigengraft.testing.solver_laws import ROUNDING, SolverCase
from eigengraft.testing.stage_case import StageCase

Make = Mapping[str, Any]


STOPPING = ("coupled_newton", "higher_order", "newton_db")
"""Root solvers that stop at a tolerance, 1e-6 at most: the rounding of c A may give them one step more."""
COSINES = {"svd": 1 - 1e-12, "triangular": 0.8}
"""Least cosines between P(X) and U V^T, where it is not 0.9; rows of `triangular` are orthogonal to first order."""
BLOCKS = ((6, 5), (3,), (3, 2, 4), (1, 1))
"""Shapes of the blocks to try. The statistics of a vector of three entries are regular after three gradients."""
LENGTHS = (6, 8, TRAJECTORY_STEPS)
"""Lengths of trajectories. That of a stage is the first by which it has refreshed every block again."""
RESTLESS = "qr_iteration"
"""Ascending order and single steps: does not settle, as its docstring says and `test_bases.py` measures."""


class Fault:
    """A declaration that must be refused at construction, and the path and values that the error must name."""

    fields: Make
    says: tuple[object, ...]

    def __init__(self, fields: Make, *says: object) -> None:
        self.fields, self.says = fields, says


@dataclass(frozen=True)
class Row:
    """make: the component. note: tells the rows of one kind apart. faults: error inputs, once for each kind.

    degree: d if scaling all gradients by c scales the result by c^d, a number or a function of the number of axes of
    the block; None: no such law. rotates: whether U G V^T gives U D V^T; None: polar solvers do, others do not.
    blocks: the shapes to try.
    singular: whether bases or roots are taken of singular statistics; in their null space numbers are rounding, so that
    laws that compare two computations do not apply.
    """

    make: Make
    note: str = ""
    degree: float | Callable[[int], float] | None = None
    rotates: bool | None = None
    blocks: tuple[tuple[int, ...], ...] = BLOCKS
    faults: tuple[Fault, ...] = ()
    singular: bool = False

    @property
    def kind(self) -> str:
        return str(self.make["kind"])

    def stage(self) -> StageCase:
        """The case of a row about a stage."""
        stage = validated(Stage, dict(self.make))  # type: ignore[type-abstract]
        steps = next(length for length in LENGTHS if settled_after(stage) < length)
        return StageCase(stage, self.blocks, self.degree, bool(self.rotates), self.singular, steps)

    def solver(self, family: str) -> SolverCase[Any]:
        """The case of a row about a solver of that family."""
        kinds = {kind.family_name: kind for kind in (RootSolver, BasisSolver, PolarSolver)}
        made: Any = validated(kinds[family], dict(self.make))  # type: ignore[type-abstract]
        degree = self.degree(2) if callable(self.degree) else self.degree
        tolerance = 1e-5 if self.kind in STOPPING else ROUNDING
        converges, cosine = str(self) != RESTLESS, COSINES.get(self.kind, 0.9)
        return SolverCase(made, degree, self.rotates, tolerance, converges, cosine)

    def __str__(self) -> str:
        return f"{self.kind} {self.note}".strip()


def settled_after(stage: Stage) -> float:
    """The step at which every block has been refreshed once and its cadence has come round: 0 without refreshes."""
    steps, ids = [0.0], np.arange(3)
    for _, inner in walk((stage,)):
        if (cadence := inner.cadence()) is not None:
            first = np.full(3, math.inf)
            for step in range(TRAJECTORY_STEPS):
                for start, stop, _ in inner.due(StepContext(np.full(3, step), ids / 3, ids, seeds=ids)):
                    first[start:stop] = np.minimum(first[start:stop], step)
            steps.append(float(first.max()) + (cadence.period or math.inf))
    return max(steps)
