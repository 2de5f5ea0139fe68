"""The write into the parameters:  W <- W - lr alpha W - lr U, in place and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eigengraft.numerics import compute_dtype

from .weight_decay import Decoupled, WeightDecay


@dataclass(frozen=True)
class Pace:
    """lr and alpha of this step (alpha as in `WeightDecay`), and the decay rule they belong to."""

    lr: float | Tensor
    alpha: float | Tensor
    decay: WeightDecay

    def decay_term(self, parameter: Tensor, update: Tensor) -> Tensor:
        """alpha W, or alpha W [U W > 0] for cautious decay; in the dtype of the update."""
        term = parameter.to(update.dtype) * self.alpha
        return torch.where(update * parameter > 0, term, 0.0) if self.decay.cautious else term


def write(parameters: list[Tensor], updates: list[Tensor], pace: Pace, mask: Sequence[Tensor] | None = None) -> None:
    """Moves the parameters by their updates (same shapes).

    mask: 0-d booleans; a parameter whose mask is False stays.
    """
    simple = mask is None and not pace.decay.cautious and isinstance(pace.lr, float) and isinstance(pace.alpha, float)
    simple = simple and all(p.dtype == compute_dtype(p.dtype) for p in parameters)
    if simple:
        _write_together(parameters, updates, float(pace.lr), float(pace.lr * pace.alpha), _after(pace.decay))
        return
    for index, (parameter, update) in enumerate(zip(parameters, updates, strict=True)):
        moved = _moved(parameter.to(update.dtype), update, pace)
        if mask is not None:
            moved = torch.where(mask[index], moved, parameter)
        parameter.copy_(moved)


def _after(decay: WeightDecay) -> bool:
    return isinstance(decay, Decoupled) and decay.placed == "after"


def _write_together(parameters: list[Tensor], updates: list[Tensor], lr: float, factor: float, after: bool) -> None:
    if factor and not after:
        torch._foreach_mul_(parameters, 1 - factor)
    torch._foreach_add_(parameters, updates, alpha=-lr)
    if factor and after:
        torch._foreach_mul_(parameters, 1 - factor)


def _moved(parameter: Tensor, update: Tensor, pace: Pace) -> Tensor:
    """The new value, computed in the update's dtype."""
    if _after(pace.decay):
        moved = parameter - pace.lr * update
        return moved - pace.lr * pace.alpha * moved
    return parameter - pace.lr * pace.decay_term(parameter, update) - pace.lr * update
