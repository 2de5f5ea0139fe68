"""A bench of solvers for the polar factor U V^T of a matrix U S V^T.

It measures the range of the singular values of a solver's result, its distance from U V^T, and the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from eigengraft.preconditioners import PolarSolver

from .bench import Column, Declaration, Listed, MatrixDtypes, MatrixShapes, Problem, default_members, label
from .matrices import LONGEST, OwnMatrices, gradients_of, orthogonal, relative_error, worst_of
from .view import Panel, Recommendation, Row, Table, cell, milli, only, per, reduction, scientific, xy

_PREFERRED: tuple[Declaration, ...] = (
    {"kind": "newton_schulz"},
    {"kind": "newton_schulz", "coefficients": "you"},
    {"kind": "newton_schulz", "coefficients": "polar_express"},
    {"kind": "newton_schulz", "coefficients": "cubic", "steps": 8},
    {"kind": "newton_schulz", "precision": "bfloat16"},
    {"kind": "svd"},
)


class PolarBench(OwnMatrices):
    """Measure every polar solver on matrices G = U diag(s) V^T, for every shape, condition number and dtype.

    The singular values s go from 1 / condition to 1, and neighbors have equal ratios. With `record`, the matrices G
    are gradients of a run after `steps` steps.
    """

    kind: Literal["polar"] = "polar"
    solvers: Listed[PolarSolver] = Field(
        default_factory=default_members(PolarSolver, _PREFERRED),
        description="polar solvers to measure, each a kind or a declaration",
    )
    shapes: MatrixShapes = Field(
        ((16, 16), (64, 64), (64, 256), (128, 128)), description="shapes m x n of the matrices"
    )
    conditions: Listed[Annotated[float, Field(ge=1)]] = Field(
        default=(1e0, 1e1, 1e2, 1e3, 1e4),
        description="condition numbers: largest over smallest singular value",
    )
    dtypes: MatrixDtypes = Field(("float32",), description="dtypes of the matrices")
    count: int = Field(4, ge=1, description="matrices in a stack")
    steps: int = Field(100, ge=0, description="training steps of the run `record` before its gradient")
    threshold: float = Field(
        0.3, gt=0, description="largest distance ||X - U V^T||_F / ||U V^T||_F that the advice accepts"
    )
    advised: float = Field(1e2, ge=1, description="largest condition number of the matrices that the advice considers")
    made_fields: ClassVar[tuple[str, ...]] = ("shapes", "conditions", "count")
    run_fields: ClassVar[tuple[str, ...]] = ("steps",)
    candidate_field: ClassVar[str] = "solvers"
    columns: ClassVar[Mapping[str, Column]] = {
        "low": Column("least singular value of the result X, the least of the stack"),
        "high": Column("largest singular value of X, the largest of the stack"),
        "distance": Column("||X - U V^T||_F / ||U V^T||_F, the worst of the stack"),
        "milliseconds": Column("time of one matrix", "ms"),
    }
    quick_fields: ClassVar[dict[str, Any]] = {
        "shapes": [(16, 16), (16, 64)], "conditions": [1e0, 1e2, 1e4], "count": 2, "seconds": 0.005
    }  # fmt: skip

    def problems(self) -> Sequence[Problem]:
        return [
            Problem(
                {"layer": name, "m": m, "n": n, "condition": condition, "dtype": dtype},
                partial(self._cast, make, dtype),
            )
            for name, (m, n), condition, make in self._cases()
            for dtype in self.dtypes
        ]

    def _cases(self) -> Iterator[tuple[str, tuple[int, int], float, Any]]:
        """Yield (name of the layer or "", shape (m, n), condition number, function) for each case.

        The function has no arguments. It returns matrices G and their polar factors, each a stack `[N, m, n]`.
        """
        if self.record is None:
            for shape in self.shapes:
                for condition in self.conditions:
                    yield "", shape, condition, partial(self._matrices, shape, condition)
            return
        found = next(islice(gradients_of(self.record, self.steps), self.steps, None))
        for name, g in ((name, g.double()) for name, g in found.items() if max(g.shape) <= LONGEST):
            u, s, vh = torch.linalg.svd(g[None], full_matrices=False)
            condition = float(s[0, 0] / s[0, -1].clamp_min(1e-300))
            yield name, (g.shape[0], g.shape[1]), condition, partial(tuple, (g[None], u @ vh))

    def _cast(self, make: Any, dtype: str) -> tuple[Tensor, Tensor]:
        g, exact = make()
        return g.to(self.target_device(), getattr(torch, dtype)), exact.to(self.target_device())

    def _matrices(self, shape: tuple[int, int], condition: float) -> tuple[Tensor, Tensor]:
        """Return random matrices G and their polar factors U V^T in float64, each `[N, m, n]`.

        shape: m and n.
        condition: largest over smallest singular value of G.
        """
        m, n = shape
        r = min(m, n)
        u = orthogonal(self.count, m, self.seed)[:, :, :r]
        v = orthogonal(self.count, n, self.seed + 1)[:, :, :r]
        s = torch.from_numpy(np.geomspace(1, 1 / condition, r)) if r > 1 else torch.ones(1, dtype=torch.float64)
        return (u * s) @ v.mT, u @ v.mT

    def label(self, candidate: PolarSolver) -> str:
        return label(candidate, always=("coefficients",))

    def measure(self, candidate: PolarSolver, given: tuple[Tensor, Tensor]) -> Iterator[Row]:
        g, exact = given
        x = candidate.polar(g).double()
        values = torch.linalg.svdvals(x)
        yield {
            "low": float(values.min()),
            "high": float(values.max()),
            "distance": worst_of(relative_error(x, exact)),
            "milliseconds": self.milliseconds(lambda: candidate.polar(g)) / len(g),
        }

    def table(self) -> Table:
        near, where = only(self._near), f"condition <= {self.advised:g}"
        return Table(
            "polar factors: the worst over condition numbers",
            {"solver": "candidate", "m": "m", "n": "n", "dtype": "dtype"},
            {
                f"band, {where}": lambda rows: _band(near(rows)),
                f"distance, {where}": cell("distance", "max", scientific, near),
                "band, all": _band,
                "ms": cell("milliseconds", "median", milli),
            },
        )

    def _near(self, row: Row) -> bool:
        return bool(row["condition"] <= self.advised)

    def panels(self) -> tuple[Panel, Panel]:
        band, y = self.threshold, "distance to the polar factor"
        cost = per(lambda row: (row["m"], row["n"]), reduction("milliseconds"), reduction("distance", "worst"))
        return (
            Panel("ms per matrix, a point for each shape", f"{y}, condition ≤ {self.advised:g}", {"{}": cost},
                  self._near, same=("dtype",), band=band),
            Panel("condition number", y, {"{}": xy("condition", "distance")},
                  same=("dtype",), largest=() if self.own else ("m", "n"), band=band),
        )  # fmt: skip

    def recommendations(self) -> Sequence[Recommendation]:
        few = self.own or min(self.conditions) > self.advised
        return self.recommended(
            lambda row: f"polar factor, {row['m']} x {row['n']}, {row['dtype']}",
            error=reduction("distance", "worst"), error_name="worst distance", threshold=self.threshold,
            keep=bool if few else self._near,
        )  # fmt: skip


def _band(rows: Sequence[Row]) -> str:
    """Return the text "A - B", where A is the least and B the largest singular value of the results in all rows."""
    return f"{reduction('low', 'min')(rows):.3f} - {reduction('high', 'max')(rows):.3f}"
