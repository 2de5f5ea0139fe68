"""Eigenbases by orthogonal iteration, warm-started: a power step and a QR (Vyas et al. 2024, Algorithm 4).

The functions below the solver are shared by all warm-started bases.
Legend: N matrices A `[N, d, d]`; Q `[N, d, r]`, r <= d orthonormal columns; o `[N, r]`, where columns came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import apply_aligned, block_norm, finite_blocks, per_block, tiny, where_blocks

from ..base import Basis, BasisSolver, leading_eigenvectors

Orthonormal = Callable[[Tensor, Tensor], Tensor]
"""(A Q, Q) -> the orthonormal factor of A Q, with the signs of Q."""


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
        ok = finite_blocks(a)
        a = where_blocks(ok, a, 0.0)
        order = identity_order(q)
        for _ in range(self.steps):
            q, order = ordered_step(torch.bmm(a, q), q, order, householder)
        return Basis(q, order, ok & finite_blocks(q))


def unit_sized(a: Tensor) -> tuple[Tensor, Tensor]:
    """A / max |A|, which no product can overflow and whose eigenvectors are those of A; 0 where A is not finite.

    With it `[N]`, where A is finite.
    """
    ok = finite_blocks(a)
    a = where_blocks(ok, a, 0.0)
    return a / a.abs().amax((-2, -1), keepdim=True).clamp_min(tiny(a.dtype)), ok


def identity_order(q: Tensor) -> Tensor:
    """The order `[N, r]` of columns that stay where they are."""
    return torch.arange(q.shape[-1], device=q.device).expand(q.shape[0], -1)


def off_diagonal(b: Tensor, tolerance: float) -> Tensor:
    """`[N]`, whether ||B - diag B||_F > tolerance ||B||_F (Eschenhagen et al. 2025)."""
    rest = b - torch.diag_embed(b.diagonal(dim1=-2, dim2=-1))
    return block_norm(rest) > tolerance * block_norm(b)


def ordered_step(aq: Tensor, q: Tensor, order: Tensor, orthonormal: Orthonormal) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration, columns first sorted by descending diag(Q^T A Q); aq is A Q."""
    descending = (q * aq).sum(-2).argsort(dim=-1, descending=True, stable=True)  # [N, r]
    return orthonormal(_columns(aq, descending), _columns(q, descending)), order.gather(-1, descending)


def _columns(x: Tensor, order: Tensor) -> Tensor:
    """The columns of x `[N, d, r]` in that order `[N, r]`."""
    if len(x) == 1:  # takes half the time
        return x[0].index_select(-1, order[0]).unsqueeze(0)
    return x.gather(-1, order.unsqueeze(-2).expand_as(x))


def householder(aq: Tensor, q: Tensor) -> Tensor:
    """qr(aq).Q, with the signs of q; aq is scaled first, so that no size of A over- or underflows."""
    size = aq.abs().amax((-2, -1))  # [N]; torch's maximum norm takes twenty times as long
    live = size > torch.finfo(aq.dtype).tiny
    x = where_blocks(live, aq / per_block(size.where(live, 1.0), aq), q)
    return same_signs(apply_aligned(_orthonormal_factor, x), q)


def _orthonormal_factor(x: Tensor) -> Tensor:
    # Householder vectors to Q directly: torch.linalg.qr would also form R
    q: Tensor = torch.linalg.householder_product(*torch.geqrf(x))
    return q


def same_signs(new: Tensor, q: Tensor) -> Tensor:
    """The columns of `new`, none pointing away from the column of q in its place."""
    return new * torch.where((new * q).sum(-2, keepdim=True) < 0, -1.0, 1.0)
