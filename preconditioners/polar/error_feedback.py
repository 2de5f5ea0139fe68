"""Momenta that decay only in the part that the update has used.

An update uses, and orthogonalizes, a part of low rank (Dion) or some of the rows (Dion2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft import noise
from eigengraft.blocking.blocks import matrix_shape
from eigengraft.numerics import apply_aligned, safe_ratio, tiny
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import as_matrices
from ..base import Stage, Traits
from ..roots.cholesky_qr import orthonormal_columns
from .spectral import NewtonSchulz, PolarSolver

START = 1 << 35
"""Number of the random stream from which `noise` draws the first subspaces. Each purpose has a stream of its own, so
that its numbers are independent of all others.
"""


class Dion(Stage):
    """P Q^T  with  M <- M + d,  P = qr(M Q),  R = M^T P,  M <- M - (1 - beta) P R^T,  Q <- R / column norms

    d is the direction, M `[m, n]` the momentum, and the r columns of Q `[n, r]` span a subspace. M is orthogonalized in
    this subspace. The subspace follows from the one of the last step by one power step, and the first Q is random. The
    part of M outside the subspace stays in M for later steps.

    This is Algorithm 1 of Ahn et al. 2025, arXiv:2504.05295. For the factor sqrt(m / n) of the paper add the stage
    `scale`. Blocks are treated as matrices, first axis x the rest.
    """

    kind: Literal["dion"] = "dion"
    beta: float = Field(
        default=0.95, ge=0, lt=1, description="share of the used component P R^T that M keeps, per step"
    )
    rank: int = Field(default=64, ge=1, description="number r of columns of P and Q, at most the shorter side")

    def traits(self, block: tuple[int, ...]) -> Traits:
        m, n = matrix_shape(block)
        r = min(self.rank, m, n)
        return Traits(matrices=True, work=8.0 * m * n * r + 4.0 * m * r**2)  # four products, and a QR

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        rows, columns = matrix_shape(block)
        r = min(self.rank, rows, columns)
        m = Slot(block, role="first_moment", frame="vector")
        return {"m": m, "q": Slot((columns, r), fill="identity", role="basis")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        m = state["m"] + direction
        x, q = as_matrices(m), self._started(state["q"], context)
        peak = x.abs().amax((-2, -1), keepdim=True).clamp_min(tiny(x.dtype))
        unit = x / peak  # so that squares neither over- nor underflow
        p = _orthonormal(torch.bmm(unit, q))
        r = torch.bmm(unit.mT, p)
        norms = torch.linalg.vector_norm(r, dim=-2, keepdim=True)
        q = r * safe_ratio(torch.ones_like(norms), norms)
        state["m"] = torch.baddbmm(x, p * peak, r.mT, alpha=self.beta - 1).reshape(m.shape)
        state["q"] = q
        return torch.bmm(p, q.mT).reshape(direction.shape)

    def _started(self, q: Tensor, context: StepContext) -> Tensor:
        """Return q, the bases Q of the subspaces, with random bases for blocks that are updated for the first time."""
        if context.holds(lambda steps: steps > 1) is True:
            return q
        fresh = noise.normal(context.seed, context.step, tuple(q.shape[1:]), q.dtype, START)
        return torch.where((context.step <= 1)[:, None, None], fresh, q)


def _orthonormal(x: Tensor) -> Tensor:
    """Return the orthonormal factor of qr(x). On a device its columns may have other signs than on a CPU."""
    if x.is_cpu:
        return apply_aligned(lambda own: torch.linalg.qr(own).Q, x)  # type: ignore[no-any-return]
    return orthonormal_columns(x, torch.eye(*x.shape[1:], dtype=x.dtype, device=x.device).expand_as(x))


class Dion2(Stage):
    """polar(M_S) on the rows S of largest sum |M_ij|, 0 in other rows,  with  M <- M + d;  then  M_S <- beta M_S

    d is the direction, M the momentum, and M_S the rows S of M. S is a fraction of the rows (rounded up), or of the
    columns if there are fewer columns. Rows that are not used keep growing until they are used (Ahn et al. 2025,
    arXiv:2512.16928, Algorithm 1, and microsoft/dion). With `fraction: 1` the stage is Muon with an undamped momentum.
    Blocks are treated as matrices, first axis x the rest.
    """

    kind: Literal["dion2"] = "dion2"
    beta: float = Field(default=0.95, ge=0, lt=1, description="decay of the rows that were used, per step")
    fraction: float = Field(default=0.25, gt=0, le=1, description="fraction of the rows that is used in a step")
    side: Literal["left", "right", "smaller"] = Field(
        default="smaller", description="use rows (left), columns (right), or the fewer of both"
    )
    solver: PolarSolver = Field(default=NewtonSchulz(), description="how the polar factor is computed")

    def traits(self, block: tuple[int, ...]) -> Traits:
        m, n = matrix_shape(block)
        m, n = (m, n) if self.side == "left" or (self.side == "smaller" and m <= n) else (n, m)
        return Traits(matrices=True, work=self.solver.operations(math.ceil(self.fraction * m), n) + 4.0 * m * n)

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"m": Slot(block, role="first_moment", frame="vector")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        m = state["m"].add_(direction)
        x = as_matrices(m)
        rows = self.side == "left" or (self.side == "smaller" and x.shape[1] <= x.shape[2])
        x = x if rows else x.mT
        chosen = x.abs().sum(-1).topk(math.ceil(self.fraction * x.shape[1]), dim=-1).indices.sort(dim=-1).values
        index = chosen.unsqueeze(-1).expand(-1, -1, x.shape[2])
        used = x.gather(1, index)
        out = torch.zeros_like(x).scatter_(1, index, self.solver.of_blocks(used))
        left = x.scatter(1, index, used * self.beta)
        state["m"] = (left if rows else left.mT).reshape(m.shape)
        return (out if rows else out.mT).reshape(direction.shape)
