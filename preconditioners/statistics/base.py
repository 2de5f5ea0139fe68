"""The family of statistics: what is observed, how contributions are accumulated, what a solver is shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import per_block, symmetrized, tiny, to_power
from eigengraft.ramps import Schedulable
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import ProductDtype
from ..algebra.symmetric import add_symmetric
from ..axes import Axes
from ..polar.solvers import NewtonSchulz, PolarSolver
from .terms import Contribution, Powers


class Statistic(Schedulable, ABC, family="statistic"):
    """A_k <- b A_k + w O_k  for each axis k with a factor;  estimate A_k / c, then A_k max(tr(A_k), floor)^(-s)

    O_k `[N, d, d]` is the contribution of one gradient (or its diagonal `[N, d]`, as `axes` says). Running
    mean (b < 1): w = 1 - b, c = 1 - b^t. Sum (b = 1) and `damped: false`: w = 1, c = 1. t counts observations.
    """

    beta: float = Field(default=0.95, ge=0, le=1, description="decay of the factors, per observation; 1 = sum")
    bias_correction: bool = Field(default=True, description="divide by 1 - beta^t; a sum has no bias")
    damped: bool = Field(default=True, description="contributions have weight 1 - beta; false: weight 1, uncorrected")
    initial: float = Field(default=0.0, ge=0, description="A_k starts as this times the identity")
    constants: ClassVar[frozenset[str]] = frozenset({"beta"})
    requires: ClassVar[frozenset[str]] = frozenset()
    """Signals that must be there when the statistic observes."""
    of_inputs: ClassVar[bool] = False
    """Whether the statistic is of the inputs of layers, and blocks must be matrices of outputs and inputs."""
    trace_scaling: float = Field(
        default=0.0, ge=0, le=1, description="power s: the estimate is multiplied by trace^(-s); 0 = not at all"
    )
    trace_floor: float = Field(default=0.0, ge=0, description="least trace to divide by, in units of squared gradients")
    interval: int = Field(default=1, ge=1, description="observe at updates 1, 1 + interval, 1 + 2 interval, ...")
    source: Literal["gradient", "direction", "orthogonalized"] = Field(
        default="gradient",
        description="what is observed: the gradient, what the stages before made of it (after `momentum`, the "
        "momentum), or the polar factor of that",
    )
    polar: PolarSolver = Field(default=NewtonSchulz(), description="how `source: orthogonalized` gets the polar factor")
    precision: ProductDtype = Field(default="input", description="dtype of the product that a contribution is")
    axes: Axes = Field(default=Axes(), description="which axes have a factor, and whether it is a matrix or a diagonal")

    @model_validator(mode="after")
    def _options_matter(self) -> Self:
        if self.source != "orthogonalized" and self.polar != type(self).model_fields["polar"].default:
            raise ValueError(f"polar: `source: orthogonalized` is required, got source '{self.source}'")
        if self.trace_floor and not self.trace_scaling:
            raise ValueError(f"trace_floor: `trace_scaling` is required, got floor {self.trace_floor} without it")
        summed = "beta 1" if self.beta == 1 else "damped false" if not self.damped else None
        if self.beta == 1 and not self.damped:
            raise ValueError("damped: true is required with beta 1, whose contributions enter with weight 1, got false")
        if summed and not self.bias_correction:
            raise ValueError(f"bias_correction: true is required with {summed}, which has no bias, got false")
        if self.precision != "input" and (self.of_inputs or self.axes.entries == "diagonal"):
            raise ValueError(f"precision: a statistic made of products is required, got {self.precision}")
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"beta": self.beta == 1, "damped": self.damped, "source": self.source}

    @property
    def needs_power(self) -> Fraction | None:
        """The power of the other axes' factors that a contribution reads; None: it reads no other factor."""
        return None

    @property
    def sequential(self) -> bool:
        """Whether each axis is observed and refreshed before the next one is observed (Gauss-Seidel)."""
        return False

    @property
    def every_gradient(self) -> bool:
        """Whether the factors are made of gradients alone, and of all of them."""
        return self.source == "gradient" and self.interval == 1 and not self.initial

    @property
    def decay_of_squares(self) -> float | None:
        """The decay b, if Q^T A_k Q has on its diagonal running means or sums of squared gradients, else None.

        The squares are summed over all other axes, with `needs_power` weighted by that power of their eigenvalues.
        """
        return None

    @abstractmethod
    def contribution(self, state: State, x: Tensor, axis: int, powers: Powers, context: StepContext) -> Contribution:
        """What one step x `[N, *block]` contributes to the factor of one axis."""

    def contributions(
        self, state: State, x: Tensor, axes: tuple[int, ...], powers: Powers, context: StepContext
    ) -> list[Contribution]:
        """What one step contributes to the factors of some axes, in their order; for those that share work."""
        return [self.contribution(state, x, axis, powers, context) for axis in axes]

    def slots(self, block: tuple[int, ...], axes: tuple[int, ...]) -> Mapping[str, Slot]:
        """The factors of those axes for one block."""
        slots = {}
        for axis in axes:
            d = block[axis]
            if self.axes.full(block, axis):
                slot = Slot((d, d), "identity" if self.initial else 0.0, "statistic", axes=(axis,), scale=self.initial)
            else:
                slot = Slot((d,), fill=self.initial, role="statistic", frame="square", axes=(axis,))
            slots[f"factor.{axis}"] = slot
        return slots

    def has(self, state: State, axis: int) -> bool:
        """Whether an axis has a factor in that state."""
        return f"factor.{axis}" in state

    def rotate(self, state: State, axis: int, rotation: Tensor) -> None:
        """A <- R^T A R: brings the factor of one axis, a matrix, to the basis that R `[N, d, d]` turns into."""
        factor = state[f"factor.{axis}"]
        state[f"factor.{axis}"] = symmetrized(torch.bmm(rotation.mT, torch.bmm(factor, rotation)))

    def observed(self, x: Tensor) -> Tensor:
        """The tensor that is observed: the gradient or direction x as `source` chooses it, or its polar factor."""
        return self.polar.of_blocks(x) if self.source == "orthogonalized" else x

    def observe(self, state: State, x: Tensor, context: StepContext, axes: tuple[int, ...], powers: Powers) -> None:
        """Accumulate the contributions of x `[N, *block]` to some axes; all are computed before any factor changes."""
        now = None
        if self.interval > 1:
            due = context.holds(lambda steps: (steps <= 1) | ((steps - 1) % self.interval == 0))
            if due is False:
                return
            now = None if due is True else torch.from_numpy(due).to(device=x.device, dtype=x.dtype)
        contributions = self.contributions(state, x, axes, powers, context)
        for axis, contribution in zip(axes, contributions, strict=True):
            factor = state[f"factor.{axis}"]
            state[f"factor.{axis}"] = self._accumulate(factor, contribution, now)

    @property
    def _weight(self) -> float:
        """w, the weight of the newest contribution."""
        return 1 - self.beta if self.damped and self.beta < 1 else 1.0

    def _accumulate(self, factor: Tensor, contribution: Contribution, now: Tensor | None) -> Tensor:
        """In place: factor <- decay factor + weight scale y z^T. now `[N]`: 1 for blocks that observe, 0 for others."""
        y, z, scale = contribution.multiplied() if self.precision != "input" and factor.ndim == 3 else contribution
        decay, weight = self.beta, self._weight
        if now is not None:
            factor.mul_(per_block(1 - now * (1 - decay), factor))
            decay, scale = 1.0, now * scale
        if z is None:
            made = (y if factor.ndim == 3 else y.diagonal(dim1=-2, dim2=-1)) * weight
            return factor.mul_(decay).add_(made * (scale if isinstance(scale, float) else per_block(scale, made)))
        if factor.ndim == 2:
            sums = (y * z).sum(-1)
            return factor.mul_(decay).add_(sums * (scale if isinstance(scale, float) else scale[:, None]), alpha=weight)
        if isinstance(scale, float):
            return add_symmetric(factor, y, z, decay, weight * scale)
        return add_symmetric(factor, y * per_block(scale, y), z, decay, weight)

    def estimate(self, state: State, axis: int, context: StepContext, behind: int = 0) -> Tensor:
        """The factor `[N, d, d]` of one axis as a solver should see it, `[N, d]` if diagonal; fresh or a view.

        behind: how many updates ago the factor was last accumulated.
        """
        factor = state[f"factor.{axis}"]
        if self.beta < 1 and self.bias_correction and self.damped:
            factor = factor / context.correction(self.beta, factor, lambda step: self._observations(step - behind))
        if self.trace_scaling:
            trace = (factor.diagonal(dim1=-2, dim2=-1) if factor.ndim == 3 else factor).sum(-1)
            power = to_power(trace.clamp_min(max(self.trace_floor, tiny(trace.dtype))), -self.trace_scaling)
            factor = factor * per_block(power, factor)
        return factor

    def _observations(self, step: Tensor) -> Tensor:
        """The number of observations up to a step; at least 1, for a lagged stage observes at step 0 as well."""
        return 1 + torch.div((step - 1).clamp_min(0), self.interval, rounding_mode="floor")
