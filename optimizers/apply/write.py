"""The write into the parameters:  W <- W - lr alpha W - lr U, in place and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .weight_decay import WeightDecay


@dataclass(frozen=True)
class StepScale:
    """lr and alpha of this step (alpha as in `WeightDecay`), and the decay rule they belong to."""

    lr: float | Tensor
    alpha: float | Tensor
    decay: WeightDecay

    @property
    def after(self) -> bool:
        """Whether the decay acts on the moved parameter."""
        return self.decay.after

    @property
    def without_decay(self) -> StepScale:
        """The same step scale for a step whose decay was taken elsewhere."""
        return replace(self, alpha=0.0)

    def decay_term(self, parameter: Tensor, update: Tensor) -> Tensor:
        """alpha W, or alpha W [U W > 0] for cautious decay; in the dtype of the update."""
        term = parameter.to(update.dtype) * self.alpha
        return torch.where(update * parameter > 0, term, 0.0) if self.decay.cautious else term


def write(
    parameters: Sequence[Tensor], updates: Sequence[Tensor], step_scale: StepScale, mask: Sequence[Tensor] | None = None
) -> None:
    """Moves the parameters by their updates (same shapes).

    mask: 0-d booleans; a parameter whose mask is False stays.
    """
    together: tuple[list[Tensor], list[Tensor]] = ([], [])
    numbers = isinstance(step_scale.lr, float) and isinstance(step_scale.alpha, float)
    for index, (parameter, update) in enumerate(zip(parameters, updates, strict=True)):
        if numbers and mask is None and not step_scale.decay.cautious and parameter.dtype == update.dtype:
            together[0].append(parameter)
            together[1].append(update)
            continue
        value = moved(parameter.to(update.dtype), update, step_scale)
        if mask is not None:
            value = torch.where(mask[index], value, parameter)
        parameter.copy_(value)
    if together[0]:
        _write_together(*together, step_scale)


def _write_together(parameters: list[Tensor], updates: list[Tensor], step_scale: StepScale) -> None:
    kept = 1 - float(step_scale.lr * step_scale.alpha)
    if kept != 1 and not step_scale.after:
        torch._foreach_mul_(parameters, kept)
    torch._foreach_add_(parameters, updates, alpha=-float(step_scale.lr))
    if kept != 1 and step_scale.after:
        torch._foreach_mul_(parameters, kept)


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
