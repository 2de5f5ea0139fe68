"""The base of stages that learn a matrix for each axis by steps of its own, without a statistic or a root."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..axes import Axes
from ..base import Stage
from ..cadence import Cadence, Every
from ..traits import Traits


class LearnedFactors(Stage):
    """A factor for each axis that is itself the state: a refresh moves it by the current gradient, then it is used.

    A gradient that is zero or not finite leaves the factors as they are.
    """

    every: Cadence = Field(default=Every(steps=1), alias="refresh", description="when the factors take a step")
    source: Literal["gradient", "direction"] = Field(
        default="gradient",
        description="what the factors learn from: the gradient, or what the stages before made of it",
    )
    axes: Axes = Field(default=Axes(), description="which axes have a factor, and whether it is a matrix or a diagonal")

    @abstractmethod
    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Move the factors by one gradient `[N, *block]`."""

    def state_meaning(self) -> Mapping[str, Any]:
        return {"source": self.source}

    def factor_axes(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """Which axes of a block have a factor."""
        return self.axes.of(block)

    def cadence(self) -> Cadence:
        return self.every

    def traits(self, block: tuple[int, ...]) -> Traits:
        cost = sum(block[axis] ** (3 if self.axes.full(block, axis) else 1) for axis in self.factor_axes(block))
        return Traits(learns=self.source, refresh_cost=float(cost), left_out=self.axes.left_out(block))


def factor_slot(d: int, full: bool) -> Slot:
    """The identity, as a matrix or as its diagonal."""
    return Slot((d, d), fill="identity", role="root") if full else Slot((d,), fill=1.0, role="root")


def is_informative(gradient: Tensor) -> Tensor:
    """`[N]`: whether a gradient moves factors: it is finite and not zero."""
    peak = peak_of(gradient)
    return (peak > 0) & peak.isfinite()


def peak_of(x: Tensor) -> Tensor:
    """The largest modulus in each block, `[N, *block] -> [N]`."""
    peak: Tensor = torch.linalg.vector_norm(x.flatten(1), ord=float("inf"), dim=1)
    return peak
