"""Basis solvers that no shipped recipe names.

`QRIteration` reproduces the QR algorithm of Distributed Shampoo, for comparison. `Subspace` keeps the leading
eigenvectors only, by block power iteration (Golub & Van Loan 2013, section 8.2.4).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import apply_aligned, finite_blocks, identity_like, may_branch_on_values

from ..roots.base import Basis, BasisSolver
from ..roots.decompositions import eigh, leading_eigenvectors, off_diagonal, unit_sized
from ..roots.power_qr import householder, identity_order, ordered_step, same_signs


class QRIteration(BasisSolver):
    """B = Q^T (A + eps I) Q;  `steps` times, while B is not diagonal:  q r = qr(B),  B <- r q,  Q <- Q q;  Q <- Q[:, o]

    A is the statistic, Q its basis, and o the order of the columns by ascending (or descending) diag B. This is the QR
    option of eigenvalue-corrected Distributed Shampoo. Use it to reproduce runs of that code, and `power_qr` or
    `adaptive_qr` otherwise. Q is a product of many factors, one for each step. Unlike in the original code, one
    Newton-Schulz step at the end of a refresh keeps Q orthonormal.

    In ascending order the basis does not converge: a QR step moves dominant columns to the front, so that every refresh
    reverses the order. For a 32 x 32 matrix of condition number 100, ||B - diag B|| / ||B|| is still 0.7 after 64
    refreshes. In descending order it is 1e-5, and in exact arithmetic the result is that of `power_qr`.
    """

    kind: Literal["qr_iteration"] = "qr_iteration"
    steps: int = Field(default=1, ge=1, le=10_000, description="largest number of QR steps in a refresh")
    tolerance: float = Field(
        default=0.0, ge=0, lt=1, description="a matrix is done when ||B - diag B|| <= this * ||B||"
    )
    eps: float = Field(default=0.0, ge=0, description="ridge, in units of the matrix")
    order: Literal["ascending", "descending"] = Field(
        default="ascending", description="order of the columns by diag B, after the steps"
    )
    unit_free: ClassVar[bool] = False  # a ridge has the unit of the matrix
    bootstrap: bool = Field(
        default=False, description="compute the first basis by an eigendecomposition; false: start from the identity"
    )

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        descending = self.order == "descending"
        if first and self.bootstrap:
            _, vectors, ok = eigh(a)
            return Basis(vectors.flip(-1) if descending else vectors, None, ok)
        a, ok = unit_sized(a + self.eps * identity_like(a))
        b = torch.bmm(q.mT, torch.bmm(a, q))
        for _ in range(self.steps):
            due = off_diagonal(b, self.tolerance)[:, None, None]
            if may_branch_on_values(b) and not bool(due.any()):
                break
            turn = same_signs(apply_aligned(torch.linalg.qr, b)[0], identity_like(b))
            b = torch.where(due, turn.mT @ b @ turn, b)
            q = torch.where(due, torch.bmm(q, turn), q)
        order = b.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=descending, stable=True)
        q = q.gather(-1, order.unsqueeze(-2).expand_as(q))
        q = 1.5 * q - 0.5 * torch.bmm(q, torch.bmm(q.mT, q))
        return Basis(q, identity_order(q).gather(-1, order), ok & finite_blocks(q))


class Subspace(BasisSolver):
    """Q <- qr(A Q[:, o]).Q,  Q `[N, d, r]`,  o = columns by descending diag(Q^T A Q);  the first basis is of eigh(A)

    A `[N, d, d]` is the statistic, and r = min(rank, d). The span of Q converges to the span of the r leading
    eigenvectors. Each step multiplies the error by lambda_(r+1) / lambda_r, where lambda_1 >= lambda_2 >= ... are the
    eigenvalues of A.

    If the leading eigenvectors of A change later, Q turns towards a new one only as far as that vector has a component
    in the span of Q. A vector that is orthogonal to the span has such a component only from rounding errors.
    """

    kind: Literal["subspace"] = "subspace"
    rank: int = Field(default=32, ge=1, description="largest number r of eigenvectors that are kept")
    steps: int = Field(default=1, ge=1, le=100, description="number of power steps in one refresh")

    def columns(self, d: int) -> int:
        return min(self.rank, d)

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        if first:
            return leading_eigenvectors(a, self.columns(a.shape[-1]))
        a, ok = unit_sized(a)
        order = identity_order(q)
        for _ in range(self.steps):
            q, order = ordered_step(torch.bmm(a, q), q, order, householder)
        return Basis(q, order, ok & finite_blocks(q))
