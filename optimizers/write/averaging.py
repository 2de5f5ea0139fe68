"""Averaging of iterates: the contract, averages that do not affect training, and averages that do.

With `EMA`, training is the same as without averaging, and evaluation uses the average. `ScheduleFree` and
`PrimalAveraging` take gradients at y, between the base iterate z and its average x:

    y = mu_y x + (1 - mu_y) z      the parameter in training: gradients are taken here
    z <- z - lr U - lr alpha z     the step of the recipe without averaging
    x <- (1 - c) x + c z           the parameter in evaluation

U is the update, lr the learning rate and alpha the weight decay. mu_y is the weight of x in y. c is the weight of the
new z in x, and may change from step to step.

The parameter holds y, and z is stored as state. Both are computed from D = -lr U - lr alpha z, the step of z:

    y <- y + c (z - y) + (1 - mu_y (1 - c)) D    with z before the step
    z <- z + D

These y and z are equal to those above, and x = y + (1 / mu_y - 1) (y - z) is not stored. In this form, if D = 0 and
y = z, no bit of y changes. If a parameter is stored with less precision than it is computed in, y is stored too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.component import Component
from eigengraft.numerics import (
    copies,
    in_dtypes_of,
    may_branch_on_values,
    over_stacks,
    safe_ratio,
    stack_of,
    stacked_copies,
)
from eigengraft.slots import Slot

from .constraints import ParameterUpdate
from .write import put

Mode = Literal["train", "eval"]
MODES: tuple[Mode, ...] = ("train", "eval")
"""The iterates that the parameters of an optimizer can hold: the training iterate and the evaluated iterate."""


@dataclass(frozen=True)
class IterateBatch:
    """n parameters of one dtype that have the same update of the recipe, with their iterates.

    parameters: n tensors, the parameters of the model.
    slots: by name of the slot, n tensors.
    steps: `[n]`, number of updates of each parameter, including the present one.
    lr: learning rate of the present update.
    peak_lr: largest learning rate of the run.
    mask: n 0-d booleans. False: the parameter and its slots must not change. None: all may change.
    """

    parameters: Sequence[Tensor]
    slots: Mapping[str, Sequence[Tensor]]
    steps: NDArray[np.int64]
    lr: float | Tensor = 0.0
    mask: Sequence[Tensor] | None = None
    peak_lr: float = 1.0

    @property
    def y(self) -> Sequence[Tensor]:
        """The iterates at which gradients are taken: the slot `y`, or the parameters if there is no such slot."""
        return self.slots.get("y", self.parameters)

    def begin(self) -> None:
        """Copy the parameters into the slots z and y, if these exist."""
        for name in self.slots.keys() & {"z", "y"}:
            torch._foreach_copy_(list(self.slots[name]), list(self.parameters))

    def show_y(self) -> None:
        """Copy the iterates `y` into the parameters, rounded to their dtype, unless `y` are the parameters."""
        if self.y is not self.parameters:
            torch._foreach_copy_(list(self.parameters), list(self.y))

    def slice_rows(self, chosen: Sequence[int]) -> IterateBatch:
        """Return the batch of the parameters with the chosen indices."""
        slots = {name: [tensors[i] for i in chosen] for name, tensors in self.slots.items()}
        mask = None if self.mask is None else [self.mask[i] for i in chosen]
        parameters, steps = [self.parameters[i] for i in chosen], self.steps[list(chosen)]
        return replace(self, parameters=parameters, slots=slots, steps=steps, mask=mask)


class Averaging(Component, ABC, family="averaging"):
    """Rule for two iterates of a parameter: the training iterate, where gradients are taken, and the evaluated iterate.

    Iterates are slots of role `iterate`, in the dtype in which updates are computed. The shape of a slot is (), or ends
    with the axes of the parameter. Any other shape raises a ContractError. Iterates begin at the value of the parameter
    before its first update, so that weights that were loaded after the optimizer was made are used. If a value is
    written into a parameter between steps (`clamp_`, a checkpoint of the model), it is the training iterate from then
    on, for parameters of every dtype. All other iterates keep their values. Before the first update of a parameter, its
    evaluated iterate is the parameter.
    """

    @abstractmethod
    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        """Return the slots of one parameter of this shape, by name. Called at construction.

        low_precision: True if the parameter is stored with less precision than its updates are computed in.
        """

    def follows_peak(self) -> bool:
        """Return True if a step depends on the peak of the learning rate."""
        return False

    def begin(self, batch: IterateBatch) -> None:
        """Set the iterates that begin at the value of the parameter. Called before the first update of a parameter."""

    def decaying(self, batch: IterateBatch) -> Sequence[Tensor]:
        """Return the tensors to which weight decay applies, one for each parameter; by default the parameters."""
        return batch.parameters

    @abstractmethod
    def step(self, batch: IterateBatch, write: ParameterUpdate) -> None:
        """Apply `write` to the base iterates, and recompute all other stored iterates.

        Every step calls this method. Without an averaging, a step applies `write` to the parameters.

        write: function that changes n tensors in place by weight decay, update and constraints, as
            `write(batch.parameters)`.
        """

    @abstractmethod
    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        """Return the evaluated iterate of each parameter, in any dtype. Called by `optimizer.eval()`. Every parameter
        has had an update before. Neither parameters nor slots may be changed.
        """


def blend(
    targets: Sequence[Tensor],
    values: Sequence[Tensor],
    weights: Sequence[float],
    mask: Sequence[Tensor] | None,
) -> None:
    """Change n targets in place:  target <- target + weight (value - target).  For weight 1 the result equals value.

    targets: n tensors, which are changed in place.
    values: n tensors of the same shapes, in any dtype.
    weights: n numbers. All targets with equal weights are changed by one kernel.
    mask: n 0-d booleans, False for targets that do not change. None: all targets change.
    """
    if targets:
        _change(torch._foreach_lerp_, targets, in_dtypes_of(values, targets), weights, mask)


def accumulate(
    targets: Sequence[Tensor],
    values: Sequence[Tensor],
    weights: Sequence[float | Tensor],
    mask: Sequence[Tensor] | None = None,
) -> None:
    """Change n targets in place:  target <- target + weight value.

    weights: n numbers or 0-d tensors. All targets with equal weights are changed by one kernel.
    mask: n 0-d booleans, False for targets that do not change. None: all targets change.
    """
    _change(_add_, targets, values, weights, mask)


def _add_(targets: list[Tensor], values: list[Tensor], weight: float | Tensor) -> None:
    if isinstance(weight, Tensor):
        torch._foreach_add_(targets, torch._foreach_mul(values, weight.to(targets[0].dtype)))
    else:
        torch._foreach_add_(targets, values, alpha=weight)


def _change(
    change: Callable[[list[Tensor], list[Tensor], Any], object],
    targets: Sequence[Tensor],
    values: Sequence[Tensor],
    weights: Sequence[float | Tensor],
    mask: Sequence[Tensor] | None,
) -> None:
    """Call `change(targets, values, weight)` once for each distinct weight, with the targets and values of this weight.

    change: function that writes the targets in place.
    targets, values, weights: n items each.
    mask: n 0-d booleans, False for targets that keep their values. None: all targets change.
    """
    for weight, indices in _equal(weights):
        own, given = [targets[index] for index in indices], [values[index] for index in indices]
        changed = own if mask is None else copies(own, own[0].dtype)
        change(changed, given, weight)
        if mask is not None:
            put(own, changed, [mask[index] for index in indices])


def _equal(weights: Sequence[float | Tensor]) -> list[tuple[Any, list[int]]]:
    """Return pairs (weight, indices at which this weight occurs), one for each different weight.

    A tensor is not read: it counts as equal only to the same tensor object.
    """
    found: dict[tuple[bool, float], tuple[float | Tensor, list[int]]] = {}
    for index, weight in enumerate(weights):
        key = id(weight) if isinstance(weight, Tensor) else weight
        found.setdefault((isinstance(weight, Tensor), key), (weight, []))[1].append(index)
    return list(found.values())


def pushes(steps: NDArray[np.int64], every: int, start: int | None) -> NDArray[np.int64]:
    """Return `[n]`, for each of n parameters the number of its iterates that have entered the average.

    steps: `[n]`, number of updates of each parameter.
    every: number nu of updates between averaged iterates.
    start: update after which the first iterate enters the average. None: update nu.
    """
    first = every if start is None else start
    return np.where(steps >= first, (steps - first) // every + 1, 0)


def pushed(batch: IterateBatch, every: int, start: int | None) -> list[int]:
    """Return the indices of parameters whose iterate enters the average with the present update.

    every, start: as in `pushes`.
    """
    fresh = pushes(batch.steps, every, start) > pushes(batch.steps - 1, every, start)
    return [int(index) for index in np.flatnonzero(fresh)]


class EMA(Averaging):
    """Every nu updates  mean <- decay mean + (1 - decay) W;  evaluated: mean / (1 - decay^k) after k such averagings.

    Exponential moving average of the parameter W (Ajroldi, Orvieto & Geiping 2025, ICML, section 2), with the bias
    correction of SPlus (Frans et al. 2025). Without bias correction the mean starts as the first averaged W, and the
    mean itself is evaluated. Before `start` the parameter itself is evaluated. A horizon nu / (1 - decay) of about 1%
    of all updates is a good choice. With a `weight` w below 1, w times the corrected mean plus (1 - w) W is evaluated:
    the 2026 records of modded-nanogpt's track 3 use w = 0.6. With an `inner` averaging, W is the evaluated iterate of
    the inner averaging, and training is that of the inner averaging.
    """

    kind: Literal["ema"] = "ema"
    decay: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean, per averaged iterate")
    every: int = Field(default=1, ge=1, description="updates between averaged iterates, nu")
    start: int | None = Field(
        default=None, ge=1, description="number of the update after which the first iterate is averaged; default: nu"
    )
    bias_correction: bool = Field(
        default=True, description="start the mean from zero, and divide it by the sum of its weights"
    )
    weight: float = Field(
        default=1.0, gt=0, le=1, description="weight w of the mean in the evaluated iterate; W has the weight 1 - w"
    )
    inner: Averaging | None = Field(
        default=None,
        description="averaging whose evaluated iterate is averaged; none: the parameter itself is averaged",
    )

    @model_validator(mode="after")
    def _inner_has_no_mean(self) -> Self:
        if self.inner is not None and "mean" in self.inner.slots((1,), True):
            raise ValueError(
                "inner: an averaging that keeps no running mean, such as schedule_free, is required, got "
                f"{self.inner!r}; a mean of means is not supported"
            )
        return self

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        below = {} if self.inner is None else self.inner.slots(shape, low_precision)
        return {**below, "mean": Slot(shape, role="iterate")}

    def follows_peak(self) -> bool:
        return self.inner is not None and self.inner.follows_peak()

    def state_meaning(self) -> Mapping[str, Any]:
        counted = {"every": self.every, "start": self.start, "bias_correction": self.bias_correction}
        divided = {"decay": self.decay} if self.bias_correction else {}
        return {**counted, **divided}

    def begin(self, batch: IterateBatch) -> None:
        if self.inner is not None:
            self.inner.begin(batch)

    def decaying(self, batch: IterateBatch) -> Sequence[Tensor]:
        return batch.parameters if self.inner is None else self.inner.decaying(batch)

    def _below(self, batch: IterateBatch) -> Sequence[Tensor]:
        """Return W for each parameter: the parameter itself, or the evaluated iterate of the inner averaging."""
        return batch.parameters if self.inner is None else self.inner.evaluated(batch)

    def step(self, batch: IterateBatch, write: ParameterUpdate) -> None:
        if self.inner is None:
            write(batch.parameters)
        else:
            self.inner.step(batch, write)
        due = batch.slice_rows(pushed(batch, self.every, self.start))
        if not due.parameters:
            return
        first = (pushes(due.steps, self.every, self.start) == 1) & (not self.bias_correction)
        blend(due.slots["mean"], self._below(due), [1.0 if one else 1 - self.decay for one in first], due.mask)

    def means(self, batch: IterateBatch) -> Sequence[Tensor]:
        """Return the mean of each parameter after bias correction.

        At least one iterate of each parameter must have entered the mean.
        """
        counts = pushes(batch.steps, self.every, self.start).tolist()
        totals = [1 - self.decay**count if self.bias_correction else 1.0 for count in counts]
        return torch._foreach_div(list(batch.slots["mean"]), totals)

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        values = list(self._below(batch))
        begun = np.flatnonzero(pushes(batch.steps, self.every, self.start) > 0).tolist()
        if not begun:
            return values
        means = self.means(batch.slice_rows(begun))
        if self.weight < 1:
            own = in_dtypes_of([values[index] for index in begun], means)
            means = torch._foreach_lerp(list(own), list(means), self.weight)
        for index, mean in zip(begun, means, strict=True):
            values[index] = mean
        return values


Decay = Literal["z", "y", "z_apart"]
"""Iterate at which weight decay is computed.

