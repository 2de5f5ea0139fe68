"""What tasks with images of 28x28 pixels share: a model, and how many images validate."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from ..base import Batch, Dataset, Examples, Fingerprint, Task
from ..initialization import Init, initialized
from ..models import cnn, mlp

SIDE_28, CLASSES_10 = 28, 10


class ImageClassifier(Task, ABC):
    """Classify images of 28x28 pixels into ten classes with an MLP or a CNN; loss in nats per image.

    Members of the family say where images come from (`read`). Training goes through a new permutation every epoch.
    """

    model: Literal["mlp", "cnn"] = Field(default="mlp", description="multi-layer perceptron or convolutional network")
    layers: int = Field(default=2, ge=1, le=16, description="hidden layers, or convolutions")
    width: int = Field(default=64, ge=1, le=4096, description="units per hidden layer, or channels")
    init: Init = Field(default="standard", description="initial weights; spectral: of sizes that suit every width")
    batch_size: int = Field(default=64, ge=2, le=1024, description="images per step")
    eval_images: int = Field(default=1000, ge=1, description="images that validate: the first ones of that part")
    reports_accuracy: ClassVar[bool] = True

    @abstractmethod
    def read(self) -> tuple[Batch, Batch, str]:
        """Images [N, 1, 28, 28] from 0 to 255 and classes [N] to train on and to validate with; where they are from."""

    def load(self) -> Dataset:
        train, validation, source = self.read()
        if len(train.targets) < self.batch_size:
            raise ValueError(
                f"task.batch_size: at most {len(train.targets)}, the images of {source}, is required, "
                f"got {self.batch_size}"
            )
        content = b"".join(part.numpy().tobytes() for batch in (train, validation) for part in batch)
        fingerprint = Fingerprint(source, len(content), hashlib.sha256(content).hexdigest())
        shown = Batch(*(part[: self.eval_images] for part in validation))
        return Examples(train, shown, self.batch_size, fingerprint, scale=255)

    def build(self) -> nn.Module:
        if self.model == "cnn":
            return initialized(cnn(SIDE_28, CLASSES_10, self.layers, self.width), self.init)
        return initialized(mlp(SIDE_28**2, CLASSES_10, self.layers, self.width), self.init)


def image_batch(pixels: NDArray[Any], classes: NDArray[Any]) -> Batch:
    """Images [N, 1, 28, 28] in uint8 of pixels [N, 28 * 28 in any shape], and their classes."""
    images = torch.from_numpy(pixels.astype("uint8").reshape(-1, 1, SIDE_28, SIDE_28))
    return Batch(images, torch.from_numpy(classes.astype("int64")))
