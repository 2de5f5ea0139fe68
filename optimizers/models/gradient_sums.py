"""Sums of values over the backward passes of a step. A sum is reset when the gradient of its parameter is reset.

`GradientSums` is the base class of the signals that are collected in forwards and backwards. The simplest of them is
here: `gradient_variance`, the variance of gradients over the micro-batches of a step.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from eigengraft.numerics import compute_dtype, is_dtensor, local

from ..optimizer import Optimizer
from .arguments import require_optimizer

ParamPlace = tuple[int, int]
"""Position of a parameter in an optimizer: (index of its param group, position in the group)."""
VARIANCE = "gradient_variance"
"""Name of the signal with the variance of gradients."""
Join = Callable[[Tensor, Tensor], Tensor]
"""The operation that joins two values: `torch.add` or `torch.maximum`."""


@dataclass
class _Sum:
    """The sum or the maximum of the values that backward passes have contributed to a signal.

    value: the sum or the maximum.
    count: number of rows from which `value` was computed. A row is an input of a layer, a gradient of an output, or the
        whole gradient of one backward. The number is a 0-d tensor if only the device knows it.
    """

    value: Tensor
    count: int | Tensor

    def joined(self, other: _Sum | None, join: Join) -> _Sum:
        return self if other is None else _Sum(join(self.value, other.value), self.count + other.count)

    def where(self, keep: Tensor) -> _Sum:
        """Return this sum if `keep` is true, else the value 0 with the count 0, even if `self.value` is not finite."""
        zero = torch.zeros((), dtype=self.value.dtype, device=self.value.device)
        return _Sum(torch.where(keep, self.value, zero), torch.where(keep, self.count, 0))


@dataclass
class _Running:
    """Contributions of a backward that still runs to a signal of one parameter, such as the sum of squared inputs.

    stamp: `_stamp` of the parameter's gradient before the backward. If it differs afterwards, the backward has changed
        the gradient.
    found: sum of the contributions so far. None: there are none yet.
    """

    parameter: Tensor
    stamp: tuple[int, ...]
    found: _Sum | None = None


class _Backward(dict[Hashable, _Running]):
    """The contributions of one running backward to the sums of a `GradientSums`, by the key of the sum.

    Only the callback at the end of the backward references this object. If the backward fails, the contributions are
    therefore dropped.
    """


class GradientSums(ABC):
    """Collects a signal (an input of stages beside the gradient) in backward passes, by hooks on layers or parameters.

    The signal has sums, each under a key. Each sum belongs to a parameter, and to the present gradient of that
    parameter. A hook calls `add` with a value inside a backward, before the backward accumulates the gradient. The
    operation `join` joins the value with the sum, for example adds it. If the gradient is None or zero at that time, a
    new sum begins, because `zero_grad`, the user or a skipped step has dropped the earlier gradient.

    A backward may leave the gradient of the parameter unchanged (`torch.autograd.grad`). The values of such a backward
    are used only if no other backward of the step changes the gradient. DTensors are an exception, because FSDP may
    change a gradient only in the last backward of a step: the values are also used if a later backward changes the
    gradient. The optimizer is referenced weakly.

    name: name of the signal.
    join: operation that joins values.
    measured: True to keep samples of gradients, from which the method `factor` finds by which factor gradients were
        scaled after the backward (by `clip_grad_norm_`, for example).
    """

    def __init__(self, optimizer: Optimizer, name: str, join: Join, measured: bool = False) -> None:
        self.name, self._join, self._measured, self._optimizer = name, join, measured, weakref.ref(optimizer)
        self._running: WeakValueDictionary[int, _Backward] = WeakValueDictionary()
        self._held: dict[Hashable, _Sum] = {}
        self._loose: dict[Hashable, _Sum] = {}
        self._left: dict[Hashable, tuple[Tensor, Tensor | None]] = {}
        self._handles: list[Any] = [optimizer.register_load_state_dict_post_hook(lambda _: self.clear())]
        weakref.finalize(optimizer, remove_hooks, self._handles)
        optimizer.provide(name, self.signal)

    @abstractmethod
    def signal(self) -> Mapping[Tensor, Tensor] | None:
        """Compute the signal from the collected sums. Return its value for each parameter that has one in this step.

        All sums are dropped. Return None if no parameter has a value.
        """

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. It is referenced weakly, and the caller has checked that it still exists."""
        found = self._optimizer()
        assert found is not None
        return found

    @property
    def listens(self) -> bool:
        """True if the optimizer exists and collects signals now."""
        found = self._optimizer()
        return found is not None and not found.param_sets.signals.paused

    @property
    def records(self) -> bool:
        """True if a forward that runs now should be recorded."""
        return self.listens and torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None

    def parameter(self, place: ParamPlace) -> Tensor:
        """Return the parameter that the optimizer has at a place now.

        place: (index of the param group, index in the group).
        """
        parameter: Tensor = self.optimizer.param_groups[place[0]]["params"][place[1]]
        return parameter

    def places(self) -> Iterator[tuple[int, ParamPlace]]:
        """Yield (id, place) of the parameters for which the optimizer was made.

        The place is the pair (index of the param group, index in the group). Frameworks may replace these parameters
        later; `parameter` returns the present one.
        """
        for index, group in enumerate(self.optimizer.param_sets.groups):
            yield from ((id(parameter), (index, at)) for at, parameter in enumerate(group.parameters))

    def takers(self) -> dict[int, ParamPlace]:
        """Return {id: place} for each parameter whose update requests the signal that this object computes.

        The place is the pair (index of the param group, index in the group).
        """
        sets = self.optimizer.param_sets
        takers = sets.signals.takers(self.name, sets.rows())
        return {key: place for key, place in self.places() if key in takers}

    def remove(self) -> None:
        """Remove the hooks and drop all sums. Later steps that need the signal raise an error."""
        remove_hooks(self._handles)
        self.clear()

    def clear(self) -> None:
        """Drop all sums."""
        for running in self._running.values():
            running.clear()
        self._held.clear()
        self._loose.clear()
        self._left.clear()

    def add(self, key: Hashable, parameter: Tensor, value: Tensor, count: int = 1) -> None:
        """Join a value with a sum, by the operation `join` of this object. Must be called inside a backward.

        key: value that identifies the sum.
        parameter: the parameter to whose gradient the sum belongs.
        count: number of rows of inputs or of gradients from which `value` was computed; 1 for a whole gradient.
        """
        task = torch._C._current_graph_task_id()
        if (running := self._running.get(task)) is None:
            running = self._running[task] = _Backward()
            end = partial(self._end, running)
            _after_backward(partial(_after_backward, end))  # after the callbacks of wrappers, which reduce gradients
        if key not in running:
            self._begin(key, parameter)
            running[key] = _Running(parameter, _stamp(parameter.grad))
        running[key].found = _Sum(value, count).joined(running[key].found, self._join)

    def take(self) -> dict[Any, tuple[Tensor, int | Tensor]]:
        """Return (value, count) of each sum by key, and drop all sums.

        `count` is the number of rows or gradients in the sum: the counts that `add` received, added up. A sum is left
        out if the gradient of its parameter is None now.
        """
        # a step inside a backward uses the values that this backward has added so far
        for running in list(self._running.values()):
            self._end(running)
        found = {**self._loose, **self._held}
        gone = {key for key, (parameter, _) in self._left.items() if parameter.grad is None}
        self.clear()
        return {key: (own.value, own.count) for key, own in found.items() if key not in gone}

    def factor(self) -> Tensor | None:
        """Return the factor by which `unscale_` or `clip_grad_norm_` multiplied gradients since the last backward.

        The factor is a 0-d tensor. Return None if it was not measured.
        """
        rows = [(p.grad, sample) for p, sample in self._left.values() if sample is not None and p.grad is not None]
        return _common_factor([sample for _, sample in rows], [_sample(grad) for grad, _ in rows]) if rows else None

    def _begin(self, key: Hashable, parameter: Tensor) -> None:
        """Drop an earlier sum if the gradient of its parameter was removed or zeroed since.

        key: value that identifies the sum.
        """
        grad, held = parameter.grad, self._held.pop(key, None)
        if grad is not None and held is not None:
            self._held[key] = held.where(local(grad.detach()).any())

    def _end(self, backward: _Backward) -> None:
        """Join the contributions of a finished backward with the sums.

        If a backward did not change the gradient of a parameter, its contribution is stored apart, in `_loose`. The
        contribution is used only if no other backward of the step changes this gradient.
        """
        found, changed = dict(backward), list[tuple[Hashable, Tensor]]()
        backward.clear()
        for key, running in found.items():
            assert running.found is not None
            if _stamp(running.parameter.grad) == running.stamp:
                self._loose[key] = running.found.joined(self._loose.get(key), self._join)
                continue
            loose = self._loose.pop(key, None)
            # FSDP with `set_requires_gradient_sync(False)` changes a gradient only in the last backward of a step, so
            # the contributions of earlier backwards belong to this gradient
            if is_dtensor(running.parameter):
                running.found = running.found.joined(loose, self._join)
            self._held[key] = running.found.joined(self._held.get(key), self._join)
            changed.append((key, running.parameter))
        self._left |= {key: (parameter, None) for key, parameter in changed}
        if self._measured and changed:
            some = changed[:: -(-len(changed) // _MEASURED)]
            for (key, parameter), sample in zip(some, _samples([p for _, p in some]), strict=True):
                self._left[key] = parameter, sample


def remove_hooks(handles: list[Any]) -> None:
    """Remove hooks by their handles."""
    for handle in handles:
        handle.remove()


def _after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the running backward, after the callbacks that are already in the queue."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _stamp(grad: Tensor | None) -> tuple[int, ...]:
    """Return numbers that change with every backward that changes a gradient. Return () for None."""
    return () if grad is None else (id(grad), grad._version, local(grad)._version)


def _sample(grad: Tensor) -> Tensor:
    """Return the diagonal of this rank's shard of a gradient, `[n]`. For a vector, return all entries."""
    own = local(grad.detach())
    return (own.diagonal() if own.ndim > 1 else own).flatten()


def _samples(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a copy of `_sample` of each parameter's gradient; an empty tensor if there is no gradient."""
    own = [
        _sample(p.grad) if p.grad is not None else torch.empty(0, dtype=p.dtype, device=p.device) for p in parameters
    ]
    return torch.split(torch.cat([x.to(own[0].device) for x in own]), [x.numel() for x in own])


def _common_factor(before: Sequence[Tensor], now: Sequence[Tensor]) -> Tensor:
    """Return the factor by which entries of gradients were multiplied, as a 0-d tensor in float32.

    The factor is the median of the ratios now / before. If at most half of the ratios are close to the median, the
    entries have no common factor, and the result is 1.
    """
    device = before[0].device
    old, new = (torch.cat([x.to(device) for x in own]).float() for own in (before, now))
    ratios = torch.where(old == 0, torch.nan, new / old)
    middle = ratios.nanmedian()
    alike = ((ratios - middle).abs() <= _TOLERANCE * middle.abs()).sum()
    return torch.where((alike * 2 > ratios.isfinite().sum()) & (middle != 0), middle, 1.0)


_MEASURED = 16
"""Largest number of parameters of whose gradients samples are kept, from which the factor of a later scaling is
computed. Scaling multiplies all gradients by one factor, so that a few samples are enough."""
_TOLERANCE = 0.01
"""Relative difference from their median up to which the ratios of new to old entries of gradients count as equal. It is
larger than the error of a ratio of two bfloat16 numbers, 2 * 2^-8."""


def watch_gradient_variance(optimizer: Optimizer) -> Callable[[], None] | None:
    """Provide the signal `gradient_variance` from the micro-batches of a step. `compose` calls this function.

    V = K sum_k g_k^2 - (sum_k g_k)^2, entry by entry, where g_1 ... g_K are the gradients that the K backward passes of
    a step add to a parameter. Usually each g_k is the gradient of the mean loss of a micro-batch, divided by K. V is
    then the variance of the gradients of these mean losses over the micro-batches, computed with the divisor K.

    A step with one backward pass has no variance and does not get the signal. If gradients are scaled after a backward
    pass, by GradScaler's `unscale_` or by `clip_grad_norm_`, the g_k are scaled by the same factor. The sum of squares
    of a parameter takes the memory of a gradient in the dtype in which updates are computed.

    Args:
        optimizer: the optimizer that receives the signal. Its parameters must not be shared with other ranks, because
            gradients after a backward are then sums over ranks.

    Returns:
        A function that removes the hooks of the parameters, or None if no stage requests the signal.

    Raises:
        TypeError: the argument is no optimizer.
        ValueError: several ranks share a parameter.
    """
    require_optimizer("watch_gradient_variance", optimizer)
    if VARIANCE not in optimizer.param_sets.signals.asking:
        return None
    shared = next((own.names[0] for own in optimizer.param_sets if own.rank_group is not None), None)
    if shared is not None:
        raise ValueError(
            f"watch_gradient_variance: several ranks share {shared}, so its gradient after a backward is not the "
            f"gradient of one micro-batch; compute the variance and call optimizer.provide('{VARIANCE}', ...)"
        )
    return _Variance(optimizer).remove


class _Variance(GradientSums):
    """Sums of the squares of gradients over backward passes. Hooks of the parameters reference this object."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, VARIANCE, torch.add, measured=True)
        for place in self.takers().values():
            hook = partial(self._add, place)
            self._handles.append(self.parameter(place).register_hook(hook))  # type: ignore[no-untyped-call]

    def _add(self, place: ParamPlace, gradient: Tensor) -> None:
        """Add the squares of a gradient that a backward pass is about to accumulate.

        place: (index of the param group, index in the group) of the parameter.
        """
        if self.listens:
            squares = gradient.detach().to(compute_dtype(gradient.dtype)).square()
            self.add(place, self.parameter(place), squares)

    def signal(self) -> Mapping[Tensor, Tensor] | None:
        """Return the signal of each parameter that had two or more backward passes in the step, and clear the sums.

        Return None if there is no such parameter.
        """
        factor, made = self.factor(), dict[Tensor, Tensor]()
        for place, (squares, count) in self.take().items():
            parameter = self.parameter(place)
            if parameter.grad is None or (not isinstance(count, Tensor) and count < 2):
                continue
            total = squares * count
            if factor is not None:
                total = total * factor.square().to(total.device)
            made[parameter] = (total - parameter.grad.detach().to(total.dtype).square()).clamp_min(0)
        return made or None
