"""Step sizes that are given norms."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.numerics import block_norm, per_block, safe_ratio
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage


class Normalize(Stage):
    """factor * target * d / ||d||, with Frobenius norms of blocks; a zero direction stays zero.

    unit_rms:         target sqrt(number of entries), an update RMS of 1
    unit_norm:        target 1
    norm_preserving:  target ||gradient||

    Before the first stage that keeps state the gradient is d itself. To give a map without state the norm of what it
    maps, `graft` it as `direction` onto the `magnitude` identity. Factors that depend on the shape alone are the stage
    `scale`.
    """

    kind: Literal["normalize"] = "normalize"
    rule: Literal["unit_rms", "unit_norm", "norm_preserving"] = Field(
        default="unit_rms", description="the norm that a direction is brought to"
    )
    factor: float = Field(default=1.0, gt=0, description="multiplies the rule")

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        target = block_norm(gradient)
        if self.rule != "norm_preserving":
            size = math.sqrt(direction[0].numel()) if self.rule == "unit_rms" else 1.0
            target = target.new_full(target.shape, size)
        return direction * per_block(safe_ratio(target, block_norm(direction)).mul_(self.factor), direction)
