"""The leading eigenvectors only, by block power iteration, warm-started (Golub and Van Loan 2013, section 8.2.4)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import finite_blocks

from ..base import Basis, BasisSolver, leading_eigenvectors
from .power_qr import householder, identity_order, ordered_step, unit_sized


class Subspace(BasisSolver):
    """Q <- qr(A Q[:, o]).Q,  Q `[N, d, r]`,  o = columns by descending diag(Q^T A Q);  the first basis is of eigh(A)

    r = min(rank, d). The span tends to that of the r leading eigenvectors, with lambda_(r+1) / lambda_r a step. A
    direction that A gains later is found only through the part of it that lies in the span of Q, so that one
    orthogonal to all that has been seen waits for rounding to raise it.
    """

    kind: Literal["subspace"] = "subspace"
    rank: int = Field(default=32, ge=1, description="how many eigenvectors are kept, r")
    steps: int = Field(default=1, ge=1, le=100, description="power steps in one refresh")

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
