"""Ownership: which rank holds the state of a block and computes its update. A pure function, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Loads:
    """What each rank carries: work of a step and bytes of state, in any units."""

    ranks: int
    work: list[float] = field(default_factory=list)
    state: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work = self.work or [0.0] * self.ranks
        self.state = self.state or [0.0] * self.ranks

    def carry(self, parts: Sequence[float], work: float, state: float) -> None:
        """Adds something whose fraction `parts[r]` is rank r's."""
        for rank, part in enumerate(parts):
            self.work[rank] += part * work
            self.state[rank] += part * state


def assign(work: Sequence[float], state: Sequence[float], loads: Loads) -> list[int]:
    """The owner of each item: longest processing time first (Graham 1969), in two measures.

    Items go, largest first, to the rank whose larger share (of all work, of all bytes) is the smallest; ties go to the
    lower rank. So both are balanced to within about an item. loads: what there is already, updated in place.
    """
    all_work = sum(work) + sum(loads.work) or 1.0
    all_state = sum(state) + sum(loads.state) or 1.0
    shares = [(w / all_work, s / all_state) for w, s in zip(work, state, strict=True)]
    order = sorted(range(len(shares)), key=lambda item: (-max(shares[item]), -sum(shares[item]), item))

    def carried(rank: int) -> tuple[float, int]:
        return max(loads.work[rank] / all_work, loads.state[rank] / all_state), rank

    heap = [carried(rank) for rank in range(loads.ranks)]
    heapq.heapify(heap)
    owners = [0] * len(shares)
    for item in order:
        _, rank = heap[0]
        owners[item] = rank
        loads.work[rank] += work[item]
        loads.state[rank] += state[item]
        heapq.heapreplace(heap, carried(rank))
    return owners
