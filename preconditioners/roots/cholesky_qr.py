"""Eigenbases by orthogonal iteration with Cholesky QR, which uses products and triangular solves in place of
Householder QR.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import (
    apply_aligned,
    finite_blocks,
    identity_like,
    known_to_hold,
    may_branch_on_values,
    where_blocks,
)

from .base import Basis, BasisSolver, MatrixSolver
from .decompositions import leading_eigenvectors, unit_sized
from .power_qr import PowerQR, householder, identity_order, ordered_step, same_signs

_MAX_ERROR = 32.0
"""Columns count as orthonormal if no entry of |Q^T Q - I| exceeds this number, in units of machine epsilon. Rounding
alone gives a few units.
"""


class CholeskyQR(BasisSolver):
    """Q <- orth(A Q[:, o]),  o = columns by descending diag(Q^T A Q);  orth(X): X <- X R^-1 with R^T R = X^T X + s I

    A `[N, d, d]` is the statistic, Q its basis, and orth is computed in `rounds` rounds (CholeskyQR2, Yamamoto et al.
    2015). The shift s is 0 in the last two rounds (if there are only two rounds, in the last one), and 4 d u in all
    rounds before (Fukaya et al. 2020), where u is the machine epsilon.

    Columns of X are scaled to length 1 before the first round. This does not change Q, and makes X well-conditioned for
    any spectrum once Q is close to the eigenvectors. If a column of Q is in the null space of A, its column of X has
    only rounding errors, and is replaced by the column of Q.

    Two rounds are enough for an X of condition number up to u^(-1/2). A direction that is new in A, or much larger than
    all other directions, makes columns of A Q nearly parallel. With two rounds in float32 nearly all refreshes of such
    matrices fail on a device. With `wide: true` the rounds are computed in float64 (as in Yamazaki, Tomov & Dongarra
    2015). Two such rounds orthonormalize a float32 X of condition number up to about 1e8, up to the final rounding to
    float32. `by_device` replaces `power_qr` by the solver with `wide: true`, and with three rounds for float64.

    On a CPU, a matrix whose result is not orthonormal is solved again by Householder QR. On a device, where the host
    would have to wait for the list of such matrices, the matrix keeps its basis and counts as failed.
    """

    kind: Literal["cholesky_qr"] = "cholesky_qr"
    steps: int = Field(default=1, ge=1, le=100, description="number of power steps in one refresh")
    rounds: int = Field(default=2, ge=2, le=8, description="number of rounds (Cholesky factorizations) in a step")
    wide: bool = Field(default=False, description="compute the rounds in float64")
    max_error: float = Field(
        default=_MAX_ERROR,
        ge=1,
        description="largest entry of |Q^T Q - I| that is accepted, in units of machine epsilon",
    )
    bootstrap: bool = Field(
        default=True, description="compute the first basis by an eigendecomposition; false: start from the identity"
    )

    @classmethod
    def equal_to(cls, other: MatrixSolver, dtype: torch.dtype) -> Self | None:
        if not isinstance(other, PowerQR):
            return None
        rounds = 3 if dtype == torch.float64 else 2
        return cls(steps=other.steps, rounds=rounds, wide=True, bootstrap=other.bootstrap)

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        if first and self.bootstrap:
            return leading_eigenvectors(a)
        a, ok = unit_sized(a)
        order = identity_order(q)
        checks: list[Tensor] = []
        for _ in range(self.steps):
            q, order = ordered_step(torch.bmm(a, q), q, order, partial(self.orthonormal, checks=checks))
        return Basis(q, order, torch.stack([ok, finite_blocks(q), *checks]).all(0))

    def orthonormal(self, aq: Tensor, q: Tensor, checks: list[Tensor]) -> Tensor:
        """Return the orthonormal factor of aq, with the signs of q.

        aq: A Q `[N, d, r]`, the product of the matrices with their last bases.
        q: Q, the last bases. No column of the result has a negative product with its column of Q.
        checks: list to which a bool `[N]` is appended on a device. It is False where the factor is not orthonormal and
            q is returned instead.
        """
        x = _unit_columns(aq, q)
        new, good = self.cholesky(x)
        new = same_signs(new, q)
        if known_to_hold(good):
            return new
        if not may_branch_on_values(good):
            checks.append(good)
            return where_blocks(good, new, q)
        rows = (~good).nonzero().squeeze(1)
        new[rows] = householder(x[rows], q[rows])
        return new

    def cholesky(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Orthonormalize the columns of x by rounds of Cholesky QR. Return (q, good).

        q: orthonormal columns with the same span as the columns of x.
        good: bool `[N]`, True where q is orthonormal up to `max_error`.

        x: columns of length 1, `[N, d, r]`.
        """
        found = x.double() if self.wide else x
        for number in range(self.rounds):
            found = _round(found, number < max(1, self.rounds - 2))
        found = found.to(x.dtype)
        return found, _orthonormal(found, self.max_error * torch.finfo(x.dtype).eps)


