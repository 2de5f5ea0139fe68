"""Handwritten digits: 1797 grey images of 8x8 pixels that come with scikit-learn."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from .base import Batch, Dataset, Examples, Fingerprint, Task, generator
from .initialization import Init, initialized
from .models import cnn, mlp

SIDE, CLASSES = 8, 10


class Digits(Task):
    """Classify handwritten digits with a small MLP or CNN; loss in nats per image.

    A fifth of the images, chosen once and for all, validates. Training goes through a new permutation every epoch.
    """

    kind: Literal["digits"] = "digits"
    model: Literal["mlp", "cnn"] = Field(default="mlp", description="multi-layer perceptron or convolutional network")
    layers: int = Field(default=2, ge=1, le=16, description="hidden layers, or convolutions")
    width: int = Field(default=64, ge=1, le=4096, description="units per hidden layer, or channels")
    init: Init = Field(default="standard", description="initial weights; spectral: of sizes that suit every width")
    batch_size: int = Field(default=64, ge=1, le=1024, description="images per step")
    reports_accuracy: ClassVar[bool] = True

    def load(self) -> Dataset:
        images, digits, sha256 = read_digits()
        order = torch.from_numpy(generator(0).permutation(len(images)))
        held_out, rest = order[: len(images) // 5], order[len(images) // 5 :]
        train, validation = Batch(images[rest], digits[rest]), Batch(images[held_out], digits[held_out])
        fingerprint = Fingerprint("scikit-learn's handwritten digits", images.nelement(), sha256)
        return Examples(train, validation, self.batch_size, fingerprint)

    def build(self) -> nn.Module:
        if self.model == "cnn":
            return initialized(cnn(SIDE, CLASSES, self.layers, self.width), self.init)
        return initialized(mlp(SIDE * SIDE, CLASSES, self.layers, self.width), self.init)


@lru_cache(maxsize=1)
def read_digits() -> tuple[Tensor, Tensor, str]:
    """All images [N, 1, 8, 8] in [0, 1], their digits [N], and the sha256 of both.

    Reads the file that `sklearn.datasets.load_digits` reads, which imports most of scipy first: a second a process.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ValueError("digits: scikit-learn is required; install eigengraft[experiments]")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",").astype("uint8")
    pixels, digits = rows[:, :-1].reshape(-1, 1, SIDE, SIDE), rows[:, -1].copy()
    sha256 = hashlib.sha256(pixels.tobytes() + digits.tobytes()).hexdigest()
    images = torch.from_numpy(pixels).float().div(16)
    return images, torch.from_numpy(digits).long(), sha256
