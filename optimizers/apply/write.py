"""The write into the parameters:  W <- W - lr alpha W - lr U, in place and nowhere else, and the rates lr and alpha."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .weight_decay import WeightDecay


@dataclass(frozen=True)
class StepScale:
    """The numbers of one write: lr, alpha (as in `WeightDecay`), and the decay rule that alpha belongs to."""

    lr: float | Tensor
    alpha: float | Tensor
    decay: WeightDecay

    @property
    def after(self) -> bool:
        """Whether the decay acts on the moved parameter."""
        return self.decay.after

    @property
    def without_decay(self) -> StepScale:
        """This scale with alpha = 0, for a step whose decay was taken elsewhere."""
        return replace(self, alpha=0.0)

    def decay_term(self, parameter: Tensor, update: Tensor) -> Tensor:
        """alpha W, or alpha W [U W > 0] for cautious decay; in the dtype of the update."""
        term = parameter.to(update.dtype) * self.alpha
        return torch.where(update * parameter > 0, term, 0.0) if self.decay.cautious else term


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


class RouteRates(NamedTuple):
    """Rates of a route's own.

    lr_ratio: factor of the group's learning rate.
    decay: rule of weight decay, which does not follow the group's rate; None: the recipe's, which does.
    """

    lr_ratio: float
    decay: WeightDecay | None


@dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay of every update of a recipe at one step.

    decay: the recipe's, which is that of every route without a decay of its own.
    routes: rates of routes, by path.
    hyper: values of the param group.
    """

    decay: WeightDecay
    routes: Mapping[str, RouteRates]
    hyper: Hyper

    def step_scale(self, path: str) -> StepScale:
        """Learning rate and decay factor of the update at a path."""
        decay, rate = self._decay(path)
        ratio, hyper = self.routes[path].lr_ratio if path in self.routes else 1.0, self.hyper
        return StepScale(hyper.lr * ratio, decay.alpha(rate, hyper.lr * ratio, hyper.peak_lr * ratio), decay)

    def gradient_decay(self, path: str) -> float:
        """Rate of a decay that is added to the gradient; 0 if the decay acts elsewhere."""
        decay, rate = self._decay(path)
        return rate if decay.in_gradient else 0.0

    def _decay(self, path: str) -> tuple[WeightDecay, float]:
        """The decay of an update and its rate."""
        own = self.routes[path].decay if path in self.routes else None
        return (self.decay, self.hyper.weight_decay) if own is None else (own, own.rate)


class EntryUpdate(NamedTuple):
    """The update of some entries of a parameter.

    position: position of the parameter.
    entries: the entries, a view of what this rank holds of the parameter, or all of that.
    value: their update, of the same shape.
    """

    position: int
    entries: Tensor
    value: Tensor


def write(
    parameters: Sequence[Tensor], updates: Sequence[Tensor], step_scale: StepScale, mask: Sequence[Tensor] | None = None
) -> None:
    """Changes the parameters by their updates (n tensors of the same shapes).

    mask: n 0-d booleans; a parameter whose mask is False stays as it is.
    """
    plain: tuple[list[Tensor], list[Tensor]] = ([], [])
    numbers = isinstance(step_scale.lr, float) and isinstance(step_scale.alpha, float)
    for index, (parameter, update) in enumerate(zip(parameters, updates, strict=True)):
        if numbers and mask is None and not step_scale.decay.cautious and parameter.dtype == update.dtype:
            plain[0].append(parameter)
            plain[1].append(update)
            continue
        value = moved(parameter.to(update.dtype), update, step_scale)
        if mask is not None:
            value = torch.where(mask[index], value, parameter)
        parameter.copy_(value)
    if plain[0]:
        _write_foreach(*plain, step_scale)


def _write_foreach(parameters: list[Tensor], updates: list[Tensor], step_scale: StepScale) -> None:
    shrink = 1 - float(step_scale.lr * step_scale.alpha)
    if shrink != 1 and not step_scale.after:
        torch._foreach_mul_(parameters, shrink)
    torch._foreach_add_(parameters, updates, alpha=-float(step_scale.lr))
    if shrink != 1 and step_scale.after:
        torch._foreach_mul_(parameters, shrink)


def moved(parameter: Tensor, update: Tensor, step_scale: StepScale) -> Tensor:
    """The new value of a parameter, by the same operations as in `write`, in the dtype of both."""
    value = parameter if step_scale.after else decayed(parameter, update, step_scale)
    value = (
        value - step_scale.lr * update if isinstance(step_scale.lr, Tensor) else value.add(update, alpha=-step_scale.lr)
    )
    return decayed(value, update, step_scale) if step_scale.after else value


def decayed(parameter: Tensor, update: Tensor, step_scale: StepScale) -> Tensor:
    """W - lr alpha W, on the entries that decay."""
    if step_scale.decay.cautious:
        return parameter - step_scale.lr * step_scale.decay_term(parameter, update)
    return parameter * (1 - step_scale.lr * step_scale.alpha)
