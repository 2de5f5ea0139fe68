"""Eigenbases by as much orthogonal iteration as each matrix needs (Eschenhagen et al. 2025, arXiv:2506.03595)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import finite_blocks, may_branch_on_values

from ..base import Basis, BasisSolver, leading_eigenvectors
from .power_qr import householder, identity_order, off_diagonal, ordered_step, unit_sized


class AdaptiveQR(BasisSolver):
    """Q <- qr(A Q[:, o]).Q  until ||B - diag B||_F <= tolerance ||B||_F;  B = Q^T A Q, o = columns by descending diag B

    The error of Q diag(B) Q^T as an approximation of A, relative in the Frobenius norm, is that ratio. A matrix whose
    basis is good enough keeps it bit for bit; on a CPU nothing more is done for it. A device is not asked how far its
    matrices are: all of them take `max_steps`, and those that are done are masked.
    """

    kind: Literal["adaptive_qr"] = "adaptive_qr"
    tolerance: float = Field(default=0.1, ge=0, lt=1, description="off-diagonal part of Q^T A Q that is good enough")
    max_steps: int = Field(default=5, ge=1, le=1000, description="bound on power steps in one refresh")
    bootstrap: bool = Field(
        default=True, description="take the first basis from an eigendecomposition instead of the identity"
    )

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        if first and self.bootstrap:
            return leading_eigenvectors(a)
        a, ok = unit_sized(a)
        q, order = self.gathered(a, q) if may_branch_on_values(a) else self.masked(a, q)
        return Basis(q, order, ok & finite_blocks(q))

    def masked(self, a: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """The new basis and its order, every matrix carried along to the end."""
        order = identity_order(q)
        for _ in range(self.max_steps):
            aq = torch.bmm(a, q)
            due = off_diagonal(torch.bmm(q.mT, aq), self.tolerance)
            stepped, places = ordered_step(aq, q, order, householder)
            q = torch.where(due[:, None, None], stepped, q)
            order = torch.where(due[:, None], places, order)
        return q, order

    def gathered(self, a: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """The new basis and its order, a matrix dropped as soon as it is done."""
        q, order = q.clone(), identity_order(q).clone()
        rows = torch.arange(len(q), dtype=torch.int64, device=q.device)
        for _ in range(self.max_steps):
            active = q[rows]
            aq = torch.bmm(a[rows], active)
            due = off_diagonal(torch.bmm(active.mT, aq), self.tolerance)
            rows = rows[due]
            if not len(rows):
                break
            q[rows], order[rows] = ordered_step(aq[due], active[due], order[rows], householder)
        return q, order
