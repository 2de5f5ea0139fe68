"""Schedules of the learning rate over a run: lr(step) = lr * factor(step), applied by torch's `LambdaLR`."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal, final

from pydantic import Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from eigengraft.component import Component


class LearningRateSchedule(Component, family="schedule"):
    """A factor on the learning rate, a function of the step and the length of the run alone.

    For k < warmup_steps the factor is (k + 1) / warmup_steps. Later it is `decay(t)`, where t = (k - warmup_steps) /
    (steps - warmup_steps) goes from 0 to 1.
    """

    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up from 0; fewer than the run has")

    @abstractmethod
    def decay(self, t: float) -> float:
        """Return the factor at the fraction `t` in [0, 1] of the steps after the warm-up. Called before every step. The
        largest factor of a run is 1, so that the `lr` of an experiment is its peak.
        """

    @final
    def factor(self, step: int, steps: int) -> float:
        """Return the factor on the learning rate at `step` (0-based) of a run of `steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.decay((step - self.warmup_steps) / (steps - self.warmup_steps))

    def shared_steps(self, steps: int, longer: int | None = None) -> int:
        """Return the number of steps from the start in which a run of `steps` and a longer run have equal factors.

        longer: number of steps of the longer run; None: 2 * `steps`.
        """
        longer = longer or 2 * steps
        differs = (k for k in range(steps + 1) if self.factor(k, steps) != self.factor(k, longer))
        return next(differs, steps + 1)

    @final
    def scheduler(self, optimizer: Optimizer, steps: int) -> LambdaLR:
        """Return a torch scheduler for `optimizer`. It must be stepped once after every optimizer step."""
        return LambdaLR(optimizer, lambda step: self.factor(step, steps))


class Constant(LearningRateSchedule):
    """decay(t) = 1"""

    kind: Literal["constant"] = "constant"

    def decay(self, t: float) -> float:
        return 1.0


class Cosine(LearningRateSchedule):
    """decay(t) = final + (1 - final) (1 + cos(pi t)) / 2,  t the fraction of the run after warm-up, from 0 to 1"""

    kind: Literal["cosine"] = "cosine"
    final: float = Field(default=0.1, ge=0, le=1, description="fraction of the learning rate left at the end")

    def decay(self, t: float) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * t)) / 2


class Linear(LearningRateSchedule):
    """decay(t) = 1 - (1 - final) t,  t the fraction of the run after warm-up, from 0 to 1"""

    kind: Literal["linear"] = "linear"
    final: float = Field(default=0.0, ge=0, le=1, description="fraction of the learning rate left at the end")

    def decay(self, t: float) -> float:
        return 1 - (1 - self.final) * t


class PowerDecay(LearningRateSchedule):
    """decay(t) = final + (1 - final) (1 - t^power),  t the fraction of the run after warm-up, from 0 to 1

    With power 1 it is `linear`. With a larger power the learning rate stays high for longer; with power 1/2 it falls
    fastest at the start.
    """

    kind: Literal["power"] = "power"
    power: float = Field(default=2.0, gt=0, description="exponent of t; the larger, the later the rate falls")
    final: float = Field(default=0.0, ge=0, le=1, description="fraction of the learning rate left at the end")

    def decay(self, t: float) -> float:
        return self.final + (1 - self.final) * (1 - math.pow(t, self.power))


class WarmupStableDecay(LearningRateSchedule):
    """decay(t) = 1 if t <= 1 - f, else final + (1 - final) s(x), with f = decay_fraction and x = (t - 1 + f) / f

    t is the fraction of the run after warm-up, from 0 to 1.

    linear:  s(x) = 1 - x  (WSD, Hu et al. 2024, arXiv:2404.06395; f = 1 is `linear`)
    sqrt:    s(x) = 1 - sqrt(x)  (Haegele et al. 2024, arXiv:2405.18392)
    """

    kind: Literal["wsd"] = "wsd"
    decay_fraction: float = Field(
        default=0.2, gt=0, le=1, description="fraction of the steps after the warm-up in which the rate falls"
    )
    shape: Literal["linear", "sqrt"] = Field(default="linear", description="form s(x) of the fall")
    final: float = Field(default=0.0, ge=0, le=1, description="fraction of the learning rate left at the end")

    def decay(self, t: float) -> float:
        x = max(0.0, (t - (1 - self.decay_fraction)) / self.decay_fraction)
        return self.final + (1 - self.final) * (1 - (x if self.shape == "linear" else math.sqrt(x)))
