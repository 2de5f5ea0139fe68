"""Momentum as a decaying sum of directions (Polyak 1964)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Stage
from ..traits import Traits


class HeavyBall(Stage):
    """A decaying sum of directions, the momentum of torch.optim.SGD.

    m <- b m + w d;  m               w = 1 - dampening
    nesterov:  b m + w d             (Sutskever et al. 2013)

    torch.optim.SGD gives two directions the weight 1 where they enter dampened here: the first one (`undamped_start`)
    and the one that the look-ahead adds (`undamped_nesterov`). The running mean is the stage `momentum`.
    """

    kind: Literal["heavy_ball"] = "heavy_ball"
    beta: float = Field(default=0.9, ge=0, lt=1, description="decay of the sum, per step")
    dampening: float = Field(default=0.0, ge=0, lt=1, description="a direction enters with weight 1 - dampening")
    nesterov: bool = Field(default=False, description="look ahead: add the new direction once more")
    undamped_start: bool = Field(default=False, description="the first direction enters with weight 1")
    undamped_nesterov: bool = Field(default=False, description="the look-ahead adds the direction with weight 1")

    @model_validator(mode="after")
    def _weights_matter(self) -> Self:
        if self.undamped_nesterov and not self.nesterov:
            raise ValueError("undamped_nesterov: `nesterov: true` is required, got nesterov false")
        if self.dampening == 0 and (self.undamped_start or self.undamped_nesterov):
            which = "undamped_start" if self.undamped_start else "undamped_nesterov"
            raise ValueError(f"{which}: a dampening above 0 is required, got dampening {self.dampening}")
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"dampening": self.dampening}

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True, spectral_gain=(1 - self.dampening) / (1 - self.beta))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"m": Slot(block, fill=0.0, role="first_moment", frame="vector")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        m = state["m"].mul_(self.beta)
        if self.undamped_start:
            m.add_(direction * context.per_block(self._weight, m))
        else:
            m.add_(direction, alpha=1 - self.dampening)
        state["m"] = m
        weight = 1.0 if self.undamped_nesterov else 1 - self.dampening
        return torch.add(m * self.beta, direction, alpha=weight) if self.nesterov else m

    def _weight(self, step: Tensor) -> Tensor:
        return torch.where(step == 1, 1.0, torch.full_like(step, 1 - self.dampening))
