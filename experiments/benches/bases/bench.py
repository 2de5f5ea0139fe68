"""Eigenbases of a drifting statistic: orthogonality, off-diagonal ratio and time of each solver, refresh by refresh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor

from eigengraft.component import checked
from eigengraft.preconditioners import BasisSolver

from ..common.bench import Bench
from ..common.declarations import Declaration, defaults, label, listed, require_distinct
from ..common.fields import DTYPES, MatrixDtypes, PositiveInts
from ..common.results import FigurePanel, ResultTable
from ..common.timing import milliseconds, worst
from ..problems.drift import drifting_statistic
from ..problems.spectra import Geometric, PowerLaw, Spectrum, Synthetic
from .rows import BasisRow
from .view import basis_advice, basis_panels, basis_summary

_PREFERRED: tuple[Declaration, ...] = (
    {"kind": "eigh"},
    {"kind": "power_qr"},
    {"kind": "power_qr", "steps": 2},
)


def _default_solvers() -> tuple[BasisSolver, ...]:
    return tuple(checked(BasisSolver, dict(item)) for item in defaults(BasisSolver, _PREFERRED))  # type: ignore[type-abstract]


class BasisBench(Bench):
    """Solvers x spectra x sizes x dtypes on A_k = beta A_(k-1) + (1 - beta) G G^T / d, refreshed every few steps.

    The columns of G have covariance U_t diag(lambda) U_t^T and U_t turns by `drift` radians per step, so that a warm
    start is as good as it is in training, and no better.
    """

    kind: Literal["bases"] = "bases"
    solvers: Annotated[tuple[BasisSolver, ...], BeforeValidator(listed)] = Field(
        default_factory=_default_solvers, strict=False, description="declarations, or kinds"
    )
    spectra: Annotated[tuple[Spectrum, ...], BeforeValidator(listed)] = Field(
        default=(Geometric(condition=1e4), PowerLaw()), strict=False, description="covariances of the gradients"
    )
    sizes: PositiveInts = Field(default=(16, 64, 128), strict=False, description="d of the matrices d x d")
    dtypes: MatrixDtypes = Field(default=("float32",), strict=False, description="dtypes of the matrices")
    refreshes: PositiveInts = Field(
        default=(1, 2, 4, 8, 16, 32), strict=False, description="numbers of refreshes after which bases are measured"
    )
    every: int = Field(default=10, ge=1, description="steps between refreshes")
    beta: float = Field(default=0.95, ge=0, lt=1, description="decay of the statistic, per step")
    drift: float = Field(default=0.002, ge=0, description="turn of the gradients' basis, in radians per step")
    count: int = Field(default=4, ge=1, description="matrices in a stack")
    threshold: float = Field(default=0.2, gt=0, description="largest off-diagonal ratio that the advice accepts")
    candidate_field: ClassVar[str] = "solvers"
    quick_fields: ClassVar[dict[str, Any]] = {
        "sizes": [16, 32],
        "refreshes": [1, 2, 4, 8],
        "count": 2,
        "seconds": 0.005,
    }

    @field_validator("solvers")
    @classmethod
    def _distinct(cls, solvers: tuple[BasisSolver, ...]) -> tuple[BasisSolver, ...]:
        require_distinct(solvers, label)
        return solvers

    @field_validator("spectra")
    @classmethod
    def _synthetic(cls, spectra: tuple[Spectrum, ...]) -> tuple[Spectrum, ...]:
        for spectrum in spectra:
            if not isinstance(spectrum, Synthetic):
                raise ValueError(f"spectra that gradients can be drawn from are required, got '{label(spectrum)}'")
        return spectra

    def cells(self) -> int:
        return len(self.solvers) * len(self.spectra) * len(self.sizes) * len(self.dtypes)

    def measure(self) -> Iterator[list[BasisRow]]:
        device = self.target_device()
        synthetic = [spectrum for spectrum in self.spectra if isinstance(spectrum, Synthetic)]
        for size, spectrum in ((size, spectrum) for size in self.sizes for spectrum in synthetic):
            path = drifting_statistic(self, spectrum, size)
            for dtype in self.dtypes:
                given = [a.to(device, DTYPES[dtype]) for a in path]
                for solver in self.solvers:
                    yield self._rows(solver, given, spectrum)

    def _rows(self, solver: BasisSolver, path: Sequence[Tensor], spectrum: Synthetic) -> list[BasisRow]:
        d = path[0].shape[-1]
        q = torch.eye(d, solver.columns(d), dtype=path[0].dtype, device=path[0].device).repeat(self.count, 1, 1)
        rows, ok = [], 1.0
        for k, a in enumerate(path, start=1):
            old = q.clone()
            found = solver.basis(a, q, k == 1)
            q = torch.where(found.ok[:, None, None], found.q, old)
            ok = min(ok, float(found.ok.double().mean()))
            if k in self.refreshes:
                took = milliseconds(lambda a=a, old=old, k=k: solver.basis(a, old, k == 1), self.threads, self.seconds)  # type: ignore[misc]
                rows.append(self._row(solver, spectrum, a, q, (k, ok, took / self.count)))
        return rows

    def _row(
        self, solver: BasisSolver, spectrum: Synthetic, a: Tensor, q: Tensor, at: tuple[int, float, float]
    ) -> BasisRow:
        a, dtype, q = a.double(), str(a.dtype).removeprefix("torch."), q.double()
        rotated = q.mT @ a @ q
        diagonal = rotated.diagonal(dim1=-2, dim2=-1)
        off = torch.linalg.matrix_norm(rotated - torch.diag_embed(diagonal)) / torch.linalg.matrix_norm(rotated)
        largest = torch.linalg.eigvalsh(a).flip(-1)[:, : q.shape[-1]]
        distance = (diagonal.sort(-1, descending=True).values - largest).abs().sum(-1) / largest.sum(-1)
        identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
        return BasisRow(
            candidate=label(solver),
            declaration=solver.declaration(),
            device=self.device,
            spectrum=label(spectrum),
            size=a.shape[-1],
            dtype=dtype,
            refresh=at[0],
            columns=q.shape[-1],
            orthogonality=worst((q.mT @ q - identity).abs()),
            offdiagonal=worst(off),
            eigenvalues=worst(distance),
            ok=at[1],
            milliseconds=at[2],
        )

    def summary(self, rows: Sequence[BasisRow]) -> ResultTable:
        return basis_summary(rows)

    def panels(self, rows: Sequence[BasisRow]) -> tuple[FigurePanel, FigurePanel]:
        return basis_panels(rows, self.threshold)

    def advice(self, rows: Sequence[BasisRow]) -> list[str]:
        return basis_advice(rows, self.threshold)
