"""The signal `gradient_variance`: the variance of gradients over the micro-batches of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eigengraft.numerics import compute_dtype

from ..optimizer import Optimizer
from .arguments import require_optimizer
from .gradient_sums import GradientSums
from .layer_grams import ParamPlace, parameter_at, places, remove_hooks

VARIANCE = "gradient_variance"


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
    if VARIANCE not in optimizer.param_sets.signals.listeners.asking:
        return None
    shared = next((own.names[0] for own in optimizer.param_sets if own.rank_group is not None), None)
    if shared is not None:
        raise ValueError(
            f"watch_gradient_variance: several ranks share {shared}, so its gradient after a backward is not the "
            f"gradient of one micro-batch; compute the variance and call optimizer.provide('{VARIANCE}', ...)"
        )
    return _Variance(optimizer).remove


class _Variance:
    """Sums of the squares of gradients over backward passes. Hooks of the parameters reference this object."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._sums = weakref.ref(optimizer), GradientSums(torch.add, measured=True)
        takers = optimizer.param_sets.signals.listeners.takers(VARIANCE, optimizer.param_sets.rows())
        known = [place for key, place in places(optimizer) if key in takers]
        self._handles: list[Any] = [optimizer.register_load_state_dict_post_hook(lambda _: self._sums.clear())]
        for place in known:
            hook = partial(self._add, place)
            self._handles.append(parameter_at(optimizer, place).register_hook(hook))  # type: ignore[no-untyped-call]
        weakref.finalize(optimizer, remove_hooks, self._handles)
        optimizer.provide(VARIANCE, self._take)

    def remove(self) -> None:
        """Remove the hooks. From now on the optimizer does not get the signal."""
        remove_hooks(self._handles)
        self._sums.clear()

    def _add(self, place: ParamPlace, gradient: Tensor) -> None:
        """Add the squares of a gradient that a backward pass is about to accumulate."""
        optimizer = self._optimizer()
        if optimizer is not None and not optimizer.param_sets.signals.listeners.paused:
            squares = gradient.detach().to(compute_dtype(gradient.dtype)).square()
            self._sums.add(place, parameter_at(optimizer, place), squares)

    def _take(self) -> Mapping[Tensor, Tensor] | None:
        """Return the signal of each parameter that had two or more backward passes in the step, and clear the sums.

        Return None if there is no such parameter.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        factor, made = self._sums.factor(), dict[Tensor, Tensor]()
        for place, (squares, count) in self._sums.take().items():
            parameter = parameter_at(optimizer, place)
            if parameter.grad is None or (not isinstance(count, Tensor) and count < 2):
                continue
            total = squares * count
            if factor is not None:
                total = total * factor.square().to(total.device)
            made[parameter] = (total - parameter.grad.detach().to(total.dtype).square()).clamp_min(0)
        return made or None
