"""A task whose training has bad batches in some steps. Evaluation is that of the inner task, without bad batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from eigengraft.experiments.tasks import Batch, Dataset, Task
from eigengraft.experiments.tasks.base import generator

_STREAM = 7_041
"""Number of the random stream that places and fills bad batches. No other stream has it."""


class BadBatches(Task):
    """A task on bytes in which, from a given step on, a given fraction of the batches is bad.

    noise: bytes drawn uniformly. repeated: one byte, drawn for the batch, at all places.
    """

    kind: Literal["bad_batches"] = "bad_batches"
    task: Task = Field(description="what is trained")
    bad: Literal["none", "noise", "repeated"] = Field(default="none", description="what bad batches hold")
    share: float = Field(default=0.05, ge=0, le=1, description="probability of a bad batch")
    start: int = Field(default=60, ge=0, description="first step that may have a bad batch")

    def load(self) -> Dataset:
        return Spoilt(self.task.load(), self)

    def build(self) -> nn.Module:
        return self.task.build()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(outputs, targets)


class Spoilt(Dataset):
    """The data of a task with bad batches."""

    def __init__(self, inner: Dataset, task: BadBatches) -> None:
        self.inner, self.task, self.fingerprint = inner, task, inner.fingerprint

    def batch(self, seed: int, step: int) -> Batch:
        found, draw = self.inner.batch(seed, step), generator(_STREAM, seed, step)
        if self.task.bad == "none" or step < self.task.start or draw.random() >= self.task.share:
            return found
        shape = (found.inputs.shape[0], found.inputs.shape[1] + 1)
        bytes_ = draw.integers(0, 256, size=() if self.task.bad == "repeated" else shape)
        text = torch.as_tensor(bytes_, dtype=found.inputs.dtype).expand(shape)
        return Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous().to(found.targets.dtype))

    def evaluation(self) -> Iterator[Batch]:
        return self.inner.evaluation()
