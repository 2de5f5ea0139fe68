"""Stages that return the direction itself, its signs, or its magnitudes with the signs of the gradient."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage, Traits


class Identity(Stage):
    """d, the direction unchanged. As the only stage of a chain, it gives stochastic gradient descent; as the
    `magnitude` of a `graft`, SGD grafting.
    """

    kind: Literal["identity"] = "identity"

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True, spectral_gain=1.0)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction


class Sign(Stage):
    """sign(d), 0 where d is 0: steepest descent in the maximum norm (signSGD, Bernstein et al. 2018)."""

    kind: Literal["sign"] = "sign"

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True, spectral_norm=math.sqrt(math.prod(block)), scale_free=True)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction.sign()


class GradientSign(Stage):
    """|d| sign(g): the magnitudes of the direction d with the signs of the gradient g, and 0 where d or g is 0.

    After Adam's stages this stage gives Grams (Cao, Li & Song 2024, arXiv:2412.17107, Algorithm 1).
    """

    kind: Literal["gradient_sign"] = "gradient_sign"

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True, spectral_gain=1.0)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction.abs().mul_(gradient.sign())
