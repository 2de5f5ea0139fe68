"""Eigenbases by orthogonal iteration with Cholesky QR: matrix products and triangular solves instead of Householder."""

from __future__ import annotations

from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import apply_aligned, finite_blocks, known_to_hold, may_branch_on_values, where_blocks

from ..base import Basis, BasisSolver, leading_eigenvectors
from .power_qr import PowerQR, householder, identity_order, ordered_step, same_signs, unit_sized


class CholeskyQR(BasisSolver):
    """Q <- orth(A Q[:, o]),  o = columns by descending diag(Q^T A Q);  orth(X): X <- X R^-1 with R^T R = X^T X + s I

    in `rounds` rounds, s = 4 d u in the first and 0 after it, u the unit of rounding (CholeskyQR2, Yamamoto et al.
    2015; the shift, Fukaya et al. 2020). Columns of X are scaled to length 1 before, which changes no Q and makes X
    well-conditioned, whatever the spectrum, once Q is near the eigenvectors. Columns of X that are only rounding,
    those of the null space, stay what they are in Q.
    A matrix whose result is not orthonormal is orthonormalised by Householder QR on a CPU. On a device, where the host
    would have to wait for which ones these are, it keeps its basis and counts as failed.
    """

    kind: Literal["cholesky_qr"] = "cholesky_qr"
    steps: int = Field(default=1, ge=1, le=100, description="power steps in one refresh")
    rounds: int = Field(default=2, ge=2, le=4, description="Cholesky factorisations in one step")
    max_error: float = Field(
        default=32.0, ge=1, description="largest |Q^T Q - I| that is accepted, in units of rounding, the spacing at 1"
    )
    bootstrap: bool = Field(
        default=True, description="take the first basis from an eigendecomposition instead of the identity"
    )

    @classmethod
    def equal_to(cls, other: BasisSolver, dtype: torch.dtype) -> Self | None:
        return cls(steps=other.steps, bootstrap=other.bootstrap) if isinstance(other, PowerQR) else None

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

        checks: on a device, `[N]` is added to it, False where the factor was not found and q is returned.
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
        """Orthonormal columns that span those of x, which have length 1; and `[N]`, whether they are orthonormal."""
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        rounding = torch.finfo(x.dtype).eps
        shift = 4 * x.shape[-1] * rounding
        for number in range(self.rounds):
            gram = torch.bmm(x.mT, x)
            lower, _ = apply_aligned(torch.linalg.cholesky_ex, gram if number else gram + shift * eye)
            x = apply_aligned(_divided, x, lower)
        error = (torch.bmm(x.mT, x) - eye).abs().amax((-2, -1))
        return x, error <= self.max_error * rounding  # False where a factorisation failed and left NaN


def _divided(x: Tensor, lower: Tensor) -> Tensor:
    quotient: Tensor = torch.linalg.solve_triangular(lower.mT, x, upper=True, left=False)
    return quotient


def _unit_columns(aq: Tensor, q: Tensor) -> Tensor:
    """The columns of aq at length 1; where a column is rounding only, that of q."""
    size = torch.linalg.vector_norm(aq, dim=-2, keepdim=True)  # [N, 1, d]
    live = size > torch.finfo(aq.dtype).eps * aq.shape[-2] * size.amax(-1, keepdim=True)
    return torch.where(live, aq / size.where(live, 1.0), q)
