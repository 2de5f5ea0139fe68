"""Stages that give rows mean 0 and RMS 1, or give all rows and all columns equal RMS."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import tiny
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage, Traits


class Standardize(Stage):
    """(d - mean(d)) / sd(d), with the mean and the standard deviation of each row, which is along the last axis of d.

    This is GradNorm of SWAN (Ma et al. 2024, arXiv:2412.13148). Constant rows become 0. With `center: false` rows are
    divided by their root mean square, and no mean is subtracted.
    """

    kind: Literal["standardize"] = "standardize"
    center: bool = Field(default=True, description="subtract the mean of each row")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(scale_free=True)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        peak = direction.abs().amax(-1, keepdim=True)
        rows = direction / peak.clamp_min(tiny(direction.dtype))  # so that squares neither over- nor underflow
        if self.center:
            rows = rows - rows.mean(-1, keepdim=True)
        spread = rows.square().mean(-1, keepdim=True).sqrt()
        floor = 8 * torch.finfo(direction.dtype).eps  # spread of a constant row by rounding errors
        return (rows / spread.clamp_min(floor)) * (spread > floor)


class Sinkhorn(Stage):
    """Scale rows of X to RMS 1, then its columns, `rounds` times;  X is a block as a matrix, first axis x the rest.

    As the only stage of a chain it is the optimizer SinkGD (Scetbon et al. 2025, arXiv:2502.06742, Algorithm 3). It is
    also used inside `adaptive_rotation`. For a square X of order n, the matrix of squared entries divided by n
    converges to the doubly stochastic matrix of Sinkhorn & Knopp (1967). A vector is scaled to RMS 1. Rows and columns
    that have only rounding errors of the largest entry become 0.
    """

    kind: Literal["sinkhorn"] = "sinkhorn"
    rounds: int = Field(default=5, ge=1, le=100, description="how often rows and columns are normalized")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(matrices=True, scale_free=True)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        x = direction.reshape(len(direction), direction.shape[1] if direction.ndim > 1 else 1, -1)
        # X is divided by its largest entry, so that squares neither over- nor underflow
        x = x / x.abs().amax((-2, -1), keepdim=True).clamp_min(tiny(x.dtype))
        rounding = 32 * torch.finfo(x.dtype).eps  # RMS of rounding errors in rows that would be 0 in exact arithmetic
        axes = (-1, -2) if direction.ndim > 2 else (-2,)
        for _ in range(self.rounds):
            for axis in axes:
                spread = x.square().mean(axis, keepdim=True).sqrt()
                x = x * torch.where(spread > rounding, 1 / spread, 0.0)
        return x.reshape(direction.shape)