z: the decay is part of the base step, as in the sequences of the module docstring.
y: z <- z - lr U - lr alpha y (Defazio et al. 2024, algorithm 1).
z_apart: z decays first, and y changes only by the step without decay, as in Distributed Shampoo and GPA-AdamW. y and x
    then decay less than in the sequences of the module docstring.

The field `placed` of a decay has an effect only with z.
"""
_DECAY = (
    "iterate at which weight decay is computed: z, y, or z_apart (z decays, and y and x do not follow, as in "
    "Distributed Shampoo)"
)


class BaseAndAverage(Averaging, ABC):
    """Averaging with gradients at y = mu_y x + (1 - mu_y) z, between a base iterate z and the average x of its values.

    A step changes z by the update, and then x <- (1 - c) x + c z, with a weight c that subclasses choose. The parameter
    holds y, and z is stored as state; x is computed from them. The module docstring has the sequences in full.
    """

    @property
    @abstractmethod
    def mu_and_decay(self) -> tuple[float, Decay]:
        """The weight mu_y of the average x in y, and the iterate at which weight decay is computed (`Decay`).

        y = mu_y x + (1 - mu_y) z is the iterate in training, and z the base iterate.
        """

    @abstractmethod
    def mixing(self, batch: IterateBatch) -> Sequence[float] | Tensor:
        """Return for each of n parameters the weight c of the new base iterate z in the average x in this update.

        The update of the average is  x <- (1 - c) x + c z.  The result is a sequence of n numbers, or a tensor `[n]`.
        """

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        return {name: Slot(shape, role="iterate") for name in (("z", "y") if low_precision else ("z",))}

    def begin(self, batch: IterateBatch) -> None:
        batch.begin()

    def decaying(self, batch: IterateBatch) -> Sequence[Tensor]:
        return batch.y if self.mu_and_decay[1] == "y" else batch.slots["z"]

    def step(self, batch: IterateBatch, write: ParameterUpdate) -> None:
        y, z, mixing = batch.y, batch.slots["z"], self.mixing(batch)
        mu, decay_at = self.mu_and_decay
        if decay_at == "z_apart":
            write = write.decay(z)
        elif decay_at == "y":
            write = write.decayed_at(y)
        if isinstance(mixing, Tensor):
            self._step_on_device(batch, write, mixing)
        else:
            old = copies(z, z[0].dtype)
            write(z)
            blend(y, old, mixing, batch.mask)
            accumulate(y, torch._foreach_sub(list(z), old), [1 - mu * (1 - c) for c in mixing])
        batch.show_y()

    def _step_on_device(self, batch: IterateBatch, write: ParameterUpdate, mixing: Tensor) -> None:
        """Do the same as `step` if the weights of the average are on a device, so that the host does not read them.

        mixing: `[n]`, the weight c of the new base iterate z in the average x, as the method `mixing` returns it.
        """
        y, z, dtype = batch.y, batch.slots["z"], batch.y[0].dtype
        c, left = mixing.to(dtype), (mixing * self.mu_and_decay[0] + (1 - self.mu_and_decay[0])).to(dtype)
        old = stacked_copies(z)
        write(z)
        blended = over_stacks(torch.lerp, y, old, c)
        torch._foreach_sub_(old, list(z))  # -D
        put(y, over_stacks(lambda x, d, weight: x.sub_(d.mul_(weight)), blended, old, left), batch.mask)

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        return torch._foreach_lerp(list(batch.slots["z"]), list(batch.y), 1 / self.mu_and_decay[0])


class ScheduleFree(BaseAndAverage):
    """Schedule-free learning: y, z and x of `BaseAndAverage` with mu_y = beta and c_t = w_t / (w_1 + ... + w_t).

    The weight of update t is w_t = lr_t^p t^r, with p = `lr_power` and r = `step_power` (Defazio et al. 2024,
    arXiv:2405.15682, equations 3-5 and section 3; arXiv:2512.17131 for r). With beta = 1 gradients are taken at the
    average x itself. While all weights are 0, for example at lr 0, c = 0.
    """

    kind: Literal["schedule_free"] = "schedule_free"
    beta: float = Field(default=0.9, gt=0, le=1, description="weight of x in y")
    lr_power: float = Field(default=2.0, ge=0, le=32, description="power p of the learning rate in the weights")
    step_power: float = Field(default=0.0, ge=0, le=32, description="power r of the update's number in the weights")
    decay_at: Decay = Field(default="y", description=_DECAY)

    @property
    def mu_and_decay(self) -> tuple[float, Decay]:
        return self.beta, self.decay_at

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        return {**super().slots(shape, low_precision), "weight_sum": Slot((), role="iterate", dtype=torch.float64)}

    def state_meaning(self) -> Mapping[str, Any]:
        weights = {"lr_power": self.lr_power, "step_power": self.step_power}
        return {**weights, "beta": self.beta}

    def mixing(self, batch: IterateBatch) -> Sequence[float] | Tensor:
        sums = batch.slots["weight_sum"]
        before = torch.stack(list(sums))
        same = (batch.steps == batch.steps[0]).all()
        steps = float(batch.steps[0]) if same else torch.from_numpy(batch.steps).to(before)
        scale = steps**self.step_power * batch.lr**self.lr_power
        weight = torch.full_like(before, scale) if isinstance(scale, float) else scale.expand_as(before)
        after = before + weight
        if batch.mask is not None:
            after = torch.where(stack_of(batch.mask), after, before)
        torch._foreach_copy_(list(sums), list(after.unbind(0)))
        mixing = safe_ratio(weight, after)
        return mixing.tolist() if may_branch_on_values(mixing) else mixing


class PrimalAveraging(BaseAndAverage):
    """z <- z - lr U(y);  x <- mu_x x + (1 - mu_x) z;  y = mu_y x + (1 - mu_y) z

    This is generalized primal averaging (GPA). Gradients are computed at y, and the average x is evaluated.

    Defazio et al. 2025, arXiv:2512.17131. With mu_x = 0, GPA is the base method without averaging. With mu_y = 1 and
    plain gradient descent as the base method, GPA is heavy-ball momentum with coefficient mu_x.
    """

    kind: Literal["primal_averaging"] = "primal_averaging"
    mu_x: float = Field(default=0.9967, ge=0, lt=1, description="weight that the average x keeps in a step")
    mu_y: float = Field(default=0.7, gt=0, le=1, description="weight of x in y")
    decay_at: Decay = Field(default="z", description=_DECAY)

    @property
    def mu_and_decay(self) -> tuple[float, Decay]:
        return self.mu_y, self.decay_at

    def state_meaning(self) -> Mapping[str, Any]:
        return {"mu_y": self.mu_y}

    def mixing(self, batch: IterateBatch) -> Sequence[float] | Tensor:
        return [1 - self.mu_x] * len(batch.parameters)
