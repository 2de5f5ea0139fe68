"""Inputs of one step: what a param group says, what rates follow from it, which gradients take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..apply.weight_decay import WeightDecay
from ..apply.write import StepScale
from ..recipe.recipe import Recipe, Route
from ..sharding.fingerprint import STEPS, StepNumbers

GatherSource = Literal["gradients", "parameters"]
"""What is gathered into blocks: gradients, or the tensors that weight decay acts on."""


@dataclass(frozen=True)
class Hyper:
    """Values of a param group at one step.

    lr: learning rate.
    peak_lr: learning rate that the group began with.
    weight_decay: decay rate.
    """

    lr: float | Tensor
    peak_lr: float
    weight_decay: float

    def numbers(self, steps: int) -> StepNumbers:
        """What all ranks must step with; steps: steps before this one."""
        return {"lr": self.lr, "peak_lr": self.peak_lr, "weight_decay": self.weight_decay, STEPS: float(steps)}


@dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay of every update of a recipe at one step.

    recipe: the recipe, whose decay is that of every route without a decay of its own.
    updates: the updates of the recipe by path; a route may scale the learning rate.
    hyper: values of the param group.
    """

    recipe: Recipe
    updates: Mapping[str, Recipe | Route]
    hyper: Hyper

    def step_scale(self, path: str) -> StepScale:
        """Learning rate and decay factor of the update at a path."""
        rule, hyper = self.updates[path], self.hyper
        decay, rate = self._decay(path)
        ratio = rule.lr_ratio if isinstance(rule, Route) else 1.0
        return StepScale(hyper.lr * ratio, decay.alpha(rate, hyper.lr * ratio, hyper.peak_lr * ratio), decay)

    def gradient_decay(self, path: str) -> float:
        """Rate of a decay that is added to the gradient; 0 if the decay acts elsewhere."""
        decay, rate = self._decay(path)
        return rate if decay.in_gradient else 0.0

    def _decay(self, path: str) -> tuple[WeightDecay, float]:
        """The decay of an update and its rate; a route's own decay does not follow the group's rate."""
        rule = self.updates[path]
        if isinstance(rule, Route) and rule.weight_decay is not None:
            return rule.weight_decay, rule.weight_decay.rate
        return self.recipe.weight_decay, self.hyper.weight_decay


@dataclass(frozen=True)
class GivenGradients:
    """Gradients of P parameters that a step is asked to take.

    gradients: what this rank holds of each gradient, by position; None: no gradient.
    present: `[P]` on the host, parameters that have a gradient here.
    numbers: what all ranks must step with.
    """

    gradients: Sequence[Tensor | None]
    present: NDArray[np.bool_]
    numbers: StepNumbers


@dataclass(frozen=True)
class Step:
    """One step of P parameters.

    gradients: what this rank holds of each gradient, by position; None: no gradient.
    active: `[P]` on the host, parameters that are updated.
    mask: `[P]` on the device, gradients that are usable; None: those of all active parameters.
    rates: learning rate and weight decay of each update.
    """

    gradients: Sequence[Any]
    active: NDArray[np.bool_]
    mask: Tensor | None
    rates: Rates
