"""Weight decay of the entries of a parameter that have the same sign as the direction."""

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
    """rate [d W > 0] W,  with W the parameter, d the direction;  with `follow_lr`:  rate lr [d W > 0] W

    lr is the learning rate, and [d W > 0] is 1 where d and W have the same sign and 0 elsewhere. The result is weight
    decay as a direction. Put the stage on one path of a `sum`, and the stages that compute the update without this
    decay on another path. d is the direction of the stages before this one on its path, for example a slow momentum in
    ANVIL (modded-nanogpt #360). To mask by the update itself, use the weight decay `cautious`, which needs no `sum`
    (Chen et al. 2025, arXiv:2510.12402).
    """

    kind: Literal["aligned_decay"] = "aligned_decay"
    rate: float = Field(default=0.01, gt=0, description="decay rate; the optimizer multiplies it by the learning rate")
    follow_lr: bool = Field(default=False, description="multiply the rate by the learning rate once more")

    def traits(self, block: tuple[int, ...]) -> Traits:
        requests = (Request("parameter"), Request("lr")) if self.follow_lr else (Request("parameter"),)
        return Traits(signals=requests, entrywise=True)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        weight = context.tensor("parameter", direction)
        rate = self.rate * context.tensor("lr", direction) if self.follow_lr else self.rate
        # signs are multiplied, not d and W, because d W may underflow
        return torch.where(direction.sign() * weight.sign() > 0, weight, 0.0) * rate
