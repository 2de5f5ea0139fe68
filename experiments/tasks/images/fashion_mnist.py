"""Fashion-MNIST, and other data sets in MNIST's files, from a folder of this machine."""

from __future__ import annotations

import gzip
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from ..base import Batch
from .classifier import ImageClassifier, image_batch

DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"


class FashionMNIST(ImageClassifier):
    """70,000 images of clothes, 60,000 of which train (Xiao, Rasul & Vollgraf 2017, arXiv:1708.07747).

    Reads the four files as they are published, from Debian's package dataset-fashion-mnist or from any folder; MNIST,
    KMNIST and others come in such files too.
    """

    kind: Literal["fashion_mnist"] = "fashion_mnist"
    path: str = Field(default=DEBIAN_FOLDER, description="folder of train-images-idx3-ubyte.gz and the three others")

    @field_validator("path")
    @classmethod
    def _absolute_folder(cls, path: str) -> str:
        return str(Path(path).expanduser().absolute())

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
    """A file of a folder, compressed or not."""
    for file in (folder / f"{name}.gz", folder / name):
        if file.is_file():
            return file
    raise ValueError(
        f"fashion_mnist: the file {name}.gz is required in '{folder}', got none; install Debian's "
        "dataset-fashion-mnist, or give the folder of the published files as task.path"
    )


@lru_cache(maxsize=8)
def read_idx(file: Path) -> NDArray[Any]:
    """An array of bytes from a file: two zeros, type 8, the number of axes, their lengths as 4 bytes each, the data."""
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    axes = content[3] if len(content) > 4 else 0
    shape = tuple(np.frombuffer(content, ">u4", count=axes, offset=4).tolist()) if len(content) >= 4 + 4 * axes else ()
    if content[:3] != b"\0\0\x08" or not shape or len(content) != 4 + 4 * axes + math.prod(shape):
        raise ValueError(
            f"{file}: an IDX file of unsigned bytes is required, got {len(content)} bytes of another format"
        )
    return np.frombuffer(content, "u1", offset=4 + 4 * axes).reshape(shape)
