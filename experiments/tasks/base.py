"""What is trained: data, a model and a loss.

A `Task` is the declaration; `load` reads its data once into a `Dataset`. Every batch is a pure function of the seed and
the step number, so that a run continues from a step number alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from eigengraft.component import Component


class Batch(NamedTuple):
    """Inputs [B, ...], which the model is called with, and targets [B, ...], which the loss compares its outputs with.

    Targets are integer classes where the task keeps the loss of the base class.
    """

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        """A copy of this batch on `device`."""
        return Batch(self.inputs.to(device), self.targets.to(device))


def data_fault(batch: Batch) -> str:
    """A text that says which rows of a batch have numbers that are not finite; empty if all are finite."""
    for name, values in zip(batch._fields, batch, strict=True):
        if values.is_floating_point() and not bool((finite := torch.isfinite(values)).all()):
            rows = (~finite).reshape(len(values), -1).any(1).nonzero().flatten().tolist()
            listed = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
            return f"{int((~finite).sum())} numbers in its {name} that are not finite (rows {listed} of {len(values)})"
    return ""


@dataclass(frozen=True)
class Fingerprint:
    """The identity of the data of a run: its source, its size in bytes and the sha256 of its content."""

    source: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Metrics:
    """Validation loss as the task reports it, and accuracy in [0, 1] where the task reports it."""

    val_loss: float
    val_accuracy: float | None


class Dataset(ABC):
    """The data of a task, held in memory."""

    fingerprint: Fingerprint

    @abstractmethod
    def batch(self, seed: int, step: int) -> Batch:
        """The training batch of one step; equal arguments give equal batches, on every call and in every process."""

    @abstractmethod
    def evaluation(self) -> Iterator[Batch]:
        """Yield the validation batches, the same every time."""


class Examples(Dataset):
    """Examples held in memory: a new permutation of those to train on every epoch, all others at every evaluation.

    Inputs held as bytes become numbers when they are asked for, divided by `scale`.
    """

    def __init__(
        self, train: Batch, validation: Batch, batch_size: int, fingerprint: Fingerprint, scale: float = 1
    ) -> None:
        self.train, self.validation, self.batch_size, self.fingerprint = train, validation, batch_size, fingerprint
        self.scale = scale

    def batch(self, seed: int, step: int) -> Batch:
        epoch, position = divmod(step, len(self.train.targets) // self.batch_size)
        order = _permutation(seed, epoch, len(self.train.targets))
        chosen = torch.from_numpy(order[position * self.batch_size : (position + 1) * self.batch_size])
        return self._shown(self.train.inputs[chosen], self.train.targets[chosen])

    def evaluation(self) -> Iterator[Batch]:
        parts = (torch.split(part, 4096) for part in self.validation)
        for inputs, targets in zip(*parts, strict=True):
            yield self._shown(inputs, targets)

    def _shown(self, inputs: Tensor, targets: Tensor) -> Batch:
        return Batch(inputs.float() / self.scale if inputs.dtype == torch.uint8 else inputs, targets)


class Task(Component, family="task"):
    """Data, model and loss under one name: `load`, `build` and, unless it classifies, `loss`.

    Laws: `new_model(seed)` and `Dataset.batch(seed, step)` depend on their arguments only and leave torch's global
    random state as it was; evaluation batches never change during a run.
    """

    reports_accuracy: ClassVar[bool] = False
    """Whether targets are classes, of which the model's largest output is its guess."""

    @abstractmethod
    def load(self) -> Dataset:
        """Read the data. Raises ValueError naming the remedy when it is not on this machine."""

    @abstractmethod
    def build(self) -> nn.Module:
        """A new model, initialised from torch's global generator."""

    def new_model(self, seed: int) -> nn.Module:
        """A new model on the CPU whose initial weights depend on `seed` alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over targets. Here: cross-entropy in nats of logits [B, ..., classes] against classes [B, ...]."""
        if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
            raise ValueError(
                f"task.{getattr(self, 'kind', '?')}: integer classes, one for each row of scores of the model, "
                f"are required by cross-entropy, got {targets.dtype} {list(targets.shape)} for outputs "
                f"{list(outputs.shape)}; another loss is a method `loss(self, outputs, targets)` of the task"
            )
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def reported(self, mean: float) -> float:
        """The validation loss that is reported for a mean of `loss` over all validation targets. Here: that mean."""
        return mean

    @torch.no_grad()
    def evaluate(self, model: nn.Module, dataset: Dataset, device: torch.device) -> Metrics:
        """Metrics over all evaluation batches, each target weighing the same."""
        was_training = model.training
        model.eval()
        total, hits, count = 0.0, 0, 0
        for batch in dataset.evaluation():
            inputs, targets = batch.to(device)
            outputs = model(inputs)
            total += self.loss(outputs, targets).item() * targets.numel()
            if self.reports_accuracy:
                hits += int((outputs.argmax(-1) == targets).sum())
            count += targets.numel()
        model.train(was_training)
        return Metrics(self.reported(total / count), hits / count if self.reports_accuracy else None)


def generator(*key: int) -> np.random.Generator:
    """A random stream named by `key` (non-negative integers); different keys give independent streams."""
    return np.random.default_rng(key)


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of the examples of one epoch."""
    return generator(seed, epoch).permutation(count)
