"""A chain on a low-rank projection of the gradient. Its result is lifted to the full space (GaLore), lifted and added
to the scaled rest of the direction (Fira), or only used to scale the direction (APOLLO).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft import noise
from eigengraft.numerics import block_norm, per_block, safe_ratio
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import mode_product, unfold
from ..base import Inner, Stage, Stages, Traits, first_lagged, map_wires, run_chain
from ..cadence import Cadence, Every
from ..roots.decompositions import leading_eigenvectors, unit_sized
from ..roots.power_qr import same_signs

DRAW = 1 << 34
"""Number of the random stream from which `noise` draws projections. Each purpose has a stream of its own, so that its
numbers are independent of all others.
"""


class Projected(Stage):
    """N = inner(P^T g, R)  with  R = P^T d:  P `[n, r]` projects one axis from length n to r; `renewal` recomputes P.

    lift:           P N                                    (GaLore, Zhao et al. 2024, arXiv:2403.03507, Algorithm 2)
    lift_and_rest:  P N + limited((d - P R) diag(s))       (Fira, Chen et al. 2024, arXiv:2410.01623, Algorithm 1)
    rescale:        limited(d diag(s))                     (APOLLO, Zhu et al. 2024, arXiv:2412.05270, Algorithm 1)

    The field `result` chooses which of these three directions is returned. g is the gradient, and d is the direction.
    The columns of P are the leading singular vectors of the gradient at a renewal, or random numbers of variance 1 / r.
    The state of `inner` does not change when P changes, as in the papers. Blocks with one axis are passed to `inner`
    without a projection.

    s_j = ||N_j|| / ||R_j|| has one entry for each index j of the other axes, with norms over the r coordinates. With
    `per: block`, s is one number for the block.

    limited(X) is X, scaled down if its norm exceeds `growth` times the norm of limited(X) in the step before. The limit
    is applied to the result of `inner`, and therefore after the bias correction of Adam's moments, as in Fira's
    Algorithm 1. The implementations of Fira and APOLLO limit the norm before the bias correction.
    """

    kind: Literal["projected"] = "projected"
    chain: Stages = Field(alias="inner", min_length=1, description="the chain that receives P^T g and P^T d")
    rank: int = Field(default=128, ge=1, description="number r of coordinates, at most the length of the axis")
    side: Literal["left", "right", "smaller"] = Field(
        default="smaller", description="projected axis: the first, the last or the shortest"
    )
    projection: Literal["leading", "random"] = Field(
        default="leading", description="columns of P: leading singular vectors of the gradient, or random numbers"
    )
    result: Literal["lift", "lift_and_rest", "rescale"] = Field(
        default="lift", description="how the result follows from N, the direction of `inner`"
    )
    per: Literal["column", "block"] = Field(default="column", description="entries that share a scale s")
    growth: float | None = Field(
        default=None,
        gt=1,
        description="largest ratio of the norm of the scaled tensor to its norm in the step before; null: no bound",
    )
    renewal: Cadence = Field(default=Every(steps=200), description="steps in which P is recomputed")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        scaled = self.result != "lift"
        if not scaled and self.growth is not None:
            raise ValueError(
                f"growth: {self.growth} has no effect with `result: lift`, which does not scale; remove it"
            )
        if not scaled and self.per != "column":
            raise ValueError(f"per: '{self.per}' has no effect with `result: lift`, which does not scale; remove it")
        if self.result == "lift_and_rest" and self.projection == "random":
            raise ValueError(
                "projection: 'random' cannot be combined with `result: lift_and_rest`, which needs a projection "
                "with orthonormal columns; set `projection: leading`"
            )
        if lagged := first_lagged(self.chain, "inner"):
            raise ValueError(
                f"{lagged}: a lagged stage needs a gradient before the projection is known, and cannot be in "
                "projected; remove it"
            )
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"side": self.side}

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        axis = self._axis(block) if len(block) > 1 else None
        inner_block = block if axis is None else (*block[:axis], self._columns(block), *block[axis + 1 :])
        return {"inner": Inner(self.chain, inner_block)}

    def _axis(self, block: tuple[int, ...]) -> int:
        if self.side == "smaller":
            return min(range(len(block)), key=lambda axis: (block[axis], -axis))
        return 0 if self.side == "left" else len(block) - 1

    def _columns(self, block: tuple[int, ...]) -> int:
        """Return r: the field `rank`, or the length of the projected axis if that is smaller."""
        return min(self.rank, block[self._axis(block)])

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        if len(block) < 2:
            return {}
        p = Slot((block[self._axis(block)], self._columns(block)), fill="identity", role="basis")
        limit = {"size": Slot((), sensitive=True)} if self.growth is not None else {}
        return {"p": p, **limit}

    def cadence(self) -> Cadence:
        return self.renewal

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(refresh_cost=0.0 if len(block) < 2 else float(block[self._axis(block)]) ** 3)

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        if len(state.block) < 2:
            return
        old = state["p"]
        if self.projection == "random":
            drawn = noise.normal(context.seed, context.step, tuple(old.shape[1:]), old.dtype, DRAW)
            state["p"] = drawn / old.shape[-1] ** 0.5
            return
        x, ok = unit_sized(unfold(gradient, self._axis(state.block)))
        new, _, fine = leading_eigenvectors(torch.bmm(x, x.mT), old.shape[-1])
        state["p"] = torch.where(per_block(ok & fine & x.any(-1).any(-1), old), same_signs(new, old), old)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        inner = state.scope("inner", self.inner(state.block)["inner"].block)
        if len(state.block) < 2:
            return run_chain(self.chain, inner, gradient, direction, context)
        p, axis = state["p"], self._axis(state.block)
        g, r = map_wires(lambda x: mode_product(x, p.mT, axis), gradient, direction)
        n = run_chain(self.chain, inner, g, r, context)
        if self.result == "lift":
            return mode_product(n, p, axis)
        if self.result == "rescale":
            return self._limited(state, direction * self._scales(n, r, axis))
        rest = (direction - mode_product(r, p, axis)) * self._scales(n, r, axis)
        return mode_product(n, p, axis) + self._limited(state, rest)

    def _scales(self, n: Tensor, r: Tensor, axis: int) -> Tensor:
        """Return s_j = ||N_j|| / ||R_j||, shaped to multiply blocks, and 0 where R_j is 0.

        j is an index of the axes that are not projected; with `per: block` there is one ratio for each block.

        n: N, the result of the inner chain.
        r: R, the projected direction.
        axis: the projected axis of the block.
        """
        if self.per == "block":
            return per_block(safe_ratio(block_norm(n), block_norm(r)), n)
        norms = (torch.linalg.vector_norm(x, dim=axis + 1, keepdim=True) for x in (n, r))
        return safe_ratio(*norms)

    def _limited(self, state: State, x: Tensor) -> Tensor:
        """Return x, scaled down if its norm exceeds `growth` times the norm of this method's result in the step before.

        The norm of the result is stored in the slot `size`.
        """
        if self.growth is None:
            return x
        before, norm = state["size"], block_norm(x)
        allowed = torch.where(before > 0, torch.minimum(norm, before * self.growth), norm)
        state["size"] = allowed
        return x * per_block(safe_ratio(allowed, norm), x)
