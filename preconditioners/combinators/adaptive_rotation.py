"""A chain that runs in rotated coordinates. Each new rotation is computed from the result of the chain in the
coordinates of the last rotation (ARO, arXiv:2602.09006).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import mode_product, unfold
from ..base import Inner, Stage, Stages, Traits, chain_slots, first_lagged, run_chain, walk
from ..cadence import Cadence, Every
from ..roots.power_qr import householder


class AdaptiveRotation(Stage):
    """Q f(Q^T d)  with  Q <- qr(d f(Q^T d)^T)  and  f = inner

    d is the direction, and Q `[N, n, n]` is an orthogonal matrix that multiplies one axis of length n. f is the chain
    `inner`, which has no state: for example `sign`, or `sinkhorn`. The update of Q is one step of the power method for
    the maximum of <d, Q f(Q^T d)>. If f is the direction of steepest descent in a norm, as `sign` is in the maximum
    norm, the stage is steepest descent in this norm after a rotation Q of the coordinates.

    The shorter axis is rotated, or with `side: left` the first axis, as in the authors' code. If the longer axis is
    rotated, some rows of Q^T d have only rounding errors, and a chain such as `sign` makes these rows as large as the
    others. Blocks with one axis are passed to `inner` unrotated.
    """

    kind: Literal["adaptive_rotation"] = "adaptive_rotation"
    chain: Stages = Field(
        alias="inner", min_length=1, examples=[["sign"]], description="the chain f, of stages without state"
    )
    side: Literal["left", "smaller"] = Field(
        default="smaller", description="rotated axis: the first, or the shorter one"
    )
    renewal: Cadence = Field(default=Every(steps=1), description="steps in which Q is recomputed")

    @model_validator(mode="after")
    def _inner_keeps_nothing(self) -> Self:
        stateful = next((path for block in ((3, 2), (3,)) for path, _, _ in chain_slots(self.chain, block)), None)
        if found := stateful or first_lagged(self.chain):
            raise ValueError(
                f"inner: {found} keeps state, but stages of this chain must keep none; move the stage out of `inner`"
            )
        spanning = next((path for path, stage in walk(self.chain, "inner") if stage.cached_traits().sums), None)
        if spanning:
            raise ValueError(
                f"{spanning}: computes sums over parameters, which is not possible inside adaptive_rotation; move the "
                "stage out of `inner`"
            )
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"side": self.side}

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {"inner": Inner(self.chain, block)}

    def _axis(self, block: tuple[int, ...]) -> int:
        return 0 if self.side == "left" else min(range(len(block)), key=lambda axis: block[axis])

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        if len(block) < 2:
            return {}
        d = block[self._axis(block)]
        return {"q": Slot((d, d), fill="identity", role="basis")}

    def cadence(self) -> Cadence:
        return self.renewal

    def traits(self, block: tuple[int, ...]) -> Traits:
        cost = 0.0 if len(block) < 2 else float(block[self._axis(block)]) ** 3
        return Traits(learns="direction", refresh_cost=cost)

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        if len(state.block) < 2:
            return
        q, axis = state["q"], self._axis(state.block)
        mapped = unfold(self._mapped(state, gradient, q, axis, context), axis)
        state["q"] = householder(torch.bmm(unfold(gradient, axis), mapped.mT), q)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        if len(state.block) < 2:
            return self._inner(state, gradient, direction, context)
        q, axis = state["q"], self._axis(state.block)
        return mode_product(self._mapped(state, direction, q, axis, context), q, axis)

    def _mapped(self, state: State, direction: Tensor, q: Tensor, axis: int, context: StepContext) -> Tensor:
        """Return f(Q^T d), the result of the inner chain f for the rotated direction.

        direction: d `[N, *block]`.
        q: Q `[N, n, n]`.
        axis: the axis of the block that is rotated, of length n.
        """
        turned = mode_product(direction, q.mT, axis)
        return self._inner(state, turned, turned, context)

    def _inner(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return run_chain(self.chain, state.scope("inner"), gradient, direction, context)
