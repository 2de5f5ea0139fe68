"""Cost model: what a block costs its owner in operations per step and bytes of state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from eigengraft.preconditioners.cadence import Cadence
from eigengraft.quantization import Quantizer, choose

from ..recipe.recipe import Recipe, Route
from ..recipe.slot_keys import slot_keys

FACTORIZATION = 20.0
"""Operations of a decomposition in units of d^3: eigh takes 10 to 28, a power step with QR 5 (measured on CPUs)."""

LONGEST_INTERVAL = 1000
"""Steps over which owners are evened out step by step; refreshes of longer periods count as the same in every step."""


@dataclass(frozen=True)
class Cost:
    """What one block costs.

    constant: floating-point operations of every step, refreshes left out.
    refreshes: cadence of each stage that refreshes, and the operations of one refresh.
    state: bytes of state.
    """

    constant: float
    refreshes: tuple[tuple[Cadence, float], ...]
    state: int

    @property
    def work(self) -> float:
        """Operations per step; those of a refresh are divided by the refresh interval."""
        return self.constant + sum(refresh / cadence.interval for cadence, refresh in self.refreshes)


def block_cost(
    rule: Recipe | Route, path: str, block: tuple[int, ...], dtype: torch.dtype, storage: Mapping[str, Quantizer]
) -> Cost:
    """The cost of a block of that shape under the update at `path` of a recipe; nothing is allocated."""
    constant, refreshes = 0.0, []
    for _, stage in rule.stages():
        constant += stage.work(block)
        cadence = stage.cadence()
        if cadence is not None:
            refreshes.append((cadence, FACTORIZATION * stage.refresh_cost(block)))
    state = 0
    for key, slot in slot_keys(rule, path, block).items():
        state += _bytes(slot.shape, slot.dtype or dtype, choose(storage, key, slot))
    return Cost(constant, tuple(refreshes), state)


def common_interval(recipe: Recipe) -> int:
    """Steps after which the refreshes of all updates are due again; the longest periods alone, where it is too long."""
    cadences = [stage.cadence() for rule in recipe.updates().values() for _, stage in rule.stages()]
    interval = 1
    for period in sorted({cadence.period or 1 for cadence in cadences if cadence is not None}, reverse=True):
        if math.lcm(interval, period) <= LONGEST_INTERVAL:
            interval = math.lcm(interval, period)
    return interval


@lru_cache(maxsize=4096)
def _bytes(shape: tuple[int, ...], dtype: torch.dtype, quantizer: Quantizer | None) -> int:
    numel = math.prod(shape)
    if quantizer is None:
        return numel * dtype.itemsize
    shrunk = (max(1, (1 << 22) * shape[0] // max(numel, 1)), *shape[1:]) if numel > 1 << 22 else shape
    codes = quantizer.encode(torch.zeros((1, *shrunk), dtype=dtype, device="cpu")).values()
    nbytes = sum(code.numel() * code.element_size() for code in codes)
    return nbytes * numel // max(math.prod(shrunk), 1) + 8
