"""First moments as running means of directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Stage


class Momentum(Stage):
    """A running mean of directions.

    m <- b m + (1 - b) d;  m / (1 - b^t)
    nesterov:  (b m + (1 - b) d) / (1 - b^(t+1))
    beta3:     (b3 m_old + (1 - b3) d) / (1 - b3 b^(t-1))

    `nesterov` mixes the newest direction in once more (Dozat 2016). `beta3` gives more or less of the newest direction
    than the mean holds (Shi et al. 2023, filtered gradient). Without bias correction the denominators are 1.
    The sum m <- b m + d is the stage `heavy_ball`.
    """

    kind: Literal["momentum"] = "momentum"
    beta: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment, per step")
    nesterov: bool = Field(default=False, description="look ahead: mix the new direction in once more")
    beta3: float | None = Field(default=None, ge=0, lt=1, description="weight of the old mean in the result")
    bias_correction: bool = Field(default=True, description="divide by the sum of the weights so far")

    @model_validator(mode="after")
    def _one_look_ahead(self) -> Self:
        if self.beta3 is not None and self.nesterov:
            raise ValueError("nesterov: false is required with beta3, which takes its place, got true")
        return self

    def entrywise(self) -> bool:
        return True

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"m": Slot(block, fill=0.0, role="first_moment", frame="vector")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        m = state["m"]
        if self.beta3 is not None:
            return self._filtered(state, m, direction, self.beta3, context)
        m.lerp_(direction, 1 - self.beta)
        state["m"] = m
        ahead = torch.lerp(direction, m, self.beta) if self.nesterov else m
        if not self.bias_correction:
            return ahead
        later = 1 if self.nesterov else 0
        return ahead / context.per_block(lambda step: 1 - self.beta ** (step + later), m)

    def _filtered(self, state: State, m: Tensor, direction: Tensor, beta3: float, context: StepContext) -> Tensor:
        out = torch.lerp(m, direction, 1 - beta3)
        m.lerp_(direction, 1 - self.beta)
        state["m"] = m
        if not self.bias_correction:
            return out
        return out / context.per_block(lambda step: 1 - beta3 * self.beta ** (step - 1), m)
