"""Ownership: which rank holds the state of a block and computes its update; a pure function, equal on every rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Item(NamedTuple):
    """What an owner carries of an item, in any units.

    constant: work of every step.
    state: size of the state.
    due: (step of the interval, work of a refresh at that step).
    """

    constant: float
    state: float
    due: tuple[tuple[int, float], ...] = ()

    def work(self, interval: int) -> float:
        """Work of a step, on average."""
        return self.constant + sum(refresh for _, refresh in self.due) / interval


@dataclass
class Loads:
    """What each of R ranks carries.

    ranks: R.
    interval: T, steps after which the same refreshes are due again.
    constant: `[R]`, work of every step.
    refresh: `[R, T]`, work of the refreshes that are due at each step of an interval.
    state: `[R]`, size of the state.
    """

    ranks: int
    interval: int = 1
    constant: NDArray[np.float64] = field(init=False)
    refresh: NDArray[np.float64] = field(init=False)
    state: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.constant, self.state = np.zeros((2, self.ranks))
        self.refresh = np.zeros((self.ranks, self.interval))

    @property
    def work(self) -> NDArray[np.float64]:
        """`[R]`, work of a step, on average."""
        work: NDArray[np.float64] = self.constant + self.refresh.sum(1) / self.interval
        return work

    @property
    def critical_path(self) -> float:
        """Work of an interval in which every step lasts until the last rank is done."""
        return float((self.constant[:, None] + self.refresh).max(0).sum())

    def carry(self, fractions: Sequence[float], work: float, state: float) -> None:
        """Adds an item that is divided over ranks: rank r takes `fractions[r]` of its work and state."""
        self.constant += np.array(fractions) * work
        self.state += np.array(fractions) * state

    def add(self, rank: int, item: Item) -> None:
        """Adds an item that one rank owns."""
        self.constant[rank] += item.constant
        self.state[rank] += item.state
        for step, refresh in item.due:
            self.refresh[rank, step] += refresh


SLACK = 1.08
"""Factor by which a rank may work more than the least possible, over an interval or at a step of it, if that evens out
memory."""


def assign(items: Sequence[Item], loads: Loads) -> list[int]:
    """The owner of each item: longest processing time first (Graham 1969), in two measures, step by step.

    Items that are due at the same steps are assigned together, those with the largest items first; items that are never
    due come last, if they are not larger than all others. Among them items go, largest first, to the rank whose larger
    share (of all work, of all bytes) is the smallest, ties to the lower rank; but to none that then works more than
    SLACK times the larger of the mean work and the largest item, or refreshes at these steps more than SLACK times the
    mean and more than if refreshes were all that counts. Where all would, the rank takes the item that refreshes least
    among those that do not work more, and where all do, the rank with the least work. So no rank is given more work
    than the mean and the largest item together, or SLACK times the larger of both. loads: what ranks carry already,
    updated in place.
    """
    work = [item.work(loads.interval) for item in items]
    totals = math.fsum([*work, *loads.work]) or 1.0, math.fsum([*(i.state for i in items), *loads.state]) or 1.0
    shares = [(w / totals[0], item.state / totals[1]) for w, item in zip(work, items, strict=True)]
    limit = SLACK * max(totals[0] / loads.ranks, *work, 0.0)
    queue = _Queue(loads, totals, limit)
    owners = [0] * len(items)
    for steps, members in _together(items, shares):
        refreshes = [max((refresh for _, refresh in items[index].due), default=0.0) for index in members]
        queue.enter(steps, refreshes)
        for index, refresh in zip(members, refreshes, strict=True):
            owners[index] = queue.place(items[index], work[index], refresh)
    return owners


def _together(
    items: Sequence[Item], shares: Sequence[tuple[float, float]]
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """(steps, items that are due at these steps), in the order in which they are assigned."""
    order = sorted(range(len(items)), key=lambda item: (-max(shares[item]), -sum(shares[item]), item))
    found: dict[tuple[int, ...], list[int]] = {}
    for index in order:
        found.setdefault(tuple(step for step, _ in items[index].due), []).append(index)
    never = found.pop((), [])
    largest = max((max(shares[members[0]]) for members in found.values()), default=0.0)
    large = sum(max(shares[index]) > largest for index in never)
    yield (), never[:large]
    yield from found.items()  # in the order of the largest item of each
    yield (), never[large:]


class _Queue:
    """Ranks in the order in which they are asked to take the next item: a heap of (what counts, rank).

    stage: how much a rank may have after it takes the item: 0, no more work and refreshes than the limits; 1, no more
        work than the limit; 2, anything.
    """

    def __init__(self, loads: Loads, totals: tuple[float, float], limit: float) -> None:
        self.loads, self.totals, self.limit = loads, totals, limit
        self.work, self.state = loads.work.tolist(), loads.state.tolist()
        self.enter((), ())

    def enter(self, steps: tuple[int, ...], refreshes: Sequence[float]) -> None:
        """Goes on to items that are due at these steps."""
        self.refresh: list[float] = [0.0] * self.loads.ranks
        self.refresh_limit = math.inf
        if steps:
            self.refresh = self.loads.refresh[:, list(steps)].max(1).tolist()
            even = (sum(self.refresh) + sum(refreshes)) / self.loads.ranks
            self.refresh_limit = max(SLACK * even, _longest_first(self.refresh, refreshes)) * (1 + 1e-12)
        self._restart(math.inf, math.inf)

    def _restart(self, work: float, refresh: float) -> None:
        """Asks all ranks again: what was too large for a rank may have left room for less."""
        self.last, self.stage = (work, refresh), 0
        self.heap = self._ranks()

    def place(self, item: Item, work: float, refresh: float) -> int:
        """The owner of an item, whose loads grow by it."""
        if work < self.last[0] or refresh < self.last[1]:
            self._restart(work, refresh)
        self.last = work, refresh
        while not self._next_fits(work, refresh):
            self.stage += 1
            self.heap = self._ranks()
        rank: int = self.heap[0][-1]
        self.loads.add(rank, item)
        self.work[rank] += work
        self.state[rank] += item.state
        self.refresh[rank] += refresh
        heapq.heapreplace(self.heap, self._entry(rank))
        return rank

    def _next_fits(self, work: float, refresh: float) -> bool:
        """Whether some rank may take the item; ranks that may not leave the heap."""
        while self.heap and self.stage < 2:
            rank = self.heap[0][-1]
            if self.work[rank] + work <= self.limit and (
                self.stage == 1 or self.refresh[rank] + refresh <= self.refresh_limit
            ):
                return True
            heapq.heappop(self.heap)
        return bool(self.heap)

    def _ranks(self) -> list[tuple[float, float, int]]:
        heap = [self._entry(rank) for rank in range(self.loads.ranks)]
        heapq.heapify(heap)
        return heap

    def _entry(self, rank: int) -> tuple[float, float, int]:
        work, state = self.work[rank] / self.totals[0], self.state[rank] / self.totals[1]
        if self.stage == 0:
            return max(work, state), work + state, rank
        return (self.refresh[rank], work, rank) if self.stage == 1 else (work, state, rank)


def _longest_first(before: Sequence[float], refreshes: Sequence[float]) -> float:
    """The most that a rank that takes any of the refreshes has, if each goes to the rank that has least."""
    heap, most = list(before), 0.0
    heapq.heapify(heap)
    for refresh in sorted(refreshes, reverse=True):
        most = max(most, heap[0] + refresh)
        heapq.heapreplace(heap, heap[0] + refresh)
    return most
