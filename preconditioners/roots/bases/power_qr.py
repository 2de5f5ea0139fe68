"""Eigenbases by orthogonal iteration, warm-started: a power step and a QR (Vyas et al. 2024, Algorithm 4)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ..base import Basis, BasisSolver, leading_eigenvectors
from .orthogonal_iteration import householder, identity_order, ordered_step


class PowerQR(BasisSolver):
    """Q <- qr(A Q[:, o]).Q,  o = columns by descending diag(Q^T A Q);  the first basis is eigh(A).

    Sorting is what makes repeated single steps converge to the eigenvectors (Rutishauser's orthogonal iteration needs
    the dominant columns first); in ascending order the iteration does not settle.
    """

    kind: Literal["power_qr"] = "power_qr"
    steps: int = Field(default=1, ge=1, le=100, description="power steps in one refresh")
    bootstrap: bool = Field(
        default=True, description="take the first basis from an eigendecomposition instead of the identity"
    )

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        if first and self.bootstrap:
            return leading_eigenvectors(a)
        ok = a.isfinite().all(-1).all(-1)
        a = torch.where(ok[:, None, None], a, 0.0)
        order = identity_order(q)
        for _ in range(self.steps):
            q, order = ordered_step(torch.bmm(a, q), q, order, householder)
        return Basis(q, order, ok & q.isfinite().all(-1).all(-1))
