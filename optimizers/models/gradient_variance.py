"""The signal `gradient_variance`: the variance of gradients over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from eigengraft.numerics import compute_dtype

from ..optimizer import Optimizer
from .arguments import require_optimizer
from .gradient_sums import GradientSums, ParamPlace

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


class _Variance(GradientSums):
    """Sums of the squares of gradients over backward passes. Hooks of the parameters reference this object."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, VARIANCE, torch.add, measured=True)
        for place in self.takers().values():
            hook = partial(self._add, place)
            self._handles.append(self.parameter(place).register_hook(hook))  # type: ignore[no-untyped-call]

    def _add(self, place: ParamPlace, gradient: Tensor) -> None:
        """Add the squares of a gradient that a backward pass is about to accumulate."""
        if self.listens:
            squares = gradient.detach().to(compute_dtype(gradient.dtype)).square()
            self.add(place, self.parameter(place), squares)

    def signal(self) -> Mapping[Tensor, Tensor] | None:
        """Return the signal of each parameter that had two or more backward passes in the step, and clear the sums."""
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
