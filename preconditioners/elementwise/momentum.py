"""First moments."""

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
    """A running mean or sum of directions.

    ema:         m <- b m + (1 - b) d;         m / (1 - b^t)        Nesterov: (b m + (1 - b) d) / (1 - b^(t+1))
    heavy_ball:  m <- b m + (1 - dampening) d; m                    Nesterov: b m + (1 - dampening) d

    With `beta3` the ema form gives b3 m_old + (1 - b3) d, over 1 - b3 b^(t-1): more or less of the newest direction
    than the mean holds (Shi et al. 2023, filtered gradient). Without bias correction the denominators are 1.
    `undamped_start` makes the first m = d, as torch.optim.SGD does; its Nesterov form also adds d undamped
    (`undamped_nesterov`). Sources: Polyak 1964, Sutskever et al. 2013, Dozat 2016.
    """

    kind: Literal["momentum"] = "momentum"
    beta: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment, per step")
    form: Literal["ema", "heavy_ball"] = Field(default="ema", description="running mean, or sum with dampening")
    dampening: float = Field(
        default=0.0, ge=0, lt=1, description="heavy_ball only: the direction enters with 1 - dampening"
    )
    nesterov: bool = Field(default=False, description="look ahead: mix the new direction in once more")
    beta3: float | None = Field(
        default=None, ge=0, lt=1, description="ema only: weight of the old mean in the result; default: beta"
    )
    bias_correction: bool = Field(default=True, description="ema only: divide by the sum of the weights so far")
    undamped_start: bool = Field(default=False, description="heavy_ball only: the first direction enters with weight 1")
    undamped_nesterov: bool = Field(
        default=False, description="heavy_ball only: the look-ahead adds the direction with weight 1"
    )

    @model_validator(mode="after")
    def _one_look_ahead(self) -> Self:
        if self.beta3 is not None and (self.nesterov or self.form != "ema"):
            raise ValueError("beta3: takes the place of nesterov in the form ema, got both or another form")
        return self

    def entrywise(self) -> bool:
        return True

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"m": Slot(block, fill=0.0, role="first_moment", frame="vector")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        m = state["m"]
        if self.form == "heavy_ball":
            self._accumulate(m, direction, context)
            state["m"] = m
            weight = 1.0 if self.undamped_nesterov else 1 - self.dampening
            return torch.add(m * self.beta, direction, alpha=weight) if self.nesterov else m
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

    def _accumulate(self, m: Tensor, direction: Tensor, context: StepContext) -> None:
        m.mul_(self.beta)
        if self.undamped_start and self.dampening:
            m.add_(direction * context.per_block(self._weight, m))
        else:
            m.add_(direction, alpha=1 - self.dampening)

    def _weight(self, step: Tensor) -> Tensor:
        return torch.where(step == 1, 1.0, torch.full_like(step, 1 - self.dampening))
