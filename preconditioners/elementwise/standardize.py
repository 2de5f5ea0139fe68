"""Rows and slices with their means taken out."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import tiny
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage


class Standardize(Stage):
    """(d - mean(d)) / sd(d), mean and standard deviation over the last axis; constant rows become 0 (SWAN, Ma et al.
    2024, arXiv:2412.13148, GradNorm).

    `center: false` divides by the root mean square instead.
    """

    kind: Literal["standardize"] = "standardize"
    center: bool = Field(default=True, description="subtract the mean of each row")

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        peak = direction.abs().amax(-1, keepdim=True)
        rows = direction / peak.clamp_min(tiny(direction.dtype))  # squares of what is left neither over- nor underflow
        if self.center:
            rows = rows - rows.mean(-1, keepdim=True)
        spread = rows.square().mean(-1, keepdim=True).sqrt()
        floor = 8 * torch.finfo(direction.dtype).eps  # what rounding leaves of a constant row
        return (rows / spread.clamp_min(floor)) * (spread > floor)


class Center(Stage):
    """d - mean(d), the mean over all axes but the first; blocks with one axis stay (Yong et al. 2020, arXiv:2004.01461)

    Gradient centralization is this stage as `before` of a `transform`. The first axis is that of a weight's outputs.
    """

    kind: Literal["center"] = "center"

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        if direction.ndim < 3:
            return direction
        return direction - direction.mean(tuple(range(2, direction.ndim)), keepdim=True)
