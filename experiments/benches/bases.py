"""A bench of solvers for the eigenbasis of a matrix that drifts, as statistics of gradients do in training.

After several refreshes it measures how orthogonal the basis is, how far it is from the eigenvectors, and the time of a
refresh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from eigengraft.preconditioners import BasisSolver

from .bench import Column, Declaration, Listed, MatrixDtypes, PositiveInts, Problem, default_members, label
from .matrices import (
    Geometric,
    MatrixBench,
    PowerLaw,
    Spectrum,
    Synthetic,
    orthogonal,
    trained_factors,
    with_unit_norm,
    worst_of,
)
from .view import Panel, Recommendation, Row, Table, cell, milli, number_of, only, reduction, scientific

_PREFERRED: tuple[Declaration, ...] = ({"kind": "eigh"}, {"kind": "power_qr"}, {"kind": "power_qr", "steps": 2})


class BasisBench(MatrixBench):
    """Measure every basis solver on a statistic whose eigenvectors turn slowly, for every spectrum, size and dtype.

    A_k = beta A_(k-1) + (1 - beta) G G^T / d is the statistic at step k, and G `[d, d]` is the gradient of this step. A
    solver refreshes the eigenbasis of A_k every `every` steps. The columns of G have covariance U_k diag(lambda) U_k^T,
    where lambda is the spectrum. The eigenvectors U_k turn by `drift` radians per step, so that a solver starts from a
    basis that is slightly out of date, as in training.

    If `record` names a run, the statistics are computed from the gradients of this run. If `checkpoint` names a saved
    state, the statistic is that of the state, the same at every refresh.
    """

    kind: Literal["bases"] = "bases"
    solvers: Listed[BasisSolver] = Field(
        default_factory=default_members(BasisSolver, _PREFERRED),
        description="basis solvers to measure, each a kind or a declaration",
    )
    spectra: Listed[Spectrum] = Field(
        (Geometric(condition=1e4), PowerLaw()), description="spectra of the covariances of the gradients"
    )
    dtypes: MatrixDtypes = Field(("float32",), description="dtypes of the matrices")
    refreshes: PositiveInts = Field(
        (1, 2, 4, 8, 16, 32), description="numbers of refreshes after which bases are measured"
    )
    every: int = Field(10, ge=1, description="steps between refreshes")
    beta: float = Field(0.95, ge=0, lt=1, description="decay of the statistic, per step")
    drift: float = Field(0.002, ge=0, description="turn of the gradients' basis, in radians per step")
    threshold: float = Field(
        0.2, gt=0, description="largest ratio ||offdiag(B)||_F / ||B||_F with B = Q^T A Q that the advice accepts"
    )
    made_fields: ClassVar[tuple[str, ...]] = (*MatrixBench.made_fields, "drift")
    candidate_field: ClassVar[str] = "solvers"
    columns: ClassVar[Mapping[str, Column]] = {
        "refresh": Column("number of refreshes before the measurement"),
        "columns": Column("columns of Q"),
        "orthogonality": Column("max |Q^T Q - I|, the worst of the stack"),
        "offdiagonal": Column("||offdiag(B)||_F / ||B||_F with B = Q^T A Q in float64, the worst of the stack"),
        "eigenvalues": Column("sum |diag(B) - lambda| / sum lambda over the largest lambda of A, one for each column"),
        "ok": Column("least share of the stack that the solver accepted in any refresh so far"),
        "milliseconds": Column("time of one matrix", "ms"),
    }
    quick_fields: ClassVar[dict[str, Any]] = {
        "sizes": [16, 32], "refreshes": [1, 2, 4, 8], "count": 2, "seconds": 0.005
    }  # fmt: skip

    @field_validator("spectra")
    @classmethod
    def _synthetic(cls, spectra: tuple[Spectrum, ...]) -> tuple[Spectrum, ...]:
        for spectrum in spectra:
            if not isinstance(spectrum, Synthetic):
                raise ValueError(
                    f"gradients cannot be drawn from '{label(spectrum)}', which has matrices and no eigenvalues; give "
                    "a spectrum such as power_law"
                )
        return spectra

    def idle_fields(self) -> dict[str, str]:
        found = {"steps": "the statistic of a `record` is that of `every` times the largest of `refreshes` steps"}
        if self.checkpoint is not None:
            found |= dict.fromkeys(("every", "beta"), "the statistic of a `checkpoint` is the same at every refresh")
        return super().idle_fields() | found

    def problems(self) -> Sequence[Problem]:
        return [
            Problem({"spectrum": name, "size": size, "dtype": dtype}, partial(self._cast, path, dtype))
            for name, size, path in self._paths()
            for dtype in self.dtypes
        ]

    def _paths(self) -> Iterator[tuple[str, int, Any]]:
        """Yield (name, size, function) for each statistic on which solvers are measured.

        The name is the label of a spectrum, or the names of a parameter and its factor. The size is the order d. The
        function has no arguments, and returns the statistic at every refresh as a list of tensors `[N, d, d]`.
        """
        last = max(self.refreshes)
        if self.record is not None:
            at = tuple(range(self.every, last * self.every + 1, self.every))
            for name, path in trained_factors(self.record, at, self.beta).items():
                yield name, path[0].shape[-1], partial(list, path)
        elif self.checkpoint is not None:
            for source in self.sources():
                yield source.name, source.size, lambda stack=source.stack: [stack()] * last
        else:
            for size in self.sizes:
                for spectrum in (own for own in self.spectra if isinstance(own, Synthetic)):
                    yield label(spectrum), size, partial(self.drifting_statistic, spectrum, size)

    def _cast(self, path: Any, dtype: str) -> list[Tensor]:
        matrices = map(with_unit_norm, path()) if self.own else path()
        return [a.to(self.target_device(), getattr(torch, dtype)) for a in matrices]

    def drifting_statistic(self, spectrum: Synthetic, d: int) -> list[Tensor]:
        """Return the statistic A `[N, d, d]` at every refresh, in float64, bias corrected.

        A <- beta A + (1 - beta) G G^T / d,  G = U_k diag(sqrt lambda) Z_k,  Z_k standard normal `[d, d]`,
        U_k = U_0 exp((k - 1) drift K) in step k = 1, 2, ..., with K random, antisymmetric and of spectral norm 1.
        """
        random = np.random.default_rng((self.seed, d, 1))
        skew = torch.from_numpy(random.standard_normal((self.count, d, d)))
        skew = skew - skew.mT
        skew = skew / torch.linalg.matrix_norm(skew, ord=2).clamp_min(1e-300)[:, None, None]
        turn = torch.linalg.matrix_exp(self.drift * skew)
        u, scale = orthogonal(self.count, d, self.seed), spectrum.eigenvalues(d).sqrt()
        a, path = torch.zeros(self.count, d, d, dtype=torch.float64), []
        for step in range(1, max(self.refreshes) * self.every + 1):
            g = (u * scale) @ torch.from_numpy(random.standard_normal((self.count, d, d)))
            a = torch.baddbmm(a, g, g.mT, beta=self.beta, alpha=(1 - self.beta) / d)
            u = u @ turn
            if step % self.every == 0:
                path.append(a / (1 - self.beta**step))
        return path

    def measure(self, candidate: BasisSolver, given: list[Tensor]) -> Iterator[Row]:
        n, d, ok = len(given[0]), given[0].shape[-1], 1.0
        q = torch.eye(d, candidate.columns(d), dtype=given[0].dtype, device=given[0].device).repeat(n, 1, 1)
        for k, a in enumerate(given, start=1):
            old = q.clone()
            found = candidate.basis(a, q, k == 1)
            q = torch.where(found.ok[:, None, None], found.q, old)
            ok = min(ok, float(found.ok.double().mean()))
            if k in self.refreshes:
                time = self.milliseconds(partial(candidate.basis, a, old, k == 1))
                yield {"refresh": k, **_quality(a, q), "ok": ok, "milliseconds": time / n}

    def table(self) -> Table:
        late = only(self._late)
        return Table(
            f"eigenbases after {max(self.refreshes)} refreshes: the worst over spectra",
            {"solver": "candidate", "size": "size", "dtype": "dtype"},
            {
                "columns": cell("columns"),
                "orthogonality": cell("orthogonality", "max", scientific),
                "off-diagonal": cell("offdiagonal", "max", scientific, late),
                "eigenvalues": cell("eigenvalues", "max", scientific, late),
                "ok": cell("ok", "min", "{:.0%}".format, late),
                "ms": cell("milliseconds", "median", milli, late),
            },
        )

    def _late(self, row: Row) -> bool:
        return bool(row["refresh"] == max(self.refreshes))

    def panels(self) -> tuple[Panel, Panel]:
        band, ratio = self.threshold, "off-diagonal ratio of $Q^T A Q$"
        return (
            Panel("ms per matrix, a point for each size", f"{ratio} after the last refresh",
                  {"{}": lambda rows: [(row["milliseconds"], _drawn(row)) for row in rows]}, self._late,
                  same=("dtype", "spectrum"), band=band),
            Panel("refreshes", ratio, {"{}": lambda rows: [(row["refresh"], _drawn(row)) for row in rows]},
                  same=("dtype", "spectrum"), largest=("size",), band=band),
        )  # fmt: skip

    def recommendations(self) -> Sequence[Recommendation]:
        several = max(self.refreshes) > 1
        return self.recommended(
            lambda row: f"eigenbasis, {row['size']} x {row['size']}, {row['dtype']}, refresh from the last one",
            error=reduction("offdiagonal", "worst", "ok"), error_name="worst off-diagonal ratio",
            threshold=self.threshold,
            keep=lambda row: row["columns"] == row["size"] and (row["refresh"] > 1 or not several),
        )  # fmt: skip


def _quality(a: Tensor, q: Tensor) -> Row:
    """Return four columns of the results: three errors of the bases, and the number r of their columns.

    See `BasisBench.columns` for the errors.

    a: the statistics A `[N, d, d]`, whose eigenvectors the columns of the bases approximate.
    q: the bases Q `[N, d, r]` to measure.
    """
    a, q = a.double(), q.double()
    rotated = q.mT @ a @ q
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    off = torch.linalg.matrix_norm(rotated - torch.diag_embed(diagonal)) / torch.linalg.matrix_norm(rotated)
    top = torch.linalg.eigvalsh(a).flip(-1)[:, : q.shape[-1]]
    distance = (diagonal.sort(-1, descending=True).values - top).abs().sum(-1) / top.sum(-1)
    identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return {
        "columns": q.shape[-1],
        "orthogonality": worst_of((q.mT @ q - identity).abs()),
        "offdiagonal": worst_of(off),
        "eigenvalues": worst_of(distance),
    }


def _drawn(row: Row) -> float:
    """Return the number to draw for a row of the results: its column `offdiagonal`, but at least 1e-17, because a
    logarithmic axis has no 0.
    """
    return max(number_of(row, "offdiagonal"), 1e-17)
