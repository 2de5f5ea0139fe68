"""Averaging: which iterates are kept beside the parameter, and which of them is evaluated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.component import Component
from eigengraft.slots import Slot

from .parameter_update import ParameterUpdate

Mode = Literal["train", "eval"]
MODES: tuple[Mode, ...] = ("train", "eval")
"""Which iterate the parameters of an optimizer hold: the one to train, or the one to evaluate."""


@dataclass(frozen=True)
class IterateBatch:
    """n parameters that share an update and a dtype, with their iterates.

    parameters: n tensors, what training sees.
    slots: n tensors by slot name.
    steps: `[n]`, updates that each parameter has had, the one under way included.
    lr, peak_lr: learning rate of the update under way, and the largest one of the run.
    mask: n 0-d booleans, False where nothing may change; None: everything may change.
    """

    parameters: Sequence[Tensor]
    slots: Mapping[str, Sequence[Tensor]]
    steps: NDArray[np.int64]
    lr: float | Tensor = 0.0
    mask: Sequence[Tensor] | None = None
    peak_lr: float = 1.0

    @property
    def y(self) -> Sequence[Tensor]:
        """Where gradients are taken, in full precision: the slot `y`, or the parameters where these have it."""
        return self.slots.get("y", self.parameters)

    def begin(self) -> None:
        """Begins the iterates z and y at the parameters."""
        for name in self.slots.keys() & {"z", "y"}:
            torch._foreach_copy_(list(self.slots[name]), list(self.parameters))

    def show_y(self) -> None:
        """Rounds y into the parameters, where it is a slot."""
        if self.y is not self.parameters:
            torch._foreach_copy_(list(self.parameters), list(self.y))

    def slice_rows(self, chosen: Sequence[int]) -> IterateBatch:
        """The batch of the chosen parameters alone."""
        slots = {name: [tensors[i] for i in chosen] for name, tensors in self.slots.items()}
        mask = None if self.mask is None else [self.mask[i] for i in chosen]
        parameters, steps = [self.parameters[i] for i in chosen], self.steps[list(chosen)]
        return replace(self, parameters=parameters, slots=slots, steps=steps, mask=mask)


class Averaging(Component, ABC, family="averaging"):
    """Which iterate a parameter holds: one in training (gradients are taken there), one in evaluation.

    Iterates are slots of role `iterate`, in the dtype they are computed in. A slot has the axes of the parameter last,
    after any of its own, or is a number of shape (); anything else raises a ContractError. Iterates begin at the
    parameter as its first update finds it, so that weights loaded after construction count. What is written into a
    parameter between steps (`clamp_`, a checkpoint of the model) is its training iterate from then on, in every dtype;
    the other iterates stay. Where a parameter has had no update, the evaluated iterate is the parameter.
    """

    @abstractmethod
    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        """The state of one parameter; low_precision: the parameter has less precision than its updates."""

    def follows_peak(self) -> bool:
        """Whether a step depends on the peak of the learning rate."""
        return False

    def begin(self, batch: IterateBatch) -> None:
        """Set the iterates that begin at the parameter; called before its first update."""

    def decaying(self, batch: IterateBatch) -> Sequence[Tensor]:
        """The tensors that weight decay acts on, one for each parameter. Default: the parameters."""
        return batch.parameters

    @abstractmethod
    def step(self, batch: IterateBatch, update: ParameterUpdate) -> None:
        """Apply `update` to the base iterate and let the other iterates follow."""

    @abstractmethod
    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        """The iterate to evaluate of each parameter, in any dtype; every parameter has had an update."""


def blend(
    targets: Sequence[Tensor],
    values: Sequence[Tensor],
    weights: Sequence[float | Tensor],
    mask: Sequence[Tensor] | None = None,
) -> None:
    """target <- target + weight (value - target), exactly the value for weight 1; masked targets stay."""
    if not targets:
        return
    values = [value.to(target.dtype) for target, value in zip(targets, values, strict=True)]
    weight = shared(weights)
    if weight is not None and mask is None:
        torch._foreach_lerp_(list(targets), values, weight)
        return
    for index, (target, value, own) in enumerate(zip(targets, values, weights, strict=True)):
        mixed = torch.lerp(target, value, own.to(target.dtype) if isinstance(own, Tensor) else own)
        target.copy_(mixed if mask is None else torch.where(mask[index], mixed, target))


def accumulate(targets: Sequence[Tensor], values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> None:
    """target <- target + weight value."""
    weight = shared(weights)
    if weight is not None:
        torch._foreach_add_(list(targets), list(values), alpha=weight)
        return
    for target, value, own in zip(targets, values, weights, strict=True):
        if isinstance(own, Tensor):
            target.add_(value * own.to(target.dtype))
        else:
            target.add_(value, alpha=own)


def shared(weights: Sequence[float | Tensor]) -> float | None:
    """The one number that all weights are; None if they differ or are tensors."""
    first = weights[0]
    return first if isinstance(first, float) and all(weight is first or weight == first for weight in weights) else None
