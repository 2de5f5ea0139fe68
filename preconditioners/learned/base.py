"""The base of stages that learn a matrix for each axis by small steps, and functions for such factors.

Legend:
    N: number of blocks.
    d: length of an axis.
    Q: the factor of an axis, full `[N, d, d]` or diagonal `[N, d]`.
    X: `[N, d, rest]`, the unfolding of a block along the axis.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import apply_aligned, per_block, tiny
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import fold, mode_product, symmetric_product, unfold
from ..base import Stage, Traits
from ..cadence import Cadence, Every
from ..statistics.statistic import Axes


class LearnedFactors(Stage):
    """A stage that learns a factor for each axis from gradients and stores it, without a statistic.

    A refresh updates the factors by the current gradient, before the factors are applied. A gradient that is zero or
    not finite leaves the factors unchanged.
    """

    every: Cadence = Field(
        default=Every(steps=1), alias="refresh", description="steps in which the factors are updated"
    )
    source: Literal["gradient", "direction"] = Field(
        default="gradient",
        description="tensor that the factors learn from: the gradient, or the direction of the stages before",
    )
    axes: Axes = Field(default=Axes(), description="axes that have a factor, as a matrix or as a diagonal")

    @abstractmethod
    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        """Update the factors by one gradient `[N, *block]`."""

    def state_meaning(self) -> Mapping[str, Any]:
        return {"source": self.source}

    def factor_axes(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes of a block that have a factor."""
        return self.axes.of(block)

    def cadence(self) -> Cadence:
        return self.every

    def traits(self, block: tuple[int, ...]) -> Traits:
        cost = sum(block[axis] ** (3 if self.axes.full(block, axis) else 1) for axis in self.factor_axes(block))
        return Traits(learns=self.source, refresh_cost=float(cost), left_out=self.axes.left_out(block))


def factor_slot(d: int, full: bool) -> Slot:
    """Return the declaration of a slot for a factor of order d, which starts as the identity.

    full: True for a matrix, False for a diagonal.
    """
    return Slot((d, d), fill="identity", role="root") if full else Slot((d,), fill=1.0, role="root")


def is_informative(gradient: Tensor) -> Tensor:
    """Return bool `[N]`, True for blocks whose gradient is finite and not zero. Only these gradients update the
    factors.
    """
    peak = peak_of(gradient)
    return (peak > 0) & peak.isfinite()


def peak_of(x: Tensor) -> Tensor:
    """Return the largest absolute value in each block of x `[N, *block]`, as `[N]`."""
    peak: Tensor = torch.linalg.vector_norm(x.flatten(1), ord=float("inf"), dim=1)
    return peak


Factors = Mapping[int, Tensor]
"""The factors Q of the axes, by axis: matrices `[N, d, d]` or diagonals `[N, d]`."""


def transposes(factors: Factors) -> dict[int, Tensor]:
    """Return the transposes of the factors Q, by axis. A diagonal is returned unchanged."""
    return {axis: factor if factor.ndim == 2 else factor.mT for axis, factor in factors.items()}


def gram(x: Tensor, axis: int, full: bool) -> Tensor:
    """Return X X^T `[N, d, d]`, where X is the unfolding of x along an axis. If `full` is False, return its diagonal
    `[N, d]`.
    """
    y = unfold(x, axis)
    return symmetric_product(y, y) if full else y.square().sum(-1)


def solved(x: Tensor, factor: Tensor, axis: int) -> Tensor:
    """Return x multiplied along an axis by Q^(-T), where Q is the factor of this axis, upper triangular or diagonal."""
    if factor.ndim == 2:
        return mode_product(x, 1 / factor, axis)
    y = apply_aligned(lambda y, q: torch.linalg.solve_triangular(q.mT, y, upper=False), unfold(x, axis), factor)
    return fold(y, axis, x.shape)


def spectral_norm(a: Tensor) -> Tensor:
    """Return an estimate of ||A||_2 for positive semi-definite A, `[N]`, by two steps of the power method.

    The estimate never exceeds ||A||_2, is at least the largest entry of the diagonal, and is exact for a diagonal A.

    a: A `[N, d, d]`, or diagonals `[N, d]`.
    """
    if a.ndim == 2:
        return a.amax(-1)
    peak = a.diagonal(dim1=-2, dim2=-1).amax(-1)
    a = a / peak.clamp_min(tiny(a.dtype))[:, None, None]
    longest = a.square().sum(-2).argmax(-1)  # [N]
    x = a.gather(-1, longest[:, None, None].expand(-1, a.shape[-1], 1))  # [N, d, 1]
    for _ in range(2):
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(tiny(a.dtype))
        x = (a * x.mT).sum(-1, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1)).clamp_min(1.0) * peak
    return norm


def balanced(factors: Factors) -> dict[int, Tensor]:
    """Return the factors rescaled so that the largest entries of all factors are equal, and no factor over- or
    underflows.

    The Kronecker product of the factors does not change.
    """
    peaks = {
        axis: factor.flatten(1).abs().amax(1).clamp_min(tiny(factor.dtype)).log() for axis, factor in factors.items()
    }
    mean = torch.stack(list(peaks.values())).mean(0)
    return {axis: scaled(factor, (mean - peaks[axis]).exp()) for axis, factor in factors.items()}


def scaled(factor: Tensor, values: Tensor) -> Tensor:
    """Return the factor `[N, d, d]` or `[N, d]` of each block multiplied by the number that `values` `[N]` has for
    the block.
    """
    return factor * per_block(values, factor)
