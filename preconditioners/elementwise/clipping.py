"""Clipping: directions and gradients that are not longer than a bound."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.chains import Request
from eigengraft.numerics import block_norm, per_block
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage
from ..traits import Traits


class ClipRMS(Stage):
    """d / max(1, RMS(d) / threshold), per block (Shazeer & Stern 2018, section 6: update clipping)."""

    kind: Literal["clip_rms"] = "clip_rms"
    threshold: float = Field(default=1.0, gt=0, description="the largest update RMS that passes unchanged")

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        rms = block_norm(direction) / math.sqrt(max(1, direction[0].numel()))
        return direction / per_block((rms / self.threshold).clamp_min_(1.0), direction)


class ClipNorm(Stage):
    """d / max(1, ||d|| / max_norm), Frobenius norms (Pascanu, Mikolov & Bengio 2013, arXiv:1211.5063, algorithm 1).

    Before the first stage that keeps state it clips the gradient, after it the direction. With `per: model`
    ||d|| is the norm of all gradients as they come, as in `torch.nn.utils.clip_grad_norm_`.
    """

    kind: Literal["clip_norm"] = "clip_norm"
    max_norm: float = Field(default=1.0, gt=0, description="the largest norm that passes unchanged")
    per: Literal["block", "parameter", "model"] = Field(
        default="block", description="what the norm is taken over; model: the gradients of all parameters, as they come"
    )

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits((Request("gradient_norm"),) if self.per == "model" else (), sums=self.per == "parameter")

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        if self.per == "model":
            norm = context.tensor("gradient_norm", direction.new_empty((), dtype=torch.float64))
            return direction * (self.max_norm / norm.clamp_min(self.max_norm)).to(direction.dtype)
        norm = block_norm(direction)
        if self.per == "parameter":
            norm = context.parameter_sum(norm.square()).sqrt()
        return direction / per_block((norm / self.max_norm).clamp_min_(1.0), direction)
