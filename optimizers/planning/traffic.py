"""What a step of a divided optimizer puts on the wire, for every rank at once and without any.

Legend: R ranks; s, o, r: one of them; c[r]: entries of a block that rank r holds a part of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eigengraft.blocking import BlockGrid
from eigengraft.distributed.comm_plan import BlockGroup
from eigengraft.distributed.layouts import Box, Layout
from eigengraft.distributed.regions import regions

Counts = NDArray[np.int64]
Axes = tuple[int, ...]
Place = tuple[Axes, Axes, Axes, Axes]
"""Of a block: the shape of its parameter, that shape merged, the block's start in it and its lengths."""


@dataclass
class Traffic:
    """`[R]` each. sent, received: bytes between a rank and others; messages: to how many others it sends, summed over
    collectives; buffers: bytes of what the collectives read and write, a rank's messages to itself included."""

    ranks: int
    sent: Counts = field(init=False)
    received: Counts = field(init=False)
    messages: Counts = field(init=False)
    buffers: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.sent, self.received, self.messages, self.buffers = np.zeros((4, self.ranks), dtype=np.int64)

    def swap(self, out: Counts, into: Counts, itself: Counts, rank_group: Counts) -> None:
        """Adds an all-to-all: bytes that leave and arrive, those that do not travel, and receivers."""
        self.sent += out - itself
        self.received += into - itself
        self.messages += rank_group
        self.buffers += out + into

    def gather(self, each: int) -> None:
        """Adds an all-gather of so many bytes from each rank."""
        others = self.ranks - 1
        self.sent += others * each
        self.received += others * each
        self.messages += others if each else 0
        self.buffers += (1 + self.ranks) * each


def all_reduced(vectors: Sequence[int], ranks: int) -> Traffic:
    """All-reduces of so many float64 each, in a ring: everybody gives 2 (R - 1) / R of them to one neighbour."""
    found = Traffic(ranks)
    for numbers in vectors if ranks > 1 else ():
        each = -(-2 * (ranks - 1) * 8 * numbers // ranks)
        found.sent += each
        found.received += each
        found.messages += 1
        found.buffers += 8 * numbers
    return found


def wire(
    block_groups: Sequence[BlockGroup], buckets: Sequence[Sequence[int]], layouts: Sequence[Layout], trips: int
) -> tuple[Traffic, Traffic]:
    """(to owners, from owners) of one step. layouts: of the parameters, by position, all over the same ranks.

    trips: how often what ranks hold is sent to owners: once for gradients, and once more if a stage needs parameters.
    """
    ranks = len(layouts[0].boxes)
    there, back = Traffic(ranks), Traffic(ranks)
    holdings: dict[Place, Counts] = {}
    for bucket in buckets:
        own = [block_groups[index] for index in bucket]
        if layouts[0].replicated:
            back.gather(_longest(own, ranks))
        else:
            _exchange(own, layouts, holdings, (there, back), trips)
    return there, back


def _longest(block_groups: Sequence[BlockGroup], ranks: int) -> int:
    """Bytes of the updates of the rank that owns most of them."""
    total = np.zeros(ranks, dtype=np.int64)
    for block_group in block_groups:
        each = block_group.nbytes // max(len(block_group.members), 1)
        total += each * np.bincount([member.owner for member in block_group.members], minlength=ranks)
    return int(total.max())


def _exchange(
    block_groups: Sequence[BlockGroup],
    layouts: Sequence[Layout],
    holdings: dict[Place, Counts],
    traffic: tuple[Traffic, Traffic],
    trips: int,
) -> None:
    """One bucket. Owner o takes a block from the ranks of its own replica and returns it to all who hold a part."""
    ranks, replicas = len(layouts[0].boxes), np.array(layouts[0].replicas)
    there, back = traffic
    meets = np.zeros((ranks, ranks), dtype=np.bool_)  # [o, r]: rank r holds something of what o owns
    sums = np.zeros((5, ranks), dtype=np.int64)
    for block_group in block_groups:
        itemsize = block_group.travels[0].itemsize, block_group.travels[1].itemsize
        for held, owned in _alike(block_group, layouts, holdings):
            in_replica = np.bincount(replicas, weights=owned).astype(np.int64)[replicas]
            meets[np.flatnonzero(owned)] |= held > 0
            numel = block_group.nbytes // (len(block_group.members) * itemsize[1])
            sums[:2] += itemsize[0] * np.stack([held * in_replica, numel * owned])
            sums[2:4] += itemsize[1] * np.stack([held.sum() * owned, held * owned.sum()])
            sums[4] += held * owned
    np.fill_diagonal(meets, False)
    widths = block_groups[0].travels[0].itemsize, block_groups[0].travels[1].itemsize
    same = replicas[:, None] == replicas
    for _ in range(trips):
        there.swap(sums[0], sums[1], sums[4] * widths[0], (meets & same).sum(0))
    back.swap(sums[2], sums[3], sums[4] * widths[1], meets.sum(1))


def _alike(
    block_group: BlockGroup, layouts: Sequence[Layout], holdings: dict[Place, Counts]
) -> Iterator[tuple[Counts, Counts]]:
    """(c, how many each rank owns) `[R]` of blocks that lie at the same place of parameters of the same shape."""
    owners: dict[Place, list[int]] = {}
    for member in block_group.members:
        grid, shape = member.grid, layouts[member.position].shape
        place = (shape, grid.merged, grid.start, grid.tile)
        if place not in holdings:
            holdings[place] = holding(layouts[member.position], grid)
        owners.setdefault(place, []).append(member.owner)
    for where, own in owners.items():
        yield holdings[where], np.bincount(own, minlength=len(holdings[where])).astype(np.int64)


def holding(layout: Layout, block: BlockGrid) -> Counts:
    """`[R]`, how many entries of a block each rank holds."""
    start = np.array([box.start for box in layout.boxes]).reshape(len(layout.boxes), -1)  # [R, axes]
    stop = np.array([box.stop for box in layout.boxes]).reshape(len(layout.boxes), -1)
    found = np.zeros(len(layout.boxes), dtype=np.int64)
    for region in regions(layout.shape, block, Box((0,) * len(layout.shape), layout.shape)):
        common = np.minimum(stop, region.box.stop) - np.maximum(start, region.box.start)
        found += common.clip(min=0).prod(1).astype(np.int64)
    return found
