"""Choice of the owner of each block, so that all ranks have equal work in every step and hold equally many bytes.

The owner of a block is the rank that holds its state and computes its update. Every rank computes all owners without a
message: the owners are a pure function of costs, refresh steps and the number of ranks. No number that an optimizer
computes depends on the choice of owners.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Held = Mapping[int, int]
"""For one item: number of its entries that each rank already holds. A rank that is no key holds none of them."""


class Item(NamedTuple):
    """The cost of one block for its owner, or of several blocks that must have the same owner.

    Work is in any unit that all items share, such as floating-point operations or milliseconds.

    constant: work of every step.
    state: bytes of state.
    due: pairs (step of the refresh interval, counted from 0; work of the refresh at that step), in the order of the
        steps.
    """

    constant: float
    state: float
    due: tuple[tuple[int, float], ...] = ()

    def work(self, interval: int) -> float:
        """Return the mean work of a step: the constant work, plus the work of all refreshes of a refresh interval
        divided by the length of the interval.

        interval: number of steps after which the same refreshes are due again.
        """
        return self.constant + sum(refresh for _, refresh in self.due) / interval


@dataclass
class Loads:
    """The work and the bytes of state of each of R ranks. Work is in the unit of the items (`Item`).

    ranks: number R of ranks.
    interval: refresh interval T: the same refreshes are due again after T steps.
    constant: `[R]`, work of every step.
    refresh: `[R, T]`, work of the refreshes that are due at each step of an interval.
    state: `[R]`, bytes of state.
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
        """Return the mean work of a step for each rank, `[R]`, in the unit of `constant`."""
        work: NDArray[np.float64] = self.constant + self.refresh.sum(1) / self.interval
        return work

    @property
    def critical_path(self) -> float:
        """Return the length of the critical path of a refresh interval, in the unit of `constant`.

        In each step all ranks wait for the busiest one. The critical path is therefore the work of the busiest rank at
        each step, summed over the steps of the interval.
        """
        return float((self.constant[:, None] + self.refresh).max(0).sum())

    def divide(self, fractions: Sequence[float], work: float, state: float) -> None:
        """Add the cost of a parameter that several ranks update in parts.

        fractions: `[R]`, the fraction of the parameter that each rank updates.
        work: work of a step for the whole parameter, in the unit of the field `constant`.
        state: bytes of state of the whole parameter.
        """
        self.constant += np.array(fractions) * work
        self.state += np.array(fractions) * state

    def add(self, item: Item, counts: NDArray[np.int64]) -> None:
        """Add the work and the state of several equal items.

        item: the cost of each of these items.
        counts: `[R]`, the number of these items that each rank owns.
        """
        self.constant += counts * item.constant
        self.state += counts * item.state
        for step, refresh in item.due:
            self.refresh[:, step] += counts * refresh


@dataclass(frozen=True)
class Balance:
    """How evenly work is divided over ranks.

    critical_path: work of the busiest rank at each step, summed over the steps of a refresh interval. All ranks wait
        for the busiest rank in each step.
    least: lower bound of the critical path over all choices of owners and of refresh steps, in the same unit.
    """

    critical_path: float
    least: float

    @property
    def efficiency(self) -> float:
        """The lower bound `least` divided by the critical path. It is 1 if no choice of owners can be faster."""
        return self.least / self.critical_path if self.critical_path else 1.0


SLACK = 1.02
"""Work, in units of the mean work of all ranks, above which a rank receives no further items.

A larger value divides memory more evenly and work less evenly. 1.02 is a compromise. With 1.00, memory is divided up to
1.4 times less evenly if one item has much state and little work. With 1.08, ranks wait 0.1 % longer in the mean."""


def assign(items: Sequence[Item], loads: Loads, held: Sequence[Held] = ()) -> list[int]:
    """Return the owner of each item, and add the items to the loads.

    The algorithm is the longest processing time first (Graham 1969). It balances several quantities together, the work
    at each step of the interval and the bytes:

    1. Equal items are assigned together. Items with the largest share come first. The share of an item is its fraction
       of all work plus its fraction of all bytes. Items of equal share keep their order.
    2. An item and a rank are vectors of the same kind: work at each step of the interval, in units of the mean work of
       a rank, and bytes, in units of the mean bytes of a rank. An item goes to the rank whose vector has the smallest
       scalar product with the item's; ties go to the lower rank. So a refresh goes to a rank that is idle at its
       step, and an item without work goes to the rank with the fewest bytes.
    3. A rank whose work over the interval exceeds SLACK times the mean gets no more items.
    4. Ranks are exchanged among equal items, which changes no load: each item goes to a rank that already holds many
       of its entries, so that fewer entries are sent.

    Guarantee: the work of a rank is at most SLACK times the mean plus the work of the largest item, unless the rank had
    more work before. If all items are multiples of one vector, the largest load of a rank is at most 4/3 - 1/(3R) times
    the least possible one for R ranks (Graham).
    Cost: O(N log R) for N items, and O(R) for each kind of equal items and each of its refreshes.

    items: costs of blocks.
    loads: loads of the ranks before these items; updated.
    held: for each item, the number of its entries that each rank already holds. (): step 4 is left out.
    """
    kinds: dict[Item, list[int]] = {}
    for index, item in enumerate(items):
        kinds.setdefault(item, []).append(index)
    work = math.fsum([*(kind.work(loads.interval) * len(own) for kind, own in kinds.items()), *loads.work]) or 1.0
    state = math.fsum([*(kind.state * len(own) for kind, own in kinds.items()), *loads.state]) or 1.0
    owners = [0] * len(items)
    for kind in sorted(kinds, key=lambda kind: -(kind.work(loads.interval) / work + kind.state / state)):
        own = kinds[kind]
        ranks = _deal(kind, len(own), loads, (work / loads.ranks, state / loads.ranks))
        loads.add(kind, np.bincount(ranks, minlength=loads.ranks))
        for index, rank in zip(own, _exchange(ranks, [held[index] for index in own]) if held else ranks, strict=True):
            owners[index] = rank
    return owners


