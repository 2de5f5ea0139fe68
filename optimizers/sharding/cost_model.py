"""Cost model: what a block costs its owner in operations per step and bytes of state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from eigengraft.quantization import Quantizer, choose

from ..recipe.recipe import Recipe, Route
from ..recipe.slot_keys import slot_keys

FACTORIZATION = 20.0
"""Operations of a decomposition in units of d^3: eigh takes 10 to 28, a power step with QR 5 (measured on CPUs)."""


@dataclass(frozen=True)
class Cost:
    """What one block costs.

    work: floating-point operations per step; those of a refresh are divided by the refresh interval.
    state: bytes of state.
    """

    work: float
    state: int


def block_cost(
    rule: Recipe | Route, path: str, block: tuple[int, ...], dtype: torch.dtype, storage: Mapping[str, Quantizer]
) -> Cost:
    """The cost of a block of that shape under the update at `path` of a recipe; nothing is allocated."""
    work = 0.0
    for _, stage in rule.stages():
        work += stage.work(block)
        cadence = stage.cadence()
        if cadence is not None:
            work += FACTORIZATION * stage.refresh_cost(block) / cadence.interval
    state = 0
    for key, slot in slot_keys(rule, path, block).items():
        stage_path, _, name = key.rpartition("/")
        state += _bytes(slot.shape, slot.dtype or dtype, choose(storage, stage_path, name, slot))
    return Cost(work, state)


@lru_cache(maxsize=4096)
def _bytes(shape: tuple[int, ...], dtype: torch.dtype, quantizer: Quantizer | None) -> int:
    numel = math.prod(shape)
    if quantizer is None:
        return numel * dtype.itemsize
    shrunk = (max(1, (1 << 22) * shape[0] // max(numel, 1)), *shape[1:]) if numel > 1 << 22 else shape
    codes = quantizer.encode(torch.zeros((1, *shrunk), dtype=dtype)).values()
    nbytes = sum(code.numel() * code.element_size() for code in codes)
    return nbytes * numel // max(math.prod(shrunk), 1) + 8
