"""Stages that no shipped recipe names: cautious updates and gradient centralization."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.numerics import per_block
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage, Traits


class Cautious(Stage):
    """d M / max(mean M, floor)  with M = [d g > 0], g the gradient;  mean M is the fraction of entries with M = 1.

    d is the direction, and M is 1 where d and g have the same sign and 0 elsewhere. These are cautious updates
    (algorithm 1 of Liang et al. 2024, arXiv:2411.16085). The stage is usually the last one of a chain, and masks the
    direction of the stages before it. Inside an eigenbasis g is the gradient in that basis. The divisor is that of the
    authors' code. The paper divides by (n + 1) / n times the mean over n entries, without a floor.
    """

    kind: Literal["cautious"] = "cautious"
    floor: float = Field(default=1e-3, gt=0, le=1, description="lower bound of the divisor")
    per: Literal["block", "parameter"] = Field(default="block", description="entries over which mean M is computed")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(sums=self.per == "parameter")

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        # signs are multiplied, not d and g, because d g may underflow
        agrees = (direction.sign() * gradient.sign() > 0).to(direction.dtype)
        flat = agrees.flatten(1)
        fraction = flat.mean(1)
        if self.per == "parameter":
            fraction = context.parameter_sum(flat.sum(1)) / context.parameter_sum(
                flat.new_full(fraction.shape, flat.shape[1])
            )
        return direction * agrees / per_block(fraction.clamp_min(self.floor), direction)


class Center(Stage):
    """d - mean(d), the mean over all axes except the first;  unchanged for blocks with one axis

    This is gradient centralization (Yong et al. 2020, arXiv:2004.01461) if the stage is the first one of a chain, where
    d is the gradient. The first axis of a weight matrix is the axis of the layer's outputs.
    """

    kind: Literal["center"] = "center"

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        if direction.ndim < 3:
            return direction
        return direction - direction.mean(tuple(range(2, direction.ndim)), keepdim=True)
