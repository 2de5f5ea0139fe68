"""The write of an update U into parameters W:  W <- W - lr alpha W - lr U,  with learning rate lr and decay alpha.

This file contains the rules of weight decay, the rates of one step, and the code that computes the formula. Only Adam's
fused kernels (`step/fused.py`) compute it themselves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from eigengraft.component import Component
from eigengraft.numerics import (
    StackRows,
    copies,
    in_dtypes_of,
    kept_on_device,
    over_stacks,
    scale_tensors_,
    stack_of,
    subtract_scaled_,
    tiny,
)


class WeightDecay(Component, ABC, family="weight_decay"):
    """A rule of weight decay with a rate. In the recipe's own rule, the `weight_decay` of a param group replaces the
    rate. The rule of a route keeps its rate.
    """

    rate: float = Field(default=0.0, ge=0, description="decay rate; 0: no decay")
    number: ClassVar[tuple[str, str] | None] = ("decoupled", "rate")
    cautious: ClassVar[bool] = False
    """True if the decay is limited to entries whose update points towards zero."""
    in_gradient: ClassVar[bool] = False
    """True if rate * W is added to the gradient before any other use of the gradient. The write then has no decay."""
    relative: ClassVar[bool] = False
    """True if the decay factor alpha depends on the peak of the learning rate."""

    @property
    def after(self) -> bool:
        """True if the parameter decays after its update, False if before."""
        return False

    @abstractmethod
    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        """Return alpha of the formula of the write,  W <- W - lr alpha W - lr U.  Called in every step, for each param
        group.

        rate: decay rate.
        lr: current learning rate.
        peak_lr: largest learning rate of the run.
        """


def nonzero_peak(lr: float | Tensor, peak_lr: float) -> float | Tensor:
    """Return the peak of a learning rate for use as a divisor; the result is never 0.

    Before a step the host raises `peak_lr` to lr if lr is larger. The host cannot do so if lr is a tensor, because it
    does not read tensors on a device. For a tensor the result is therefore the larger of lr and `peak_lr`. If lr is a
    float and `peak_lr` is 0, the result is 1.
    """
    return lr.clamp_min(peak_lr or tiny(lr.dtype)) if isinstance(lr, Tensor) else peak_lr or 1.0


class L2(WeightDecay):
    """g <- g + rate W  for the gradient g (the L2 penalty). `.grad` itself is never written."""

    kind: Literal["l2"] = "l2"
    in_gradient: ClassVar[bool] = True

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return 0.0


class Decoupled(WeightDecay):
    """alpha = rate  in  W <- W - lr alpha W - lr U (AdamW, Loshchilov & Hutter 2019).

    placed: 'before': first W decays, then lr U is subtracted. 'after': first lr U is subtracted, then the result decays
        (as in the published SOAP).
    """

    kind: Literal["decoupled"] = "decoupled"
    placed: Literal["before", "after"] = Field(
        default="before", description="whether W decays before or after lr U is subtracted"
    )

    @property
    def after(self) -> bool:
        return self.placed == "after"

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return rate


class Corrected(WeightDecay):
    """alpha = rate lr / peak_lr  in  W <- W - lr alpha W - lr U (AdamC, Defazio 2025).

    The decay falls with the square of the schedule.
    """

    kind: Literal["corrected"] = "corrected"
    relative: ClassVar[bool] = True

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return rate * lr / nonzero_peak(lr, peak_lr)


class Independent(WeightDecay):
    """alpha = rate / peak_lr  in  W <- W - lr alpha W - lr U (independent weight decay, Wortsman et al. 2023).

    In a step the parameter W shrinks by the fraction rate lr / peak_lr. At the peak of the schedule this is `rate`,
    for any `peak_lr`. It is the decay `INDEPENDENT` of Distributed Shampoo.
    """

    kind: Literal["independent"] = "independent"
    relative: ClassVar[bool] = True

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return rate / nonzero_peak(lr, peak_lr)


@dataclass(frozen=True)
class StepRates:
    """Learning rate and weight decay with which an update U is written:  W <- W - lr alpha W - lr U.

    lr: learning rate.
    alpha: decay factor, as in `WeightDecay.alpha`.
    decay: the rule by which alpha was computed.
    rate: the decay rate from which alpha was computed.
    kept: 1 - lr alpha, the factor of a parameter that decays. None: the factor is computed from lr and alpha.
    """

    lr: float | Tensor
    alpha: float | Tensor
    decay: WeightDecay
    rate: float | Tensor = 0.0
    kept: float | Tensor | None = None

    @property
    def decays(self) -> bool:
        """True if W decays: alpha is not 0. If alpha is a tensor, the host does not read it, and the result is True."""
        return isinstance(self.alpha, Tensor) or self.alpha != 0

    @property
    def shrink(self) -> float | Tensor:
        """The factor 1 - lr alpha by which weight decay multiplies W."""
        return 1 - self.lr * self.alpha if self.kept is None else self.kept

    @property
    def without_decay(self) -> StepRates:
        """These rates with alpha = 0, for an update to which weight decay has already been added."""
        return replace(self, alpha=0.0, kept=None)

    @property
    def gradient_rate(self) -> float | Tensor:
        """Rate of a decay that is added to the gradient, 0 for any other decay."""
        return self.rate if self.decay.in_gradient else 0.0


class WriteNumbers(NamedTuple):
    """The numbers with which a direction is written into parameters, as inputs of a traced function.

    The write is  W <- W - lr alpha W - lr U,  where U is the direction times `factor`. The numbers are floats or 0-d
    tensors.

    lr: learning rate.
    shrink: 1 - lr alpha.
    alpha: decay factor.
    rate: rate of a decay that is added to the gradient.
    factor: factor of the direction.
    """

    lr: float | Tensor
    shrink: float | Tensor
    alpha: float | Tensor
    rate: float | Tensor
    factor: float | Tensor = 1.0

    @classmethod
    def of(cls, rates: StepRates) -> Self:
        """Return lr, 1 - lr alpha, alpha and the rate of a decay in the gradient, for a learning rate and weight decay.
        The factor of the direction is 1.

        Numbers that are tensors stay tensors: the host does not read their values.
        """
        return cls(rates.lr, rates.shrink, rates.alpha, rates.gradient_rate)


@dataclass(frozen=True)
class Hyper:
    """Values of a param group at one step.

    lr: learning rate.
    peak_lr: largest learning rate of the run that is known so far.
    weight_decay: decay rate.
    """

    lr: float | Tensor
    peak_lr: float
    weight_decay: float

    @classmethod
    def of(cls, group: MutableMapping[str, Any], relative: bool) -> Self:
        """Read the values of a param group for one step.

        Numbers of numpy in the group are replaced by Python's numbers, so that `torch.load(weights_only=True)` can read
        a checkpoint.

        relative: True if the recipe depends on the peak of the learning rate. Then `peak_lr` is the largest of the
            group's `peak_lr`, `max_lr` and `lr`. An `lr` that is a tensor on a device is not read and does not count.
        """
        for key in ("lr", "weight_decay"):
            if isinstance(group.get(key), np.number):
                group[key] = group[key].item()
        lr, peak = number(group, "lr"), float(group["peak_lr"])
        if relative and is_number(group.get("max_lr")):  # OneCycleLR writes it
            peak = max(peak, float(group["max_lr"]))
        if relative and isinstance(lr, float) and lr > peak * (1 + 1e-6):  # by more than rounding
            peak = lr
        return cls(lr, peak, float(number(group, "weight_decay")))

    def on(self, device: torch.device) -> Self:
        """Return the values for parameters on a device. A learning rate that is a tensor is copied to the device."""
        there = not isinstance(self.lr, Tensor) or self.lr.device == device
        return self if there else replace(self, lr=self.lr.to(device))  # type: ignore[union-attr]


def number(group: Mapping[str, Any], key: str) -> float | Tensor:
    """Return a number of a param group as a float. A tensor on a device is returned as a 0-d tensor, which is not read.

    Raises ValueError if the value is no number, or if a number on the host is negative or not finite.
    """
    value: Any = group.get(key)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{key}: it must be a number or a tensor with one element, got shape {tuple(value.shape)}")
    if not is_number(value) and not isinstance(value, np.number):
        raise ValueError(f"{key}: it must be a number, got {value!r}")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value if value.ndim == 0 else value.reshape(())
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{key}: it must be a finite number >= 0, got {float(value)}")
    return float(value)


def is_number(value: object) -> bool:
    """Return True for Python's numbers and for tensors."""
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay of P parameters at one step.

    decay: rule of weight decay of the recipe, for all routes without a rule of their own.
    routes: {path of a route: (factor of the param group's learning rate, rule of weight decay)}. A rule has its own
        rate, which replaces that of the param group. None: the rule of the recipe.
    hypers: values of the param groups, by index of the group.
    groups: `[P]`, index of the param group of each parameter.
    by_value: True to treat param groups with equal values as one. It is False if constraints sum over ranks: all ranks
        must then divide parameters in the same way, and values may differ between ranks by mistake, which the check of
        the step may find only later.
    factor: factor of the steps of all parameters. It multiplies the learning rate of the write, but not the learning
        rate from which the decay factor alpha is computed.
    """

    decay: WeightDecay
    routes: Mapping[str, tuple[float, WeightDecay | None]]
    hypers: Mapping[int, Hyper]
    groups: NDArray[np.int64]
    by_value: bool = True
    factor: float | Tensor = 1.0
    _rates: dict[tuple[str, int], StepRates] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _firsts(self) -> dict[int, int]:
        """By index of a group, the index of the first group with equal values.

        A learning rate that is a tensor is not read: it counts as equal only to the same tensor object.
        """
        seen: dict[tuple[float, ...], int] = {}
        firsts = dict[int, int]()
        for group, own in self.hypers.items():
            lr = id(own.lr) if isinstance(own.lr, Tensor) else own.lr
            key = (lr, own.peak_lr, own.weight_decay) if self.by_value else (group,)
            firsts[group] = seen.setdefault(key, group)
        return firsts

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """For each of P parameters, the index of the first param group that has the same rates as the parameter's own
        group.

        Parameters with equal indices can be updated together.
        """
        if len(self.hypers) == 1:
            return self.groups
        firsts = np.zeros(max(self.hypers, default=0) + 1, dtype=np.int64)
        firsts[[*self._firsts]] = [*self._firsts.values()]
        return firsts[self.groups]

    @cached_property
    def same(self) -> int | None:
        """The value of all entries of `alike` if all param groups have equal rates. None: the rates differ."""
        firsts = {*self._firsts.values()}
        return firsts.pop() if len(firsts) == 1 else None

    def step_rates(self, path: str, position: int) -> StepRates:
        """Return learning rate and decay of a parameter.

        path: path of the parameter's update in the recipe.
        position: position of the parameter.
        """
        return self._of_group(path, int(self.alike[position]) if self.same is None else self.same)

    def _of_group(self, path: str, group: int) -> StepRates:
        if (path, group) not in self._rates:
            hyper, (ratio, own) = self.hypers[group], self.routes.get(path, (1.0, None))
            decay, rate = (self.decay, hyper.weight_decay) if own is None else (own, own.rate)
            alpha = decay.alpha(rate, hyper.lr * ratio, hyper.peak_lr * ratio)
            lr = hyper.lr * ratio
            lr = lr if isinstance(self.factor, float) and self.factor == 1 else lr * self.factor
            self._rates[path, group] = StepRates(lr, alpha, decay, rate)
        return self._rates[path, group]

    def replaced(self, rates: Mapping[tuple[str, int], StepRates]) -> Rates:
        """Return a copy with other learning rates and decays for some parameters.

        rates: the new rates, by (path of an update in the recipe, index of the first group with equal rates).
        """
        found = replace(self)
        found._rates.update(rates)
        return found

    def alphas(self, path: str, positions: NDArray[np.int64]) -> list[float | Tensor]:
        """Return the factors alpha in  W <- W - lr alpha W - lr U  of some parameters.

        There is one factor for each set of param groups with equal rates to which the parameters belong.

        path: path of the update of these parameters in the recipe.
        positions: positions of the parameters.
        """
        return [self._of_group(path, group).alpha for group in np.unique(self.alike[positions]).tolist()]

    def decays(self, path: str) -> bool:
        """Return True if alpha in  W <- W - lr alpha W - lr U  may differ from 0 for the update at `path`."""
        alphas = (self._of_group(path, group).alpha for group in self.hypers)
        return any(isinstance(alpha, Tensor) or alpha != 0 for alpha in alphas)

    def decays_gradients(self, path: str) -> bool:
        """Return True if the update at `path` adds weight decay to gradients, with a rate other than 0."""
        groups = self.hypers if self.same is None else (self.same,)
        return any(self._of_group(path, group).gradient_rate for group in groups)

    def map_rows(
        self,
        path: str,
        positions: NDArray[np.int64],
        function: Callable[[Tensor, Tensor, StepRates], Tensor],
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Apply `function(x, y, rates)` to the rows of two stacks, and return the result as a stack.

        Rows with equal rates are computed by one call.

        path: path of the update of all rows in the recipe.
        positions: `[n]`, position of the parameter of each row.
        x, y: stacks `[n, *block]`. The result has the shape and dtype of y.
        """
        if self.same is not None:
            return function(x, y, self._of_group(path, self.same))
        groups = self.alike[positions]
        if (groups == groups[0]).all():
            return function(x, y, self._of_group(path, int(groups[0])))
        out = torch.empty_like(y)
        for group in np.unique(groups).tolist():
            rows = kept_on_device(np.flatnonzero(groups == group), y.device)
            out[rows] = function(x[rows], y[rows], self._of_group(path, group))
        return out

    def idle(self, nonzero: Callable[[Sequence[int]], bool]) -> NDArray[np.bool_] | None:
        """Return flags `[P]`, True for the parameters of groups in which the learning rate and all gradients are 0.

        Return None if no learning rate is 0. A learning rate that is a tensor is not read, and counts as nonzero.

        nonzero: returns True if any gradient at the given positions has an entry other than 0.
        """
        found: NDArray[np.bool_] | None = None
        for group, hyper in self.hypers.items():
            if isinstance(hyper.lr, float) and hyper.lr == 0:
                own = self.groups == group
                idle = own & (not nonzero(np.flatnonzero(own).tolist()))
                found = idle if found is None else found | idle
        return found


class EntryUpdates(NamedTuple):
    """n updates of entries of parameters, stored as three columns, so that a stack needs no object for each update.

    positions: `[n]`, position of the parameter that each update changes.
    entries: n tensors to change: views of the entries that this rank holds of the parameters.
    values: n tensors U of the same shapes, or one tensor `[n, ...]`.
    """

    positions: NDArray[np.int64]
    entries: Sequence[Tensor]
    values: Sequence[Tensor] | Tensor

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, Tensor, Tensor]]) -> Self:
        """Return updates from triples (position of the parameter, view of its entries to change, update U)."""
        found = list(rows)
        positions = np.fromiter((position for position, _, _ in found), np.int64, len(found))
        return cls(positions, [entries for _, entries, _ in found], [value for _, _, value in found])

    @classmethod
    def of_parameters(
        cls, parameters: Sequence[Tensor], positions: NDArray[np.int64], values: Sequence[Tensor] | Tensor
    ) -> Self:
        """Return updates of whole parameters.

        parameters: all parameters, by position.
        positions: `[n]`, positions of the parameters to update.
        values: n updates, each with as many entries as its parameter, in any shape; or one tensor `[n, ...]`.
        """
        entries = [parameters[position] for position in positions.tolist()]
        given = [values.shape[1:]] * len(entries) if isinstance(values, Tensor) else [value.shape for value in values]
        if given != [own.shape for own in entries]:
            values = [value.reshape(own.shape) for own, value in zip(entries, values, strict=True)]
        return cls(positions, entries, values)

    def chosen(self, rows: NDArray[np.bool_]) -> Self:
        """Return the updates for which `rows`, `[n]`, is True."""
        if rows.all():
            return self
        entries, values = (list(compress(column, rows.tolist())) for column in (self.entries, self.values))
        return type(self)(self.positions[rows], entries, values)


