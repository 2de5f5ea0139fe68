"""A bench of solvers for inverse roots, on matrices of several spectra, sizes and dtypes.

It measures the error, the residual, the number of iterations and the time of each solver. It also measures two shares:
that of the matrices that the solver accepts, and that of the matrices with a positive definite root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.preconditioners import RootSolver
from eigengraft.preconditioners.algebra.exponents import Rational

from .bench import Column, Declaration, Listed, MatrixDtypes, Problem, default_members, kinds_as, label
from .matrices import DampedBench, MatrixSource, angle, matrix_power, relative_error, worst_of
from .view import Panel, Recommendation, Row, Table, at_worst, cell, degrees, milli, per, reduction, scientific

_PREFERRED: tuple[Declaration, ...] = ({"kind": "eigh"}, {"kind": "eigh", "precision": "float64"})


def ridgeless(kind: str) -> Declaration:
    """Return the declaration of a solver whose fields `eps` and `floor` are 0, because the bench itself adds a ridge.

    A solver that has neither field, or does not accept 0, is declared by its kind alone.
    """
    member = RootSolver.members.get(kind)
    own: Declaration = {name: 0.0 for name in ("eps", "floor") if member is not None and name in member.model_fields}
    try:
        RootSolver.model_validate({"kind": kind, **own})
    except ValueError:
        return {"kind": kind}
    return {"kind": kind, **own}


RootSolvers = Annotated[tuple[RootSolver, ...], kinds_as(ridgeless)]
"""Solvers to measure. A solver that is declared by its kind alone has ridge 0."""
default_solvers = default_members(RootSolver, _PREFERRED, ridgeless)


class RootBench(DampedBench):
    """Measure every solver of roots (A + r I)^-e, for every exponent e, spectrum, size and dtype of A.

    r is `ridge` times the largest eigenvalue of A. The bench itself adds the ridge r I to A, so that all solvers have
    the same one. A solver that is declared by its kind alone adds no further ridge (`eps: 0`). A solver that is
    declared with fields is measured as declared. Times are per matrix.
    """

    kind: Literal["roots"] = "roots"
    solvers: RootSolvers = Field(
        default_factory=default_solvers, description="root solvers to measure, each a kind or a declaration"
    )
    dtypes: MatrixDtypes = Field(("float32",), description="dtypes of the matrices")
    exponents: Listed[Rational] = Field((Fraction(1, 4),), description="exponents e of the root A^-e")
    threshold: float = Field(0.05, gt=0, description="largest relative error of the root that the advice accepts")
    candidate_field: ClassVar[str] = "solvers"
    columns: ClassVar[Mapping[str, Column]] = {
        "condition": Column("largest over smallest eigenvalue of A + r I, the largest of the stack"),
        "error": Column("||X - Y||_F / ||Y||_F with Y = (A + r I)^-e in float64, the worst matrix not rejected"),
        "angle": Column("angle between X and Y, the worst matrix not rejected", "degrees"),
        "residual": Column("||X^p A^q - I||_F / sqrt(d) for e = q/p in float64, the worst matrix not rejected"),
        "reported": Column("the solver's own residual, the worst matrix not rejected"),
        "ok": Column("share of the stack that the solver did not reject"),
        "definite": Column("share of the stack whose root is positive definite"),
        "iterations": Column("most iterations of any matrix"),
        "milliseconds": Column("time of one matrix", "ms"),
    }
    quick_fields: ClassVar[dict[str, Any]] = {
        "sizes": [16, 32],
        "spectra": [*({"kind": "geometric", "condition": c} for c in (1e2, 1e4, 1e6)), "recorded"],
        "count": 4,
        "seconds": 0.005,
    }

    def problems(self) -> Sequence[Problem]:
        return [
            Problem(
                {"spectrum": source.name, "size": source.size, "dtype": dtype, "exponent": str(e)},
                partial(self._matrices, source, dtype, e),
            )
            for dtype in self.dtypes
            for source in self.sources()
            for e in self.exponents
        ]

    def _matrices(self, source: MatrixSource, dtype: str, exponent: Fraction) -> tuple[Tensor, Fraction] | None:
        a = source.stack()
        return None if a is None else (self.damped(a).to(self.target_device(), getattr(torch, dtype)), exponent)

    def label(self, candidate: RootSolver) -> str:
        return label(candidate, ridgeless)

    def measure(self, candidate: RootSolver, given: tuple[Tensor, Fraction]) -> Iterator[Row]:
        stack, exponent = given
        if reason := candidate.check(exponent):
            yield {"problem": reason}
            return
        found = candidate.root(stack, exponent)
        ok = found.ok & found.value.isfinite().all(-1).all(-1)
        x, a = found.value[ok].double(), stack[ok].double()
        reference, eigenvalues = matrix_power(a, -float(exponent)), torch.linalg.eigvalsh(stack.double())
        powers = torch.linalg.matrix_power(x, exponent.denominator) @ torch.linalg.matrix_power(a, exponent.numerator)
        rest = powers - torch.eye(stack.shape[-1], dtype=x.dtype, device=x.device)
        definite = torch.linalg.eigvalsh((x + x.mT) / 2)[:, :1].amin(-1) > 0
        time = self.milliseconds(lambda: candidate.root(stack, exponent))
        yield {
            "condition": worst_of(eigenvalues[:, -1] / eigenvalues[:, 0]),
            "error": worst_of(relative_error(x, reference)),
            "angle": worst_of(angle(x, reference)),
            "residual": worst_of(torch.linalg.matrix_norm(rest)) / stack.shape[-1] ** 0.5,
            "reported": worst_of(found.residual[ok].double()),
            "ok": float(ok.double().mean()),
            "definite": float(definite.double().sum() / len(stack)),
            "iterations": int(found.iterations.max()),
            "milliseconds": time / len(stack),
        }

    def table(self) -> Table:
        return Table(
            "inverse roots: the worst and the median over matrices",
            {"solver": "candidate", "size": "size", "dtype": "dtype", "e": "exponent"},
            {
                "error: median": cell("error", "median", scientific),
                "worst": cell("error", "worst", scientific),
                "at": cell("spectrum", of=at_worst("error")),
                "angle": cell("angle", "max", degrees),
                "residual": cell("residual", "max", scientific),
                "ok": cell("ok", "min", "{:.0%}".format),
                "definite": cell("definite", "min", "{:.0%}".format),
                "iterations": cell("iterations", "max", "{:.0f}".format),
                "ms": cell("milliseconds", "median", milli),
            },
        )

    def panels(self) -> tuple[Panel, Panel]:
        cost = per(lambda row: row["size"], reduction("milliseconds"), reduction("error"))
        band, same = self.threshold, ("dtype", "exponent")
        return (
            Panel("ms per matrix, a point for each size", "median relative error", {"{}": cost}, same=same, band=band),
            self.sweep("error", "worst relative error", same, band),
        )

    def recommendations(self) -> Sequence[Recommendation]:
        return self.recommended(
            lambda row: f"A^(-{row['exponent']}), {row['size']} x {row['size']}, {row['dtype']}",
            error=reduction("error", "worst", "ok", "definite"), error_name="worst error", threshold=self.threshold,
        )  # fmt: skip
