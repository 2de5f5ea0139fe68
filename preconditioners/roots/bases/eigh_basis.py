"""Eigenbases by eigendecomposition: exact up to rounding."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import may_branch_on_values

from ..base import Basis, BasisSolver, eigh
from .power_qr import off_diagonal, unit_sized


class EighBasis(BasisSolver):
    """Eigenvectors by eigendecomposition, columns by descending (or ascending) eigenvalue.

    With a tolerance a matrix keeps its basis bit for bit, order included, while ||B - diag B||_F <= tolerance ||B||_F
    for B = Q^T A Q (Eschenhagen et al. 2025, arXiv:2506.03595). On a CPU it is then not decomposed; a device is not
    asked, decomposes all matrices and masks the results.
    """

    kind: Literal["eigh"] = "eigh"
    order: Literal["descending", "ascending"] = Field(
        default="descending", description="order of the columns by eigenvalue"
    )
    tolerance: float = Field(
        default=0.0, ge=0, lt=1, description="off-diagonal part of Q^T A Q that is good enough; 0: always decompose"
    )

    on_host: bool = Field(
        default=False, description="copy matrices of an accelerator to the host and decompose them there"
    )

    def runs_on(self, device: str) -> str:
        return "cpu" if self.on_host else device

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        if first or self.tolerance == 0:
            return Basis(*self._decomposed(a))
        scaled, ok = unit_sized(a)
        due = off_diagonal(torch.bmm(q.mT, torch.bmm(scaled, q)), self.tolerance)
        if not may_branch_on_values(a):
            vectors, _, fine = self._decomposed(a)
            return Basis(torch.where(due[:, None, None], vectors, q), None, torch.where(due, fine, ok))
        q = q.clone()
        if bool(due.any()):
            q[due], _, ok[due] = self._decomposed(a[due])
        return Basis(q, None, ok)

    def _decomposed(self, a: Tensor) -> tuple[Tensor, None, Tensor]:
        _, vectors, ok = eigh(a, self.on_host)
        return vectors.flip(-1) if self.order == "descending" else vectors, None, ok
