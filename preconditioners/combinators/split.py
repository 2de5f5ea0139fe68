"""One chain on the leading subspace of an axis, another chain on the rest (COSMOS, Liu et al. 2025,
arXiv:2502.17410).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import per_block, tiny
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import mode_product, unfold
from ..base import Inner, Stage, Stages, chain_slots, map_wires, run_chain
from ..cadence import Cadence, Every
from ..kronecker.basis_change import Turn, require_frameless, transport
from ..roots.cholesky_qr import orthonormal_columns
from ..roots.decompositions import eigh
from ..roots.power_qr import householder, same_signs


class Split(Stage):
    """inside(d U) U^T + outside(d - d U U^T),  U `[n, r]` the leading eigenvectors of the running mean of G^T G

    d is the direction, G the gradient, and b = beta the decay of the mean. The gradient is divided between the two
    chains in the same way as the direction. `side` chooses the axis that U multiplies: the last, the first or the
    shorter axis. For blocks with one axis, `inside` receives the whole block, and `outside` receives zeros.

    No n x n matrix is stored, only U and the r x r projection S of the mean (COSMOS, Liu et al. 2025, arXiv:2502.17410,
    Algorithm 1). The first U is computed from the first G^T G. A step computes

    U' = qr(b U S + (1 - b) G^T G U),  T = U^T U';  S <- b T^T S T + (1 - b) (G U')^T (G U'),  U <- U'
    """

    kind: Literal["split"] = "split"
    inside: Stages = Field(description="the chain that receives the coordinates d U in the subspace")
    outside: Stages = Field(description="the chain that receives the rest, d - d U U^T")
    rank: int = Field(default=64, ge=1, description="dimension r of the subspace, at most the length of the axis")
    max_skew: float | None = Field(
        default=None,
        gt=0,
        description="r is also at most max_skew times the product of the other axes; default: no bound",
    )
    beta: float = Field(default=0.95, ge=0, lt=1, description="decay of the running mean of G^T G")
    side: Literal["left", "right", "smaller"] = Field(
        default="right", description="axis to split: the first, the last or the shortest"
    )
    follow: Literal["exact", "none"] = Field(
        default="none", description="exact: transport the state of `inside` when U changes; none: do not change it"
    )

    @model_validator(mode="after")
    def _inside_follows(self) -> Self:
        require_frameless(self.inside, "inside")
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"side": self.side}

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {"inside": Inner(self.inside, self._subspace_block(block)), "outside": Inner(self.outside, block)}

    def _axis(self, block: tuple[int, ...]) -> int:
        if self.side == "smaller":
            return min(range(len(block)), key=lambda axis: block[axis])
        return 0 if self.side == "left" else len(block) - 1

    def _subspace_block(self, block: tuple[int, ...]) -> tuple[int, ...]:
        if len(block) < 2:
            return block
        axis = self._axis(block)
        return (*block[:axis], self._columns(block, axis), *block[axis + 1 :])

    def _columns(self, block: tuple[int, ...], axis: int) -> int:
        r = min(self.rank, block[axis])
        return r if self.max_skew is None else max(1, min(r, int(self.max_skew * math.prod(block) / block[axis])))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        if len(block) < 2:
            return {}
        axis = self._axis(block)
        d, r = block[axis], self._columns(block, axis)
        return {"basis": Slot((d, r), fill="identity", role="basis"), "core": Slot((r, r), role="statistic")}

    def cadence(self) -> Cadence:
        return Every(steps=1)

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        if len(state.block) < 2:
            return
        axis = self._axis(state.block)
        x = unfold(gradient, axis)  # [N, d, rest]
        size = torch.linalg.vector_norm(x, ord=float("inf"), dim=(1, 2), keepdim=True)
        old, core = state["basis"].clone(), state["core"]
        pull = core * self.beta / size.square().clamp_min(tiny(x.dtype))
        # the gradient is scaled to a largest entry of 1, so that squares neither over- nor underflow
        unit = x / size.clamp_min(tiny(x.dtype))
        step = old @ pull + unit @ (unit.mT @ old) * (1 - self.beta)
        step = torch.where(step.isfinite().all(-1).all(-1)[:, None, None], step, old)
        new = householder(step, old) if step.is_cpu else same_signs(orthonormal_columns(step, old), old)
        if context.first:
            _, vectors, ok = eigh(unit @ unit.mT)
            new = torch.where(per_block(ok & (size.flatten() > 0), new), vectors[..., -new.shape[-1] :].flip(-1), new)
        turn = old.mT @ new
        coordinates = x.mT @ new  # [N, rest, r]
        state["core"] = turn.mT @ core @ turn * self.beta + coordinates.mT @ coordinates * (1 - self.beta)
        state["basis"] = new
        if self.follow == "exact":
            inner = state.scope("inside", self._subspace_block(state.block))
            transport(chain_slots(self.inside, inner.block), inner, {axis: Turn(turn)})

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        inner = state.scope("inside", self._subspace_block(state.block))
        (g_in, g_out), (d_in, d_out) = map_wires(lambda x: self._divided(state, x), gradient, direction)
        mapped = run_chain(self.inside, inner, g_in, d_in, context)
        rest = run_chain(self.outside, state.scope("outside"), g_out, d_out, context)
        if len(state.block) < 2:
            return mapped + rest
        return mode_product(mapped, state["basis"], self._axis(state.block)) + rest

    def _divided(self, state: State, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (coordinates of x in the subspace, x minus its projection on the subspace).

        For blocks with one axis, return (x, zeros).
        """
        if len(state.block) < 2:
            return x, torch.zeros_like(x)
        u, axis = state["basis"], self._axis(state.block)
        coordinates = mode_product(x, u.mT, axis)
        # if U is square, the rest x - x U U^T has only rounding errors, which the chain `outside` could make large
        full = u.shape[-1] == u.shape[-2]
        return coordinates, torch.zeros_like(x) if full else x - mode_product(coordinates, u, axis)
