"""Eigenbases by orthogonal iteration, warm-started: a power step and a QR (Vyas et al. 2024, Algorithm 4)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import Basis, BasisSolver, eigh


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
            _, vectors, ok = eigh(a)
            return Basis(vectors.flip(-1), None, ok)
        ok = a.isfinite().all(-1).all(-1)
        a = torch.where(ok[:, None, None], a, 0.0)
        order = torch.arange(q.shape[-1], device=q.device).expand(q.shape[:-1])
        aq = torch.bmm(a, q)
        for step in range(self.steps):
            aq = torch.bmm(a, q) if step else aq
            descending = (q * aq).sum(-2).argsort(dim=-1, descending=True, stable=True)  # [N, d]
            order = order.gather(-1, descending)
            columns = descending.unsqueeze(-2).expand_as(q)
            q = self._orthonormal(aq.gather(-1, columns), q.gather(-1, columns))
        return Basis(q, order, ok & q.isfinite().all(-1).all(-1))

    def _orthonormal(self, aq: Tensor, q: Tensor) -> Tensor:
        """qr(aq).Q with signs that continue q; columns are scaled first, so that no size of A over- or underflows."""
        size = torch.linalg.vector_norm(aq, ord=float("inf"), dim=(-2, -1), keepdim=True)
        live = size > torch.finfo(aq.dtype).tiny
        # Householder vectors to Q directly: torch.linalg.qr would also form R
        new = torch.linalg.householder_product(*torch.geqrf(torch.where(live, aq / size.where(live, 1.0), q)))
        flip = torch.where((new * q).sum(-2, keepdim=True) < 0, -1.0, 1.0)
        signed: Tensor = new * flip
        return signed
