"""The write into the parameters:  W <- W - lr alpha W - lr U, in place and nowhere else, and the rates lr and alpha."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.numerics import scale_tensors_

from .weight_decay import StepScale, WeightDecay


@dataclass(frozen=True)
class Hyper:
    """Values of a param group at one step.

    lr: learning rate.
    peak_lr: the largest learning rate of the run, as far as it is known.
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

    lr_ratio: float = 1.0
    decay: WeightDecay | None = None


@dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay of P parameters at one step.

    decay: the recipe's, which is that of every route without a decay of its own.
    routes: rates of routes, by path.
    hypers: values of the param groups, by number of the group.
    groups: `[P]`, the number of each parameter's group.
    by_value: whether groups with the same values count as one. Ranks that take sums of the same parameters together
        cannot tell by values, which may differ between them until they are checked.
    """

    decay: WeightDecay
    routes: Mapping[str, RouteRates]
    hypers: Mapping[int, Hyper]
    groups: NDArray[np.int64]
    by_value: bool = True
    _scales: dict[tuple[str, int], StepScale] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """`[P]`, the first group with the values of each parameter's; a tensor is not read, it equals itself alone."""
        seen: dict[tuple[float, ...], int] = {}
        first = {}
        for group, own in self.hypers.items():
            lr = id(own.lr) if isinstance(own.lr, Tensor) else own.lr
            key = (lr, own.peak_lr, own.weight_decay) if self.by_value else (group,)
            first[group] = seen.setdefault(key, group)
        return np.array([first[group] for group in self.groups.tolist()], dtype=np.int64)

    def step_scale(self, path: str, position: int) -> StepScale:
        """Learning rate and decay factor of a parameter with the update at a path."""
        return self._scale(path, int(self.alike[position]))

    def _scale(self, path: str, group: int) -> StepScale:
        if (path, group) not in self._scales:
            hyper, (ratio, own) = self.hypers[group], self.routes.get(path, RouteRates())
            decay, rate = (self.decay, hyper.weight_decay) if own is None else (own, own.rate)
            alpha = decay.alpha(rate, hyper.lr * ratio, hyper.peak_lr * ratio)
            self._scales[path, group] = StepScale(hyper.lr * ratio, alpha, decay, rate)
        return self._scales[path, group]

    def lr(self, path: str, positions: NDArray[np.int64]) -> float | Tensor:
        """Learning rate of parameters of one group with the update at a path."""
        return self.step_scale(path, int(positions[0])).lr

    def decays(self, path: str) -> bool:
        """Whether parameters with the update at a path may have a decay beside it."""
        alphas = (self._scale(path, group).alpha for group in self.hypers)
        return any(isinstance(alpha, Tensor) or alpha != 0 for alpha in alphas)

    def decays_gradients(self, path: str) -> bool:
        """Whether a decay is added to gradients of the update at a path."""
        return any(scale.gradient_rate for scale in (self._scale(path, group) for group in self.hypers))

    def map_rows(
        self,
        path: str,
        positions: NDArray[np.int64],
        function: Callable[[Tensor, Tensor, StepScale], Tensor],
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        """function(x, y, rates) of the rows of two stacks `[n, *block]`, with the rates of each.

        positions: `[n]`, of the parameters that the rows belong to, which have the update at a path.
        """
        groups = self.alike[positions]
        if (groups == groups[0]).all():
            return function(x, y, self._scale(path, int(groups[0])))
        out = torch.empty_like(y)
        for group in np.unique(groups).tolist():
            rows = torch.from_numpy(np.flatnonzero(groups == group)).to(y.device)
            out[rows] = function(x[rows], y[rows], self._scale(path, group))
        return out

    def idle(self, nonzero: Callable[[Sequence[int]], bool]) -> NDArray[np.bool_]:
        """`[P]`, parameters of groups whose learning rate is 0, as the host knows, and whose gradients are.

        nonzero: whether any of the gradients at some positions has an entry other than 0.
        """
        found = np.zeros(len(self.groups), dtype=np.bool_)
        for group, hyper in self.hypers.items():
            if isinstance(hyper.lr, float) and hyper.lr == 0:
                own = self.groups == group
                found |= own & (not nonzero(np.flatnonzero(own).tolist()))
        return found


def write(
    parameters: Sequence[Tensor], updates: Sequence[Tensor], step_scale: StepScale, mask: Sequence[Tensor] | None = None
) -> None:
    """Changes the parameters by their updates (n tensors of the same shapes).

    mask: n 0-d booleans; a parameter whose mask is False stays as it is.
    """
    numbers = isinstance(step_scale.lr, float) and isinstance(step_scale.alpha, float)
    if numbers and mask is None and not step_scale.decay.cautious:
        alike = [parameter.dtype == update.dtype for parameter, update in zip(parameters, updates, strict=True)]
        _write_foreach(list(compress(parameters, alike)), list(compress(updates, alike)), step_scale)
        rest = [index for index, same in enumerate(alike) if not same]
    else:
        rest = list(range(len(parameters)))
    for index in rest:
        parameter, update = parameters[index], updates[index]
        value = moved(parameter.to(update.dtype), update, step_scale)
        if mask is not None:
            value = torch.where(mask[index], value, parameter)
        parameter.copy_(value)


def _write_foreach(parameters: list[Tensor], updates: list[Tensor], step_scale: StepScale) -> None:
    if not parameters:
        return
    shrink = 1 - float(step_scale.lr * step_scale.alpha)
    if shrink != 1 and not step_scale.after:
        scale_tensors_(parameters, shrink)
    torch._foreach_add_(parameters, updates, alpha=-float(step_scale.lr))
    if shrink != 1 and step_scale.after:
        scale_tensors_(parameters, shrink)


def moved(parameter: Tensor, update: Tensor, step_scale: StepScale) -> Tensor:
    """The new value of a parameter, by the same operations as in `write`, in the dtype of both."""
    value = parameter if step_scale.after else decayed(parameter, update, step_scale)
    value = (
        value - step_scale.lr * update if isinstance(step_scale.lr, Tensor) else value.add(update, alpha=-step_scale.lr)
    )
    return decayed(value, update, step_scale) if step_scale.after else value


def moved_apart(parameter: Tensor, update: Tensor, step_scale: StepScale) -> Tensor:
    """The new value of a parameter whose decay is in its update."""
    return moved(parameter, update, step_scale.without_decay)


def decayed(parameter: Tensor, update: Tensor, step_scale: StepScale) -> Tensor:
    """W - lr alpha W, on the entries that decay."""
    if step_scale.decay.cautious:
        return parameter - step_scale.lr * step_scale.decay_term(parameter, update)
    return parameter * (1 - step_scale.lr * step_scale.alpha)


def with_decay(parameter: Tensor, update: Tensor, step_scale: StepScale) -> Tensor:
    """U + alpha W, on the entries that decay."""
    return update + step_scale.decay_term(parameter, update)


def decayed_gradient(gradient: Tensor, parameter: Tensor, step_scale: StepScale) -> Tensor:
    """g + rate W, for a decay that is added to gradients."""
    rate = step_scale.gradient_rate
    return torch.add(gradient, parameter, alpha=rate) if rate else gradient
