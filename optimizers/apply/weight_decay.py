"""Weight decay: the part of a parameter W that is subtracted beside the update.  W <- W - lr alpha W - lr U"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from eigengraft.component import Component
from eigengraft.numerics import tiny


class WeightDecay(Component, ABC, family="weight_decay"):
    """A rate and a rule; a param group's own `weight_decay` replaces the rate."""

    rate: float = Field(default=0.0, ge=0, description="decay rate")
    number: ClassVar[tuple[str, str] | None] = ("decoupled", "rate")
    cautious: ClassVar[bool] = False
    """Whether only those entries decay whose update points towards zero."""
    in_gradient: ClassVar[bool] = False
    """Whether rate * W is added to the gradient, before anything else sees it, instead."""
    relative: ClassVar[bool] = False
    """Whether alpha depends on the peak of the learning rate."""

    @property
    def after(self) -> bool:
        """Whether the decay acts on the parameter that the update has moved."""
        return False

    @abstractmethod
    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        """alpha of the formula, for the current learning rate and the largest one of the run, peak_lr."""


def nonzero_peak(lr: float | Tensor, peak_lr: float) -> float | Tensor:
    """The peak of a learning rate, to divide by; 1 where both are 0.

    The host raises `peak_lr` to an lr above it before a step, and does not read a tensor on a device: there the larger
    of both is the peak.
    """
    return lr.clamp_min(peak_lr or tiny(lr.dtype)) if isinstance(lr, Tensor) else peak_lr or 1.0


class L2(WeightDecay):
    """g <- g + rate W (the L2 penalty; `.grad` itself is never written)."""

    kind: Literal["l2"] = "l2"
    in_gradient: ClassVar[bool] = True

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return 0.0


class Decoupled(WeightDecay):
    """alpha = rate (AdamW, Loshchilov & Hutter 2019).

    placed: before the update, or on its result (as published SOAP).
    """

    kind: Literal["decoupled"] = "decoupled"
    placed: Literal["before", "after"] = Field(
        default="before", description="whether W decays before or after the update"
    )

    @property
    def after(self) -> bool:
        return self.placed == "after"

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return rate


class Corrected(WeightDecay):
    """alpha = rate lr / peak_lr: the decay falls with the square of the schedule (AdamC, Defazio 2025)."""

    kind: Literal["corrected"] = "corrected"
    relative: ClassVar[bool] = True

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return rate * lr / nonzero_peak(lr, peak_lr)


class Independent(WeightDecay):
    """alpha = rate / peak_lr: W shrinks by rate times the schedule alone (Wortsman et al. 2023)."""

    kind: Literal["independent"] = "independent"
    relative: ClassVar[bool] = True

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return rate / nonzero_peak(lr, peak_lr)


class CautiousDecay(WeightDecay):
    """alpha = rate on entries with U W > 0, 0 elsewhere (cautious weight decay, Chen et al. 2025)."""

    kind: Literal["cautious"] = "cautious"
    cautious: ClassVar[bool] = True

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return rate


@dataclass(frozen=True)
class StepScale:
    """The numbers of one write.

    lr: learning rate.
    alpha: decay factor, as in `WeightDecay.alpha`.
    decay: the rule that alpha belongs to.
    rate: its decay rate.
    kept: 1 - lr alpha, the factor of a parameter that decays; default: computed from the two.
    """

    lr: float | Tensor
    alpha: float | Tensor
    decay: WeightDecay
    rate: float | Tensor = 0.0
    kept: float | Tensor | None = None

    @property
    def after(self) -> bool:
        """Whether the decay acts on the parameter after its update."""
        return self.decay.after

    @property
    def decays(self) -> bool:
        """Whether the write has a decay; a tensor is not read, it counts as one."""
        return isinstance(self.alpha, Tensor) or self.alpha != 0

    @property
    def shrink(self) -> float | Tensor:
        """1 - lr alpha."""
        return 1 - self.lr * self.alpha if self.kept is None else self.kept

    @property
    def without_decay(self) -> StepScale:
        """This scale with alpha = 0, for a step whose decay is taken elsewhere."""
        return replace(self, alpha=0.0, kept=None)

    @property
    def gradient_rate(self) -> float | Tensor:
        """Rate of a decay that is added to the gradient; 0 if the decay acts elsewhere."""
        return self.rate if self.decay.in_gradient else 0.0
