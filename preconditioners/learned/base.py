"""The base of stages that learn a matrix for each axis by steps of its own, without a statistic or a root.

Algebra of factors that may be full, `[N, d, d]`, or diagonal, `[N, d]`.

Legend: N blocks; d length of an axis; X unfolding of a block along it, `[N, d, rest]`.
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


Factors = Mapping[int, Tensor]


def factor_transposed(factor: Tensor) -> Tensor:
    """Q^T."""
    return factor if factor.ndim == 2 else factor.mT


def gram(x: Tensor, axis: int, full: bool) -> Tensor:
    """X X^T, or its diagonal."""
    y = unfold(x, axis)
    return symmetric_product(y, y) if full else y.square().sum(-1)


def solved(x: Tensor, factor: Tensor, axis: int) -> Tensor:
    """x times_axis Q^(-T), for Q upper triangular or diagonal."""
    if factor.ndim == 2:
        return mode_product(x, 1 / factor, axis)
    y = apply_aligned(_solved, unfold(x, axis), factor)
    return fold(y, axis, x.shape)


def _solved(x: Tensor, factor: Tensor) -> Tensor:
    y: Tensor = torch.linalg.solve_triangular(factor.mT, x, upper=False)
    return y


def spectral_norm(a: Tensor) -> Tensor:
    """||A||_2 `[N]` of positive semi-definite A, from below: the power method from the longest column.

    At least the largest entry of the diagonal; exact for a diagonal.
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
    """Factors of the same Kronecker product with one and the same largest entry, so that none over- or underflows."""
    peaks = {
        axis: factor.flatten(1).abs().amax(1).clamp_min(tiny(factor.dtype)).log() for axis, factor in factors.items()
    }
    mean = torch.stack(list(peaks.values())).mean(0)
    return {axis: scaled(factor, (mean - peaks[axis]).exp()) for axis, factor in factors.items()}


def scaled(factor: Tensor, values: Tensor) -> Tensor:
    """Each factor times its own number `[N]`."""
    return factor * per_block(values, factor)
