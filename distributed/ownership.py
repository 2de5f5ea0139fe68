"""Ownership: which rank holds the state of a block and computes its update; a pure function, equal on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Loads:
    """What each rank carries.

    ranks: number of ranks.
    work: `[R]`, work of a step, in any unit.
    state: `[R]`, size of the state, in any unit.
    """

    ranks: int
    work: list[float] = field(default_factory=list)
    state: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work = self.work or [0.0] * self.ranks
        self.state = self.state or [0.0] * self.ranks

    def carry(self, fractions: Sequence[float], work: float, state: float) -> None:
        """Adds an item that is divided over ranks: rank r takes `fractions[r]` of its work and state."""
        for rank, fraction in enumerate(fractions):
            self.work[rank] += fraction * work
            self.state[rank] += fraction * state


SLACK = 1.08
"""Factor by which a rank may work more than the least possible if that evens out memory."""


def assign(work: Sequence[float], state: Sequence[float], loads: Loads) -> list[int]:
    """The owner of each item: longest processing time first (Graham 1969), in two measures.

    Items go, largest first, to the rank whose larger share (of all work, of all bytes) is the smallest, ties to the
    lower rank; but to none that then works more than SLACK times the larger of the mean work and the largest item.
    Where all would, the rank with the least work takes the item. So no rank is given more work than the mean and the
    largest item together, or SLACK times the larger of both. loads: what ranks carry already, updated in place.
    """
    all_work = sum(work) + sum(loads.work) or 1.0
    all_state = sum(state) + sum(loads.state) or 1.0
    shares = [(w / all_work, s / all_state) for w, s in zip(work, state, strict=True)]
    order = sorted(range(len(shares)), key=lambda item: (-max(shares[item]), -sum(shares[item]), item))
    limit = SLACK * max(all_work / loads.ranks, *work, 0.0)
    queue = _Queue(loads, (all_work, all_state), limit)
    owners = [0] * len(shares)
    for item in order:
        owners[item] = queue.place(work[item], state[item])
    return owners


class _Queue:
    """Ranks as (larger share, both shares, rank): open, a heap, or full, with no room for the last item."""

    def __init__(self, loads: Loads, totals: tuple[float, float], limit: float) -> None:
        self.loads, self.totals, self.limit, self.last = loads, totals, limit, 0.0
        self.open = [self._entry(rank) for rank in range(loads.ranks)]
        self.full: list[tuple[float, float, int]] = []
        heapq.heapify(self.open)

    def _entry(self, rank: int) -> tuple[float, float, int]:
        work, state = self.loads.work[rank] / self.totals[0], self.loads.state[rank] / self.totals[1]
        return max(work, state), work + state, rank

    def place(self, work: float, state: float) -> int:
        """The owner of an item, whose loads grow by it."""
        if work < self.last:  # what was too large for a rank may have left room for less
            self.open += self.full
            self.full = []
            heapq.heapify(self.open)
        self.last = work
        while self.open and self.loads.work[self.open[0][-1]] + work > self.limit:
            self.full.append(heapq.heappop(self.open))
        if self.open:
            rank = self._add(self.open[0][-1], work, state)
            heapq.heapreplace(self.open, self._entry(rank))
        else:
            rank = min(range(self.loads.ranks), key=lambda own: (self.loads.work[own], self.loads.state[own]))
            self._add(rank, work, state)
            self.full = [self._entry(own) for *_, own in self.full]
        return rank

    def _add(self, rank: int, work: float, state: float) -> int:
        self.loads.work[rank] += work
        self.loads.state[rank] += state
        return rank
