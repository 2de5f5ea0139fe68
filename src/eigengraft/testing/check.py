"""The functions that check one component against the laws of its family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eigengraft.preconditioners import BasisSolver, Cadence, PolarSolver, RootSolver, Stage
from eigengraft.quantization import Quantizer

from .cadence_laws import CADENCE_LAWS, SPANS, CadenceCase
from .laws import Report, check
from .polar_laws import POLAR_LAWS
from .quantizer_laws import QUANTIZER_LAWS, QuantizerCase
from .root_laws import ROOT_LAWS
from .solver_laws import BASIS_LAWS, ROUNDING, SOLVER_LAWS, SolverCase
from .stage_case import BLOCKS, Degree, StageCase
from .stage_laws import CONTRACT, STAGE_LAWS

if TYPE_CHECKING:
    from eigengraft.experiments.tasks import Task


def check_stage(
    stage: Stage,
    blocks: tuple[tuple[int, ...], ...] = BLOCKS,
    *,
    degree: Degree | None = None,
    rotates: bool = False,
    singular: bool = False,
) -> Report:
    """Tries a stage on the contract and the laws of stages; raises one `LawError` that names what is broken.

    blocks: the shapes to try, all axes after the stack axis.
    degree: d if scaling all gradients by c scales the direction by c^d (Adam: 0, momentum: 1), a number or a function
    of the number of axes; default: not asked.
    rotates: whether U G V^T gives U D V^T; default: not asked.
    singular: whether bases or roots are taken of singular matrices; then laws that compare two computations are not
    asked.
    """
    _require_instance(stage, Stage, "check_stage")
    return check(StageCase(stage, blocks, degree, rotates, singular), [CONTRACT], STAGE_LAWS)


def check_solver(
    solver: RootSolver | BasisSolver | PolarSolver,
    *,
    degree: float | None = None,
    rotates: bool | None = None,
    tolerance: float = ROUNDING,
    settles: bool = True,
) -> Report:
    """Tries a root, basis or polar solver on the laws of its family; raises one `LawError` that names what is broken.

    degree: of a root solver, -1 if (c A)^-e = c^-e A^-e, which an absolute ridge breaks; default: not asked.
    rotates: of a root solver, whether (U A U^T)^-e = U A^-e U^T; default: not asked. Of a polar solver, whether
    P(U X V^T) = U P(X) V^T; default: asked.
    tolerance: of these two laws; 1e-5 for solvers that stop at a tolerance.
    settles: of a basis solver, whether repeated refreshes of one matrix converge to its eigenvectors.
    """
    _require_instance(solver, (RootSolver, BasisSolver, PolarSolver), "check_solver")
    bases_or_polar = BASIS_LAWS if isinstance(solver, BasisSolver) else POLAR_LAWS
    own = ROOT_LAWS if isinstance(solver, RootSolver) else bases_or_polar
    return check(SolverCase(solver, degree, rotates, tolerance, settles), [], (*SOLVER_LAWS, *own))


def check_quantizer(quantizer: Quantizer, size: int = 9) -> Report:
    """Tries a quantizer on the laws of quantizers; raises one `LawError` that names what is broken.

    size: of the matrices `[size, size]` that are stored; give a larger one to a quantizer that refuses small slots.
    """
    _require_instance(quantizer, Quantizer, "check_quantizer")
    return check(QuantizerCase(quantizer, size), [], QUANTIZER_LAWS)


def check_cadence(cadence: Cadence, steps: int = 0) -> Report:
    """Tries a cadence on the laws of cadences; raises one `LawError` that names what is broken.

    steps: updates of the blocks that are tried; 0: twelve intervals of the cadence.
    """
    _require_instance(cadence, Cadence, "check_cadence")
    return check(CadenceCase(cadence, steps), [SPANS], CADENCE_LAWS)


def check_task(task: Task) -> Report:
    """Tries a task on the laws of tasks; raises one `LawError` that names what is broken.

    Data are read and a model is built several times, so give a small one. Needs `eigengraft[experiments]`.
    """
    from eigengraft.experiments.tasks import Task

    from .task_laws import TASK_LAWS, TaskCase

    _require_instance(task, Task, "check_task")
    return check(TaskCase(task), [], TASK_LAWS)


def _require_instance(value: object, kinds: type | tuple[type, ...], who: str) -> None:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        got = f"the class {value.__name__}: give an instance" if isinstance(value, type) else repr(value)
        raise TypeError(f"{who}: an instance of {names} is required, got {got}")
