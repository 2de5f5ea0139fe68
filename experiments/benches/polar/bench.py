"""Polar factors: band of the singular values of the result, its distance from U V^T, and time of each solver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor

from eigengraft.component import checked
from eigengraft.preconditioners import PolarSolver

from ..common.bench import Bench
from ..common.declarations import Declaration, defaults, label, listed, require_distinct
from ..common.fields import DTYPES, MatrixDtypes, MatrixShapes
from ..common.results import FigurePanel, ResultTable
from ..common.timing import milliseconds, relative_error, worst
from ..problems.spectra import orthogonal
from .rows import PolarRow
from .view import polar_advice, polar_panels, polar_summary

_PREFERRED: tuple[Declaration, ...] = (
    {"kind": "newton_schulz"},
    {"kind": "newton_schulz", "coefficients": "you"},
    {"kind": "newton_schulz", "coefficients": "polar_express"},
    {"kind": "newton_schulz", "coefficients": "cubic", "steps": 8},
    {"kind": "newton_schulz", "precision": "bfloat16"},
    {"kind": "svd"},
)


def polar_label(solver: PolarSolver) -> str:
    """The solver's name, with the name of its coefficients where they have one."""
    known = getattr(solver, "coefficients", None)
    if not isinstance(known, str):
        return label(solver)
    usual = type(solver).model_fields["coefficients"].default
    text = label(solver.replace(coefficients=usual))
    return f"{text.split()[0]} {known} {' '.join(text.split()[1:])}".strip()


def _default_solvers() -> tuple[PolarSolver, ...]:
    return tuple(checked(PolarSolver, dict(item)) for item in defaults(PolarSolver, _PREFERRED))  # type: ignore[type-abstract]


class PolarBench(Bench):
    """Polar solvers x shapes x condition numbers x dtypes."""

    kind: Literal["polar"] = "polar"
    solvers: Annotated[tuple[PolarSolver, ...], BeforeValidator(listed)] = Field(
        default_factory=_default_solvers, strict=False, description="declarations, or kinds"
    )
    shapes: MatrixShapes = Field(
        default=((16, 16), (64, 64), (64, 256), (128, 128)), strict=False, description="shapes m x n of the matrices"
    )
    conditions: Annotated[tuple[Annotated[float, Field(ge=1)], ...], BeforeValidator(listed)] = Field(
        default=(1e0, 1e1, 1e2, 1e3, 1e4),
        strict=False,
        description="condition numbers: largest over smallest singular value",
    )
    dtypes: MatrixDtypes = Field(default=("float32",), strict=False, description="dtypes of the matrices")
    count: int = Field(default=4, ge=1, description="matrices in a stack")
    threshold: float = Field(default=0.3, gt=0, description="largest distance that the advice accepts")
    advised: float = Field(default=1e2, ge=1, description="largest condition number that the advice considers")
    candidate_field: ClassVar[str] = "solvers"
    quick_fields: ClassVar[dict[str, Any]] = {
        "shapes": [(16, 16), (16, 64)], "conditions": [1e0, 1e2, 1e4], "count": 2, "seconds": 0.005
    }  # fmt: skip

    @field_validator("solvers")
    @classmethod
    def _distinct(cls, solvers: tuple[PolarSolver, ...]) -> tuple[PolarSolver, ...]:
        require_distinct(solvers, polar_label)
        return solvers

    def cells(self) -> int:
        return len(self.solvers) * len(self.shapes) * len(self.conditions) * len(self.dtypes)

    def measure(self) -> Iterator[list[PolarRow]]:
        device = self.target_device()
        for shape, condition in ((shape, condition) for shape in self.shapes for condition in self.conditions):
            g, exact = self._matrices(shape, condition)
            for dtype in self.dtypes:
                given = g.to(device, DTYPES[dtype])
                for solver in self.solvers:
                    yield [self._row(solver, given, exact.to(device), condition)]

    def _matrices(self, shape: tuple[int, int], condition: float) -> tuple[Tensor, Tensor]:
        """G and its polar factor, float64."""
        m, n = shape
        r = min(m, n)
        u = orthogonal(self.count, m, self.seed)[:, :, :r]
        v = orthogonal(self.count, n, self.seed + 1)[:, :, :r]
        s = torch.from_numpy(np.geomspace(1, 1 / condition, r)) if r > 1 else torch.ones(1, dtype=torch.float64)
        return (u * s) @ v.mT, u @ v.mT

    def _row(self, solver: PolarSolver, g: Tensor, exact: Tensor, condition: float) -> PolarRow:
        x = solver.polar(g).double()
        values = torch.linalg.svdvals(x)
        return PolarRow(
            candidate=polar_label(solver),
            declaration=solver.declaration(),
            device=self.device,
            m=g.shape[1],
            n=g.shape[2],
            condition=condition,
            dtype=str(g.dtype).removeprefix("torch."),
            low=float(values.min()),
            high=float(values.max()),
            distance=worst(relative_error(x, exact)),
            milliseconds=milliseconds(lambda: solver.polar(g), self.threads, self.seconds) / self.count,
        )

    def summary(self, rows: Sequence[PolarRow]) -> ResultTable:
        return polar_summary(rows, self.advised)

    def panels(self, rows: Sequence[PolarRow]) -> tuple[FigurePanel, FigurePanel]:
        return polar_panels(rows, self.advised, self.threshold)

    def advice(self, rows: Sequence[PolarRow]) -> list[str]:
        return polar_advice(rows, self.advised, self.threshold)
