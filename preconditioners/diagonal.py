"""Diagonal preconditioners: identity, sign, and division by the root of an accumulated square."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.clock import Clock
from eigengraft.slots import Slot, State

from .base import Preconditioner


class Identity(Preconditioner):
    """d (stochastic gradient descent; as a magnitude, the SGD grafting)."""

    kind: Literal["identity"] = "identity"

    def apply(self, state: State, gradient: Tensor, direction: Tensor, clock: Clock) -> Tensor:
        return direction


class Sign(Preconditioner):
    """sign(d), 0 where d is 0: steepest descent in the maximum norm (signSGD, Bernstein et al. 2018)."""

    kind: Literal["sign"] = "sign"

    def apply(self, state: State, gradient: Tensor, direction: Tensor, clock: Clock) -> Tensor:
        return direction.sign()


class RMS(Preconditioner):
    """Divide by the root of accumulated squared gradients.  v <- b v + w g^2;  d / (sqrt(v / c) + eps)

    Running mean (b < 1): w = 1 - b; c = 1 - b^t with bias correction (Adam, Kingma & Ba 2015), c = 1 without (RMSprop).
    Sum (b = 1): w = 1, c = 1 (AdaGrad, Duchi et al. 2011). With `eps_on: raw` the division is by (sqrt(v) + eps) /
    sqrt(c), as in the codes that fold the correction into the step size.
    """

    kind: Literal["rms"] = "rms"
    beta: float = Field(default=0.999, ge=0, le=1, description="decay of the second moment, per step; 1 = sum")
    eps: float = Field(default=1e-8, gt=0, description="added to the root, in units of the gradient")
    bias_correction: bool = Field(default=True, description="divide v by 1 - beta^t; a sum (beta = 1) has no bias")
    eps_on: Literal["corrected", "raw"] = Field(default="corrected", description="which root eps is added to")

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"v": Slot(block, fill=0.0, role="second_moment", basis="square")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, clock: Clock) -> Tensor:
        v = state["v"]
        weight = 1 - self.beta if self.beta < 1 else 1.0
        v.mul_(self.beta).addcmul_(gradient, gradient, value=weight)
        state["v"] = v
        denominator = v.sqrt()
        if not self.bias_correction or self.beta == 1:
            return torch.div(direction, denominator.add_(self.eps), out=denominator)
        root = clock.correction(self.beta, v).sqrt()
        if self.eps_on == "raw":
            return torch.div(direction, denominator.add_(self.eps), out=denominator).mul_(root)
        return torch.div(direction, denominator.div_(root).add_(self.eps), out=denominator)
