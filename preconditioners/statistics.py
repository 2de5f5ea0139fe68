"""What a Kronecker factor accumulates about the gradient along one axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.clock import Clock
from eigengraft.component import Component
from eigengraft.slots import Slot, State

from .kronecker import gram_


class Statistic(Component, ABC, family="statistic"):
    """One symmetric positive semi-definite matrix `[N, d, d]` for each axis that is preconditioned."""

    @abstractmethod
    def axes(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """Which axes of a block have a factor."""

    @abstractmethod
    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        """State for one block."""

    @abstractmethod
    def observe(self, state: State, gradient: Tensor, clock: Clock) -> None:
        """Accumulates one gradient `[N, *block]`."""

    @abstractmethod
    def estimate(self, state: State, axis: int, clock: Clock) -> Tensor:
        """The factor `[N, d, d]` of one axis as a solver should see it; a fresh tensor or a view of state."""


class Gram(Statistic):
    """A_k <- b A_k + w mat_k(G) mat_k(G)^T;  estimate A_k / (1 - b^t)

    Running mean: w = 1 - b. Sum (b = 1): w = 1 and no correction (Gupta et al. 2018, Algorithm 2; Shi et al. 2023,
    section 3).
    """

    kind: Literal["gram"] = "gram"
    beta: float = Field(default=0.95, ge=0, le=1, description="decay of the factors, per step; 1 = sum")
    bias_correction: bool = Field(default=True, description="divide by 1 - beta^t; a sum (beta = 1) has no bias")
    side: Literal["both", "left", "right", "smaller"] = Field(
        default="both", description="which axes have a factor: all, the first, the last, or the shortest"
    )
    max_size: int | None = Field(
        default=None, ge=1, description="axes longer than this have no factor; default: no bound"
    )
    vectors: bool = Field(default=True, description="whether blocks with one axis have a factor")

    def axes(self, block: tuple[int, ...]) -> tuple[int, ...]:
        if len(block) < 2 and not self.vectors:
            return ()
        order = len(block)
        chosen = {
            "both": range(order),
            "left": range(min(1, order)),
            "right": range(max(0, order - 1), order),
            "smaller": sorted(range(order), key=lambda axis: block[axis])[:1],
        }[self.side]
        return tuple(axis for axis in chosen if self.max_size is None or block[axis] <= self.max_size)

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {f"factor.{axis}": Slot((block[axis],) * 2, role="statistic") for axis in self.axes(block)}

    def observe(self, state: State, gradient: Tensor, clock: Clock) -> None:
        weight = 1 - self.beta if self.beta < 1 else 1.0
        for axis in self.axes(state.block):
            name = f"factor.{axis}"
            state[name] = gram_(state[name], gradient, axis, self.beta, weight)

    def estimate(self, state: State, axis: int, clock: Clock) -> Tensor:
        factor = state[f"factor.{axis}"]
        if self.beta == 1 or not self.bias_correction:
            return factor
        # never less than one gradient's weight: a lagged stage is refreshed at step 0, when it has seen one
        return factor / clock.correction(self.beta, factor).clamp_min(1 - self.beta)