def orthonormal_columns(x: Tensor, q: Tensor) -> Tensor:
    """Return orthonormal columns `[N, d, r]`. The first j columns span the first j columns of x, for every j, up to
    rounding.

    The function replaces Householder QR on devices, where Householder QR is a call of cuSOLVER for each matrix. The
    columns of x are scaled to length 1, and 2 u q is added to them, with u the machine epsilon. A column that depends
    linearly on the columns before it gets its direction from 2 u q, not from rounding errors. Where x is not finite, or
    the computed columns are not orthonormal, the result is q.

    x: `[N, d, r]`, d >= r.
    q: `[N, d, r]`, orthonormal columns.
    """
    found = _unit_columns(x, q).add(q, alpha=2 * torch.finfo(x.dtype).eps).double()
    for shifted in (True, True, False, False) if x.dtype == torch.float64 else (True, False):
        found = _round(found, shifted)
    good = _orthonormal(found, _MAX_ERROR * torch.finfo(x.dtype).eps)
    return where_blocks(good, found.to(x.dtype), q)


def _orthonormal(x: Tensor, max_error: float) -> Tensor:
    """Return bool `[N]`, True where the columns of x are orthonormal. It is False where x has nan.

    max_error: largest entry of |X^T X - I| that is accepted.
    """
    gram = torch.bmm(x.mT, x)
    error = (gram - identity_like(gram)).abs().amax((-2, -1))
    return error <= max_error


def _round(x: Tensor, shifted: bool) -> Tensor:
    """Return X R^-1 with R^T R = X^T X + s I, one round of Cholesky QR. R is the Cholesky factor.

    x: X `[N, d, r]`.
    shifted: True for the shift s = 4 r u, with u the machine epsilon; False for s = 0.
    """
    gram = torch.bmm(x.mT, x)
    shift = 4 * x.shape[-1] * torch.finfo(x.dtype).eps if shifted else 0
    lower, _ = apply_aligned(torch.linalg.cholesky_ex, gram + shift * identity_like(gram) if shifted else gram)
    if x.device.type != "cpu" and x.shape[-1] >= 2 * _LEAF:
        return torch.bmm(x, _inverse(lower).mT)
    quotient: Tensor = apply_aligned(
        lambda x, lower: torch.linalg.solve_triangular(lower.mT, x, upper=True, left=False), x, lower
    )
    return quotient


_LEAF = 64
"""Least order of the triangles into which `_inverse` divides a matrix. One call of cuBLAS inverts all of these
triangles.
"""


def _inverse(lower: Tensor) -> Tensor:
    """Return the inverses of lower triangular matrices `[N, d, d]`.

    A matrix is divided into two triangles on the diagonal and the block C below them. With the inverses A and B of the
    triangles, the block of the inverse is -B C A. These products are faster on a device than a triangular solve of full
    order.
    """
    n, d, leaves = *lower.shape[:2], 1
    while d % (2 * leaves) == 0 and d // (2 * leaves) >= _LEAF:
        leaves *= 2
    size = d // leaves
    blocks = lower.reshape(n, leaves, size, leaves, size)
    triangles = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1).reshape(-1, size, size)
    found: Tensor = torch.linalg.solve_triangular(triangles, identity_like(triangles).expand_as(triangles), upper=False)
    while leaves > 1:
        leaves, size = leaves // 2, 2 * size
        a, b = found.reshape(n * leaves, 2, size // 2, size // 2).unbind(1)
        pairs = lower.reshape(n, leaves, 2, size // 2, leaves, 2, size // 2)
        c = pairs[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1).reshape_as(a)
        found = a.new_zeros(n * leaves, size, size)
        found[:, : size // 2, : size // 2] = a
        found[:, size // 2 :, size // 2 :] = b
        found[:, size // 2 :, : size // 2] = torch.bmm(b, torch.bmm(c, a)).neg_()
    return found


def _unit_columns(aq: Tensor, q: Tensor) -> Tensor:
    """Return the columns of aq scaled to length 1.

    A column of aq that has only rounding errors is replaced by the column of q with the same index.
    """
    size = torch.linalg.vector_norm(aq, dim=-2, keepdim=True)  # [N, 1, d]
    live = size > torch.finfo(aq.dtype).eps * aq.shape[-2] * size.amax(-1, keepdim=True)
    return torch.where(live, aq / size.where(live, 1.0), q)