def _deal(item: Item, count: int, loads: Loads, means: tuple[float, float]) -> list[int]:
    """Return the rank to which each of `count` equal items is assigned. The items are assigned one after the other.

    These are steps 2 and 3 of `assign`, in which the work and the bytes of an item, and of a rank, are the entries of a
    vector. All items have the same vector v. An item goes to the rank whose vector has the smallest scalar product with
    v. The products are computed once. Each item adds v to the vector of its rank, so the rank's product grows by v . v.

    item: the cost of each of the items.
    loads: loads of the ranks before these items; not changed.
    means: mean work and mean bytes of a rank, which are the units of the vectors.
    """
    own, work, before = item.work(loads.interval), means[0], loads.work
    alike, bytes_alike = item.constant * before, item.state * loads.state / means[1] ** 2  # [R]
    square, bytes_square = item.constant * own, item.state**2 / means[1] ** 2
    for step, refresh in item.due:
        alike = alike + refresh / loads.interval * (loads.constant + loads.refresh[:, step])
        square += refresh / loads.interval * (item.constant + refresh)
    products, square = (alike / work**2 + bytes_alike).tolist(), square / work**2 + bytes_square
    loaded, limit = before.tolist(), SLACK * work
    heap = [(product, rank) for rank, product in enumerate(products) if loaded[rank] <= limit]
    heapq.heapify(heap)
    found = []
    for _ in range(count):
        product, rank = heap[0]
        found.append(rank)
        loaded[rank] += own
        if loaded[rank] <= limit:
            heapq.heapreplace(heap, (product + square, rank))
        else:
            heapq.heappop(heap)
    return found


def _exchange(ranks: Sequence[int], held: Sequence[Held]) -> list[int]:
    """Exchange ranks among equal items, and return the new rank of each item: step 4 of `assign`.

    Each rank gets as many items as it had. Pairs of an item and a rank are processed in descending order of the number
    of the item's entries that the rank holds. Among equal numbers, the pair of an item with its present rank comes
    first, then the earlier item, then the lower rank. A pair is accepted if the item has no new rank yet and the rank
    has fewer items than before. An item of which no rank holds entries keeps its rank.

    ranks: rank of each item before the exchange.
    held: for each item, the number of its entries that each rank holds.
    """
    found, lacking, free = list(ranks), [0] * (max(ranks) + 1), {index for index, own in enumerate(held) if own}
    for index in free:
        lacking[ranks[index]] += 1
    pairs = [(-n, rank != ranks[index], index, rank) for index in free for rank, n in held[index].items()]
    pairs += [(0, False, index, ranks[index]) for index in free]
    for _, _, index, rank in sorted(pairs):
        if index in free and rank < len(lacking) and lacking[rank]:
            free.remove(index)
            lacking[rank] -= 1
            found[index] = rank
    rest = [rank for rank, count in enumerate(lacking) for _ in range(count)]
    for index, rank in zip(sorted(free), rest, strict=True):
        found[index] = rank
    return found


def least_work(work: Sequence[float], carried: NDArray[np.float64]) -> float:
    """Return a lower bound of the work of the busiest rank, however items are assigned.

    It is the largest of three bounds for R ranks:

    1. The mean work of all ranks.
    2. The largest work that a rank has before any item is assigned.
    3. The sum of the k + 1 smallest of the k R + 1 largest items, for the k with the largest sum. One of the R ranks
       gets at least k + 1 of these k R + 1 items.

    work: work of each item, in any unit.
    carried: `[R]`, work of each rank before any item is assigned, in the same unit.
    """
    ranks, sizes = len(carried), np.sort([0.0, *work])[::-1]
    before = np.concatenate([[0.0], np.cumsum(sizes)])
    k = np.arange((len(sizes) - 1) // ranks + 1)
    mean = (carried.sum() + before[-1]) / ranks
    return float(max(mean, carried.max(), (before[k * ranks + 1] - before[k * ranks - k]).max()))
