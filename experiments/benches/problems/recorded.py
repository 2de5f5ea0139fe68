"""The factor matrices that `record_factors.py` has recorded."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).with_name("recorded.npz")


@cache
def recorded_factors(path: Path = FILE) -> Tensor:
    """All recorded factors `[N, 64, 64]`, float32, those of early steps first. Cached: do not write into it."""
    with np.load(path) as file:
        triangles = torch.from_numpy(np.stack([file[name] for name in sorted(file.files) if name != "made"]))
    d = int((2 * triangles.shape[1]) ** 0.5)
    upper = triangles.new_zeros(len(triangles), d, d)
    rows, columns = torch.triu_indices(d, d)
    upper[:, rows, columns] = triangles
    return upper + upper.triu(1).mT
