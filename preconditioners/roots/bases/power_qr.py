"""Eigenbases by orthogonal iteration, warm-started: a power step and a QR (Vyas et al. 2024, Algorithm 4).

The functions below the solver are shared by all warm-started bases.
Legend: N matrices A `[N, d, d]`; Q `[N, d, r]`, r <= d orthonormal columns; o `[N, r]`, where columns came from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import (
    apply_aligned,
    block_norm,
    finite_blocks,
    per_block,
    tiny,
    transposed,
    where_blocks,
)

from ..base import Basis, BasisSolver, Diagonal, leading_eigenvectors

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
        return leading_eigenvectors(a) if first and self.bootstrap else self._iterated(a, q)[0]

    def basis_and_diagonal(self, a: Tensor, q: Tensor, first: bool) -> tuple[Basis, Diagonal | None]:
        if self.steps > 1 or (first and self.bootstrap):
            return self.basis(a, q, first), None
        basis, factors = self._iterated(a, q)
        return basis, None if basis.order is None else partial(factors.diagonal, basis.order)

    def _iterated(self, a: Tensor, q: Tensor) -> tuple[Basis, QRFactors]:
        ok = finite_blocks(a)
        a = where_blocks(ok, a, 0.0)
        order, q = identity_order(q), _by_columns(q)
        for _ in range(self.steps):
            aq = torch.bmm(q.mT, a).mT  # A Q by columns, as A is symmetric
            aq, q, order = in_order(aq, q, order)
            factors = QRFactors.of(aq, q)
            q = factors.q
        return Basis(transposed(q.mT), order, ok & finite_blocks(q)), factors


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
    aq, q, order = in_order(aq, q, order)
    return orthonormal(aq, q), order


def in_order(aq: Tensor, q: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """aq, q and order with columns sorted by descending diag(Q^T A Q); aq is A Q."""
    descending = (q * aq).sum(-2).argsort(dim=-1, descending=True, stable=True)  # [N, r]
    return _columns(aq, descending), _columns(q, descending), order.gather(-1, descending)


def _by_columns(x: Tensor) -> Tensor:
    """x `[N, d, r]` with the entries of each column side by side in memory, as LAPACK takes and returns them."""
    return x if x.mT.is_contiguous() else transposed(x).mT


def _columns(x: Tensor, order: Tensor) -> Tensor:
    """The columns of x `[N, d, r]` in that order `[N, r]`."""
    if x.mT.is_contiguous():
        n, d, r = x.shape
        rows = (order + torch.arange(0, n * r, r, device=order.device)[:, None]).flatten()
        return x.mT.reshape(n * r, d).index_select(0, rows).reshape(n, r, d).mT
    if len(x) == 1:  # takes half the time
        return x[0].index_select(-1, order[0]).unsqueeze(0)
    return x.gather(-1, order.unsqueeze(-2).expand_as(x))


def householder(aq: Tensor, q: Tensor) -> Tensor:
    """qr(aq).Q, with the signs of q; aq is scaled first, so that no size of A over- or underflows."""
    return QRFactors.of(aq, q).q


class QRFactors(NamedTuple):
    """qr(X) of X `[N, d, r]`, whose R nobody may need.

    q `[N, d, r]`; packed `[N, d, r]`: R as LAPACK leaves it, with other numbers below the diagonal; scale `[N, r]`:
    what its rows are multiplied by, 0 where X is 0.
    """

    q: Tensor
    packed: Tensor
    scale: Tensor

    @classmethod
    def of(cls, x: Tensor, q: Tensor) -> QRFactors:
        """Q with the signs of q, and q where x is 0; x is scaled first, so that no size of it over- or underflows."""
        size = x.abs().amax((-2, -1))  # [N]; torch's maximum norm takes twenty times as long
        live = size > torch.finfo(x.dtype).tiny
        new, packed = apply_aligned(_factored, where_blocks(live, x / per_block(size.where(live, 1.0), x), q))
        signs = _signs(new, q)
        return cls(new * signs, packed, signs.squeeze(-2) * size.where(live, 0.0)[:, None])

    def diagonal(self, order: Tensor, rotation: Tensor) -> Tensor:
        """diag(Q^T A Q) `[N, d]` if X is A q[:, order]: that of R q[:, order]^T Q, as q q^T = I; rotation: q^T Q."""
        sorted_rows = _columns(rotation.mT, order).mT
        triangle = self.packed.mT.tril_()  # in place: its vectors are in Q by now
        return sorted_rows.mul_(triangle).sum(-2) * self.scale


def _factored(x: Tensor) -> tuple[Tensor, Tensor]:
    # Householder vectors to Q directly: torch.linalg.qr would also copy R
    packed, tau = torch.geqrf(x)
    return torch.linalg.householder_product(packed, tau), packed


def same_signs(new: Tensor, q: Tensor) -> Tensor:
    """The columns of `new`, none pointing away from the column of q in its place."""
    return new * _signs(new, q)


def _signs(new: Tensor, q: Tensor) -> Tensor:
    return torch.where((new * q).sum(-2, keepdim=True) < 0, -1.0, 1.0)