def write(
    tensors: Sequence[Tensor],
    updates: Sequence[Tensor] | Tensor,
    rates: StepRates,
    mask: Sequence[Tensor] | None = None,
) -> None:
    """Change n tensors W in place by their updates U:  W <- W - lr alpha W - lr U.

    tensors: n tensors W.
    updates: n tensors U with the shapes of W, or one tensor `[n, ...]`, for which all W are computed as one tensor. The
        formula is computed in the dtype of U.
    rates: lr and alpha.
    mask: n 0-d booleans. A tensor with the mask False does not change. None: all tensors change.
    """
    if mask is not None:
        rows = StackRows(updates) if isinstance(updates, Tensor) else updates
        put(tensors, over_stacks(partial(after_write, rates), tensors, rows, stack_of(mask)))
        return
    if isinstance(updates, Tensor):
        stack = torch.stack(list(tensors)).to(updates.dtype)
        _write([stack], [updates], rates)
        put(tensors, stack.unbind())
        return
    wide = in_dtypes_of(tensors, updates)
    _write(wide, updates, rates)
    if wide is not tensors:
        copied = [x is not y for x, y in zip(tensors, wide, strict=True)]
        put(list(compress(tensors, copied)), list(compress(wide, copied)))


def after_write(rates: StepRates, before: Tensor, update: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the result of `write` as a new tensor, in the dtype of the update. The tensor `before` does not change.

    mask: booleans that broadcast against the tensors, False for entries that do not change. None: all entries change.
    """
    if before.dtype is update.dtype and rates.decays and not rates.decay.after and not rates.decay.cautious:
        after = before * rates.shrink
        subtract_scaled_([after], [update], rates.lr)
    elif before.dtype is update.dtype and not rates.decays and not isinstance(rates.lr, Tensor):
        after = torch.add(before, update, alpha=-rates.lr)
    else:
        (after,) = copies([before], update.dtype)
        _write([after], [update], rates)
    return after if mask is None else torch.where(mask, after, before)


def _write(tensors: Sequence[Tensor], updates: Sequence[Tensor], rates: StepRates) -> None:
    if not rates.decay.after:
        decay(tensors, updates, rates)
    subtract_scaled_(tensors, updates, rates.lr)
    if rates.decay.after:
        decay(tensors, updates, rates)


def decay(tensors: Sequence[Tensor], updates: Sequence[Tensor], rates: StepRates) -> None:
    """Change tensors in place by their decay, without the update:  W <- W - lr alpha W.

    Cautious decay changes only entries with U W > 0.
    """
    if not rates.decays:
        return
    if rates.decay.cautious:
        terms = torch._foreach_mul(_decaying(tensors, updates, rates), rates.lr)
        torch._foreach_sub_(list(tensors), terms)
    else:
        scale_tensors_(tensors, rates.shrink)


def with_decay(updates: Sequence[Tensor], tensors: Sequence[Tensor], rates: StepRates) -> Sequence[Tensor]:
    """Return the updates plus their decay,  U + alpha W, in the dtype of the updates.

    Cautious decay is added only to entries with U W > 0.
    """
    if not rates.decays:
        return updates
    if rates.decay.cautious or isinstance(rates.alpha, Tensor):
        return torch._foreach_add(list(updates), _decaying(tensors, updates, rates))
    return torch._foreach_add(list(updates), list(in_dtypes_of(tensors, updates)), alpha=rates.alpha)


def _decaying(tensors: Sequence[Tensor], updates: Sequence[Tensor], rates: StepRates) -> list[Tensor]:
    """Return alpha W of each tensor, with zeros at entries that do not decay."""
    wide = list(in_dtypes_of(tensors, updates))
    terms = torch._foreach_mul(wide, rates.alpha)
    if rates.decay.cautious:
        agree = torch._foreach_sign(torch._foreach_mul(list(updates), wide))
        torch._foreach_clamp_min_(agree, 0.0)
        torch._foreach_mul_(terms, agree)
    return list(terms)


def put(tensors: Sequence[Tensor], values: Sequence[Tensor], mask: Sequence[Tensor] | None = None) -> None:
    """Copy n values into n tensors.

    mask: n 0-d booleans. A tensor with the mask False does not change. None: all tensors change.
    """
    if mask is not None and tensors:
        values = over_stacks(where_masked, values, tensors, stack_of(mask))
    torch._foreach_copy_(list(tensors), list(values))


def where_masked(values: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where `mask` is True, and `others` elsewhere."""
    return torch.where(mask, values, others)


def decayed_gradient(gradient: Tensor, parameter: Tensor, rates: StepRates) -> Tensor:
    """Return g + rate W for a gradient g if the decay is added to gradients, else g."""
    rate = rates.gradient_rate
    if isinstance(rate, Tensor):
        return gradient + parameter * rate
    return torch.add(gradient, parameter, alpha=rate) if rate else gradient
