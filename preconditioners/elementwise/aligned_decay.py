"""Weight decay of the entries at which a direction and the parameter have one sign."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.signals import Request
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage, Traits


class AlignedDecay(Stage):
    """rate [d W > 0] W,   with W the parameter; follow_lr:  rate lr [d W > 0] W

    The decay as a direction, for a path of a `sum` beside the update: its gate is the chain before it, a slow momentum
    in ANVIL (modded-nanogpt #360). Where the gate should be the update itself, the weight decay `cautious` does the
    same without a path (Chen et al. 2025, arXiv:2510.12402).
    """

    kind: Literal["aligned_decay"] = "aligned_decay"
    rate: float = Field(default=0.01, gt=0, description="decay in units of the learning rate")
    follow_lr: bool = Field(default=False, description="multiply the rate by the learning rate")

    def traits(self, block: tuple[int, ...]) -> Traits:
        requests = (Request("parameter"), Request("lr")) if self.follow_lr else (Request("parameter"),)
        return Traits(signals=requests, entrywise=True)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        weight = context.tensor("parameter", direction)
        rate = self.rate * context.tensor("lr", direction) if self.follow_lr else self.rate
        # a product of signs, because d W may underflow
        return torch.where(direction.sign() * weight.sign() > 0, weight, 0.0) * rate
