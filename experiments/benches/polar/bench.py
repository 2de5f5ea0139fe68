"""Polar factors: which band the singular values end up in, how far the result is from U V^T, and time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor

from eigengraft.component import checked
from eigengraft.preconditioners import PolarSolver

from ..common.bench import Bench, Panel, Row, Summary
from ..common.declarations import Declaration, defaults, distinct, label, listed
from ..common.tables import fastest, groups, milli, points, scientific, unique
from ..common.timing import milliseconds, relative_error, worst
from ..grafting.bench import _shapes
from ..problems.spectra import orthogonal
from ..roots.bench import DTYPES
from .schedules import CUBIC, POLAR_EXPRESS, YOU

PREFERRED: tuple[Declaration, ...] = (
    {"kind": "newton_schulz"},
    {"kind": "newton_schulz", "coefficients": YOU},
    {"kind": "newton_schulz", "coefficients": POLAR_EXPRESS},
    {"kind": "newton_schulz", "coefficients": CUBIC, "steps": 8},
    {"kind": "newton_schulz", "precision": "bfloat16"},
    {"kind": "svd"},
)
NAMES = {str(YOU): "You", str(POLAR_EXPRESS): "Polar Express", str(CUBIC): "cubic"}


def polar_label(solver: PolarSolver) -> str:
    """The solver's name, with the name of its schedule where that has one."""
    schedule = getattr(solver, "coefficients", None)
    known = NAMES.get(str([list(row) for row in schedule])) if schedule is not None else None
    if known is None:
        return label(solver)
    usual = type(solver).model_fields["coefficients"].default
    text = label(solver.replace(coefficients=usual))
    return f"{text.split()[0]} {known} {' '.join(text.split()[1:])}".strip()


def _default_solvers() -> tuple[PolarSolver, ...]:
    return tuple(checked(PolarSolver, dict(item)) for item in defaults(PolarSolver, PREFERRED))  # type: ignore[type-abstract]


@dataclass(frozen=True)
class PolarRow(Row):
    """One solver on one stack G = U diag(s) V^T, s from `condition`^-1 to 1 in equal ratios; the worst of the stack.

    low, high: the band of singular values of the result. distance: ||X - U V^T||_F / ||U V^T||_F.
    """

    m: int
    n: int
    condition: float
    dtype: str
    low: float
    high: float
    distance: float
    milliseconds: float


class Spectral(Bench):
    """Polar solvers x shapes x condition numbers x dtypes."""

    kind: Literal["spectral"] = "spectral"
    solvers: Annotated[tuple[PolarSolver, ...], BeforeValidator(listed)] = Field(
        default_factory=_default_solvers, strict=False, description="declarations, or kinds"
    )
    shapes: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], ...], BeforeValidator(_shapes)
    ] = Field(default=((16, 16), (64, 64), (64, 256), (128, 128)), strict=False, description="m x n")
    conditions: Annotated[tuple[Annotated[float, Field(ge=1)], ...], BeforeValidator(listed)] = Field(
        default=(1e0, 1e1, 1e2, 1e3, 1e4), strict=False, description="largest over smallest value"
    )
    dtypes: Annotated[tuple[Literal["float32", "float64"], ...], BeforeValidator(listed)] = Field(
        default=("float32",), strict=False, description="of the matrices"
    )
    count: int = Field(default=4, ge=1, description="matrices in a stack")
    threshold: float = Field(default=0.3, gt=0, description="largest distance that the advice accepts")
    advised: float = Field(default=1e2, ge=1, description="condition number up to which the advice looks")
    parts: ClassVar[str] = "solvers"
    small: ClassVar[dict[str, Any]] = {
        "shapes": [(16, 16), (16, 64)], "conditions": [1e0, 1e2, 1e4], "count": 2, "seconds": 0.005
    }  # fmt: skip

    @field_validator("solvers")
    @classmethod
    def _distinct(cls, solvers: tuple[PolarSolver, ...]) -> tuple[PolarSolver, ...]:
        distinct(solvers, polar_label)
        return solvers

    def cells(self) -> int:
        return len(self.solvers) * len(self.shapes) * len(self.conditions) * len(self.dtypes)

    def measure(self) -> Iterator[list[PolarRow]]:
        device = self.target()
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
            part=polar_label(solver),
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

    def summary(self, rows: Sequence[PolarRow]) -> Summary:
        lines = []
        for (part, dtype, m, n), some in groups(rows, lambda r: (r.part, r.dtype, r.m, r.n)):
            near = [row for row in some if row.condition <= self.advised] or some
            lines.append(
                (
                    part,
                    f"{m} x {n}",
                    dtype,
                    f"{min(row.low for row in near):.3f} - {max(row.high for row in near):.3f}",
                    scientific(max(row.distance for row in near)),
                    f"{min(row.low for row in some):.3f} - {max(row.high for row in some):.3f}",
                    milli(median(row.milliseconds for row in some)),
                )
            )
        near_title = f"band, condition <= {self.advised:g}"
        columns = ("solver", "shape", "dtype", near_title, "distance", "band, all", "ms")
        return Summary("polar factors: the worst over condition numbers", columns, tuple(lines))

    def panels(self, rows: Sequence[PolarRow]) -> tuple[Panel, Panel]:
        largest = max(((row.m, row.n) for row in rows), key=math.prod, default=(0, 0))
        cost, accuracy = [], []
        for style, part in enumerate(unique(row.part for row in rows)):
            own = [row for row in rows if row.part == part and row.dtype == rows[0].dtype]
            shapes = groups((row for row in own if row.condition <= self.advised), lambda row: (row.m, row.n))
            pairs = ((median(r.milliseconds for r in some), max(r.distance for r in some)) for _, some in shapes)
            cost.append(points(part, style, pairs))
            sweep = ((row.condition, row.distance) for row in own if (row.m, row.n) == largest)
            accuracy.append(points(part, style, sweep))
        shapes_seen = ", ".join(f"{m}x{n}" for m, n in self.shapes)
        level = (self.threshold, self.threshold)
        return (
            Panel(
                tuple(cost), f"ms a matrix ({shapes_seen})", f"distance to polar, condition ≤ {self.advised:g}", level
            ),
            Panel(
                tuple(accuracy),
                f"condition number ({largest[0]} x {largest[1]})",
                "distance to the polar factor",
                level,
            ),
        )

    def advice(self, rows: Sequence[PolarRow]) -> list[str]:
        lines = []
        near = [row for row in rows if row.condition <= self.advised] or list(rows)
        for (m, n, dtype), some in groups(near, lambda r: (r.m, r.n, r.dtype)):
            times = {part: median(row.milliseconds for row in own) for part, own in groups(some, lambda r: r.part)}
            errors = {part: max(row.distance for row in own) for part, own in groups(some, lambda r: r.part)}
            lines.append(fastest(f"polar factor, {m} x {n}, {dtype}", times, errors, self.threshold, "distance"))
        return lines
