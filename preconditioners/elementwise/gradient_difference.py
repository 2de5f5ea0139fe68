"""Gradients corrected by their change since the last step (MARS, arXiv:2411.10438)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Stage, Traits


class GradientDifference(Stage):
    """d + gamma b / (1 - b) (d - d_last),  d_last the direction d of the last step, 0 at first

    b is `beta`, and d is usually the gradient. Adding its change since the last step reduces the variance of the
    momentum that follows. MARS-approx (Yuan et al. 2024, arXiv:2411.10438, Algorithm 2) is a stage `transform`. Its
    field `before` has this stage and a clipping to norm 1, and its field `inner` has a momentum with decay b and second
    moments of any kind.
    """

    kind: Literal["gradient_difference"] = "gradient_difference"
    gamma: float = Field(default=0.025, gt=0, description="strength of the correction")
    beta: float = Field(default=0.95, gt=0, lt=1, description="b, the decay of the momentum that follows")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True)

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"last": Slot(block, role="first_moment", frame="vector")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        out = torch.lerp(state["last"], direction, 1 + self.gamma * self.beta / (1 - self.beta))
        state["last"] = direction.clone()
        return out
