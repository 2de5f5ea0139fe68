"""Orthogonalization by one triangular solve (MUD, Southworth & Thomas 2026, arXiv:2603.17970)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import safe_ratio, tiny

from .solvers import PolarSolver


class Triangular(PolarSolver):
    """Q <- rows(tril(Q Q^T)^-1 Q)  from  Q = rows(X),  `passes` times;  rows(A): rows of A divided by their norms

    The paper's MUD, on the shorter side of X. One forward substitution takes the place of Newton-Schulz: row i loses
    what it has in common with the rows before it, to first order. Rows become unit vectors, nearly orthogonal, but not
    the nearest ones: the order of rows matters, and a rotation of X does not rotate the result. Zero rows stay zero.
    """

    kind: Literal["triangular"] = "triangular"
    passes: int = Field(default=1, ge=1, le=20, description="how often rows are decorrelated")

    def polar(self, x: Tensor) -> Tensor:
        tall = x.shape[1] > x.shape[2]
        q = _unit_rows(x.mT if tall else x)
        for _ in range(self.passes):
            # the diagonal of Q Q^T is 1, and taken to be where a row is zero
            q = _unit_rows(torch.linalg.solve_triangular(q @ q.mT, q, upper=False, unitriangular=True))
        return q.mT if tall else q


def _unit_rows(x: Tensor) -> Tensor:
    """The rows of each matrix over their norms; rows of zeros stay."""
    x = x / x.abs().amax(-1, keepdim=True).clamp_min(tiny(x.dtype))  # squares neither over- nor underflow
    norms = x.square().sum(-1, keepdim=True).sqrt()
    return x * safe_ratio(torch.ones_like(norms), norms)
