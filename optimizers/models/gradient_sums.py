"""Sums of what backwards contribute, tied to the gradients that they are accumulated in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from eigengraft.distributed.layouts import is_dtensor, local

Join = Callable[[Tensor, Tensor], Tensor]
"""How two values are joined: `torch.add` or `torch.maximum`."""


@dataclass
class _Sum:
    """A joined value and the number of rows in it, which is a tensor where a device has decided about earlier rows."""

    value: Tensor
    count: int | Tensor

    def joined(self, other: _Sum | None, join: Join) -> _Sum:
        return self if other is None else _Sum(join(self.value, other.value), self.count + other.count)

    def where(self, keep: Tensor) -> _Sum:
        """This sum where `keep` is true, else a sum of 0 rows, whose value is 0 also in place of inf and nan."""
        zero = torch.zeros((), dtype=self.value.dtype, device=self.value.device)
        return _Sum(torch.where(keep, self.value, zero), torch.where(keep, self.count, 0))


@dataclass
class _Running:
    """What a backward under way has contributed for one parameter; stamp: of its gradient before."""

    parameter: Tensor
    stamp: tuple[int, ...]
    found: _Sum | None = None


class _Backward(dict[Hashable, _Running]):
    """What one backward under way has contributed, by key; its callback alone keeps it, so that one that fails is
    forgotten."""


class GradientSums:
    """For each key the sum over the backwards that the present gradient of its parameter was accumulated in.

    `add` is called inside a backward, before the parameter's gradient is accumulated. A gradient that is then None or
    zero begins a new sum: what was thrown away by `zero_grad`, by hand or by a skipped step is not in it. A backward
    that changes no gradient (`torch.autograd.grad`) counts only if none does until the step. Nothing is read on the
    host: whether a gradient is zero is decided by a mask, and only where it is not None.

    `factor` is what gradients were multiplied by between the last backward and the step, as GradScaler's `unscale_` and
    `clip_grad_norm_` do: the factor of more than half of the entries on the diagonals of gradients, else 1.

    join: how values are joined. measured: whether `factor` is asked for.
    """

    def __init__(self, join: Join, measured: bool = False) -> None:
        self._join, self._measured = join, measured
        self._running: WeakValueDictionary[int, _Backward] = WeakValueDictionary()
        self._held: dict[Hashable, _Sum] = {}
        self._loose: dict[Hashable, _Sum] = {}
        self._left: dict[Hashable, tuple[Tensor, Tensor | None]] = {}

    def __len__(self) -> int:
        return len(self._held.keys() | self._loose.keys() | {key for found in self._running.values() for key in found})

    def clear(self) -> None:
        """Forgets everything."""
        for running in self._running.values():
            running.clear()
        self._held.clear()
        self._loose.clear()
        self._left.clear()

    def add(self, key: Hashable, parameter: Tensor, value: Tensor, count: int = 1) -> None:
        """Joins what one layer contributes to the gradient of a parameter; only inside a backward."""
        task = torch._C._current_graph_task_id()
        if (running := self._running.get(task)) is None:
            running = self._running[task] = _Backward()
            end = partial(self._end, running)
            _after_backward(partial(_after_backward, end))  # after those of wrappers, which reduce gradients
        if key not in running:
            self._begin(key, parameter)
            running[key] = _Running(parameter, _stamp(parameter.grad))
        running[key].found = _Sum(value, count).joined(running[key].found, self._join)

    def take(self) -> Mapping[Any, tuple[Tensor, int | Tensor]]:
        """(value, rows) for each key, and forgets them; those whose gradient is None by now are left out."""
        for running in list(self._running.values()):  # of a step inside a backward
            self._end(running)
        found = {**self._loose, **self._held}
        gone = {key for key, (parameter, _) in self._left.items() if parameter.grad is None}
        self.clear()
        return {key: (own.value, own.count) for key, own in found.items() if key not in gone}

    def factor(self) -> Tensor | None:
        """0-d: what the gradients were multiplied by since backwards left them; None where none is known."""
        rows = [(p.grad, sample) for p, sample in self._left.values() if sample is not None and p.grad is not None]
        return _common_factor([sample for _, sample in rows], [_sample(grad) for grad, _ in rows]) if rows else None

    def _begin(self, key: Hashable, parameter: Tensor) -> None:
        """Drops what belongs to a gradient that is there no more."""
        grad, held = parameter.grad, self._held.pop(key, None)
        if grad is not None and held is not None:
            self._held[key] = held.where(local(grad.detach()).any())

    def _end(self, backward: _Backward) -> None:
        """Gives what a backward has contributed to the gradients that it has changed."""
        found, changed = dict(backward), list[tuple[Hashable, Tensor]]()
        backward.clear()
        for key, running in found.items():
            assert running.found is not None
            if _stamp(running.parameter.grad) == running.stamp:
                self._loose[key] = running.found.joined(self._loose.get(key), self._join)
                continue
            loose = self._loose.pop(key, None)
            if is_dtensor(running.parameter):  # backwards before ranks reduce (`set_requires_gradient_sync(False)`)
                running.found = running.found.joined(loose, self._join)
            self._held[key] = running.found.joined(self._held.get(key), self._join)
            changed.append((key, running.parameter))
        self._left |= {key: (parameter, None) for key, parameter in changed}
        if self._measured and changed:
            some = changed[:: -(-len(changed) // _MEASURED)]
            for (key, parameter), sample in zip(some, _samples([p for _, p in some]), strict=True):
                self._left[key] = parameter, sample


def _after_backward(call: Callable[[], None]) -> None:
    """Has a function called at the end of the backward that runs, after those that wait already."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _stamp(grad: Tensor | None) -> tuple[int, ...]:
    """Equal for a gradient that no backward has changed since."""
    return () if grad is None else (id(grad), grad._version, local(grad)._version)


def _sample(grad: Tensor) -> Tensor:
    """Entries of every row or of every column of a gradient, as a view if it has two axes."""
    return local(grad.detach()).diagonal().flatten()


def _samples(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """A copy of the sample of each gradient, by one launch."""
    own = [
        _sample(p.grad) if p.grad is not None else torch.empty(0, dtype=p.dtype, device=p.device) for p in parameters
    ]
    return torch.split(torch.cat([x.to(own[0].device) for x in own]), [x.numel() for x in own])


def _common_factor(before: Sequence[Tensor], now: Sequence[Tensor]) -> Tensor:
    """The median of the ratios of entries if more than half of them are like it, else 1; 0-d float32."""
    device = before[0].device
    old, new = (torch.cat([x.to(device) for x in own]).float() for own in (before, now))
    ratios = torch.where(old == 0, torch.nan, new / old)
    middle = ratios.nanmedian()
    alike = ((ratios - middle).abs() <= _TOLERANCE * middle.abs()).sum()
    return torch.where((alike * 2 > ratios.isfinite().sum()) & (middle != 0), middle, 1.0)


_MEASURED = 16
"""Parameters of a backward whose gradients are sampled: what scales gradients scales all of them."""
_TOLERANCE = 0.01
"""Relative difference of factors that are taken to be one: above the rounding of bfloat16, 2^-8, of both gradients."""
