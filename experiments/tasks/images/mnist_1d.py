"""MNIST-1D: signals of 40 numbers, made by the package mnist1d."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from ..base import Batch, Dataset, Examples, Fingerprint, Task
from ..initialization import Init, initialized
from ..models import mlp

SIGNAL, SIGNAL_CLASSES = 40, 10


class MNIST1D(Task):
    """4000 signals to train on and 1000 to validate, ten classes (Greydanus & Kobak 2024, arXiv:2011.14439).

    The data are those of the package's defaults, made on this machine; an MLP classifies them, loss in nats per signal.
    """

    kind: Literal["mnist_1d"] = "mnist_1d"
    layers: int = Field(default=2, ge=1, le=16, description="hidden layers")
    width: int = Field(default=100, ge=1, le=4096, description="units per hidden layer")
    init: Init = Field(default="standard", description="initial weights; spectral: of sizes that suit every width")
    batch_size: int = Field(default=100, ge=2, le=4000, description="signals per step")
    reports_accuracy: ClassVar[bool] = True

    def load(self) -> Dataset:
        train, validation = _signals()
        content = b"".join(part.numpy().tobytes() for batch in (train, validation) for part in batch)
        fingerprint = Fingerprint("the package mnist1d", len(content), hashlib.sha256(content).hexdigest())
        return Examples(train, validation, self.batch_size, fingerprint)

    def build(self) -> nn.Module:
        return initialized(mlp(SIGNAL, SIGNAL_CLASSES, self.layers, self.width), self.init)


@lru_cache(maxsize=1)
def _signals() -> tuple[Batch, Batch]:
    """What `mnist1d.data.make_dataset` makes, which seeds global generators; they are put back."""
    try:
        from mnist1d.data import make_dataset
    except ImportError:
        raise ValueError("mnist_1d: the package mnist1d is required; install eigengraft[data]") from None
    states = np.random.get_state(), random.getstate()
    try:
        made = make_dataset()
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])
    train, validation = (
        Batch(torch.from_numpy(made[f"x{part}"]).float(), torch.from_numpy(made[f"y{part}"]).long())
        for part in ("", "_test")
    )
    return train, validation
