"""Stages that no shipped recipe names: cautious updates, gradient centralization and clipping by a running norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import per_block, safe_ratio
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Stage, Traits
from ..elementwise.scale import norm_over


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


class ClipRunningNorm(Stage):
    """c = min(1, factor m / ||d||);  m <- m + w (||c d|| - m),  w = max(1 - beta, 1 / t);  c d

    d is the direction, t the step, and m a running mean of the norms of clipped directions, for each block or each
    parameter. In the first `start` steps, and while m = 0, c is 1. AdaGC (Wang et al. 2025, arXiv:2502.11034) clips by
    the norm of the whole model in the first steps instead, and then starts with m as the smallest norm of these steps.

    The stage keeps state. Therefore the stages after it receive the clipped direction, but the unclipped gradient. To
    clip both, use `{kind: transform, before: clip_running_norm, inner: [momentum, rms]}`.
    """

    kind: Literal["clip_running_norm"] = "clip_running_norm"
    factor: float = Field(default=1.05, gt=0, description="the largest norm that passes unchanged, in units of m")
    beta: float = Field(default=0.98, ge=0, lt=1, description="decay of the mean norm, per step")
    start: int = Field(default=100, ge=1, description="number of first steps, which are not clipped")
    per: Literal["block", "parameter"] = Field(default="parameter", description="entries over which norms are computed")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(sums=self.per == "parameter")

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"norm": Slot((), role="count")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        norm, known = norm_over(direction, self.per, context), state["norm"]
        free = context.per_block(lambda step: (step <= self.start).to(step.dtype), norm)
        weight = context.per_block(lambda step: (1 / step).clamp_min(1 - self.beta), norm)
        shrink = safe_ratio(self.factor * known, norm).clamp_max_(1.0)
        shrink = torch.where((known > 0) & (norm > 0), shrink, torch.ones_like(shrink))
        shrink = shrink + free * (1 - shrink)
        state["norm"] = known + weight * (norm * shrink - known)
        return direction * per_block(shrink, direction)
