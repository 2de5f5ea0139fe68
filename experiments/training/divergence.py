"""The diagnosis of a run that diverged or got worse: the first value that went wrong, its place and its usual cause."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..tasks import Batch, Dataset, data_fault
from .parallel import Ranks

WORSE = 1.5
"""Ratio of the last training loss to the first from which a run counts as having got worse.

A cross-entropy that starts at the loss of a uniform guess rises by half only if something is wrong. The noise of small
batches is far smaller.
"""


@dataclass(frozen=True)
class Divergence:
    """A run after the step at which it diverged.

    batch: batch of that step, the rows of all ranks.
    step: number of that step, from 1.
    loss: training loss of that step.
    val_loss: validation loss after that step; None: there was no evaluation.
    """

    model: nn.Module
    dataset: Dataset
    batch: Batch
    step: int
    loss: float
    val_loss: float | None
    ranks: Ranks

    def diagnosis(self) -> str:
        """Return a text about the first value that is not finite, in the order batch, weight, loss, validation data,
        gradient.

        All ranks must call this, and all receive the same text.
        """
        if fault := data_fault(self.batch):
            return (
                f"the batch of step {self.step} has {fault}; the data are at fault, another learning rate cannot help"
            )
        weight = self._first((name, parameter) for name, parameter in self.model.named_parameters())
        if not math.isfinite(self.loss):
            return self._of_loss(weight)
        if self.val_loss is not None and not math.isfinite(self.val_loss):
            for index, batch in enumerate(self.dataset.evaluation()):
                if fault := data_fault(batch):
                    return f"validation batch {index} has {fault}; the validation data are at fault, not the training"
            return (
                f"the validation loss is {self.val_loss} and the training loss {self.loss:.4g}: outputs overflow on "
                "validation data, which are finite; compare their range with that of the training data"
            )
        named = ((name, parameter.grad) for name, parameter in self.model.named_parameters())
        gradient = self._first((name, own) for name, own in named if own is not None)
        return (
            f"the loss is finite, but no gradient could be used for many steps; the first that is not finite is that "
            f"of {gradient}; an operation of the model has no finite derivative there, as a root of 0, or overflows"
        )

    def _of_loss(self, weight: str | None) -> str:
        if self.step == 1:
            what = "a loss" if weight is None else f"the weight {weight}"
            return f"{what} that is not finite before the first update; the initial weights or the loss are at fault"
        if weight is not None:
            return f"the weight {weight} is not finite, while the batch is; an update overflowed, a smaller lr may help"
        sizes = self.ranks.all_gather(
            max(
                (float(_local(own).detach().abs().max()), name)
                for name, own in self.model.named_parameters()
                if _local(own).numel()
            )
        )
        size, name = max(sizes)
        return (
            "the loss is not finite, while the batch and all weights are; the largest weight is "
            f"{size:.3g}, in {name}; a smaller lr may help"
        )

    def _first(self, named: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first tensor with an entry that is not finite on any rank, None if all are finite."""
        found = next((name for name, own in named if not bool(torch.isfinite(_local(own)).all())), None)
        return next((name for name in self.ranks.all_gather(found) if name is not None), None)


def worse_than_at_first(first: float | None, last: float | None) -> str:
    """Return a sentence if the training loss ended far above its first value, else an empty text."""
    if first is None or last is None or not 0 < WORSE * first < last:
        return ""
    return f"the training loss rose from {first:.4g} at the first step to {last:.4g} at the end; a smaller lr may help"


def _local(tensor: Tensor) -> Tensor:
    """Return the entries of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
