"""One step of a parameter set, as it is passed around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.comm_step import CommStep

GRADIENTS, PARAMETERS = "gradients", "parameters"
"""What is gathered into blocks."""


@dataclass(frozen=True)
class Hyper:
    """What a param group says at this step: learning rate, its initial value, weight decay rate."""

    lr: float | Tensor
    peak_lr: float
    weight_decay: float


@dataclass
class Step:
    """One step of a parameter set. gradients: parts. active `[P]`; mask `[P]` on the device; buffers: updates of
    parameters cut into blocks, by the path of their update and their position. exchange, rms: with other ranks."""

    gradients: Sequence[Any]
    active: NDArray[np.bool_]
    mask: Tensor | None
    hyper: Hyper
    buffers: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    comm_step: CommStep | None = None
    rms: Tensor | None = None
