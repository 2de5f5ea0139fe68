"""Bytes and messages of one step of a divided optimizer, computed for all ranks without running any.

Legend: R ranks; o, r: one of the ranks; c[r]: entries of a block that rank r holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from eigengraft.blocking.blocks import Piece
from eigengraft.distributed.comm_plan import BlockGroup
from eigengraft.distributed.layouts import Counts, Layout, holding
from eigengraft.distributed.rank_group import pads

AxisNumbers = tuple[int, ...]
Place = tuple[AxisNumbers, AxisNumbers, tuple[Piece, ...]]
"""Where a block lies: shape of its parameter, merged shape, and pieces of the block."""


@dataclass
class Traffic:
    """Messages of some collectives. All but `ranks` are `[R]`.

    ranks: number of ranks.
    sent: bytes to other ranks.
    received: bytes from other ranks.
    messages: number of other ranks that a rank sends to, summed over collectives.
    buffers: bytes that collectives read and write, messages of a rank to itself included.
    """

    ranks: int
    sent: Counts = field(init=False)
    received: Counts = field(init=False)
    messages: Counts = field(init=False)
    buffers: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.sent, self.received, self.messages, self.buffers = np.zeros((4, self.ranks), dtype=np.int64)

    def add_all_to_all(self, out: Counts, into: Counts, itself: Counts, receivers: Counts) -> None:
        """Adds an all-to-all.

        out: bytes that each rank sends, to itself too.
        into: bytes that each rank receives, from itself too.
        itself: bytes that each rank sends to itself.
        receivers: number of other ranks that each rank sends to.
        """
        self.sent += out - itself
        self.received += into - itself
        self.messages += receivers
        self.buffers += out + into

    def add_all_gather(self, each: int) -> None:
        """Adds an all-gather of `each` bytes from every rank."""
        others = self.ranks - 1
        self.sent += others * each
        self.received += others * each
        self.messages += others if each else 0
        self.buffers += (1 + self.ranks) * each

    def add_all_gather_uneven(self, lengths: Counts) -> None:
        """Adds an all-gather of `lengths[r]` bytes from each rank r, padded or as broadcasts."""
        if pads(lengths.tolist()):
            self.add_all_gather(int(lengths.max()))
            return
        self.sent += (self.ranks - 1) * lengths
        self.received += lengths.sum() - lengths
        self.messages += (self.ranks - 1) * (lengths > 0)
        self.buffers += lengths + lengths.sum()


def together(first: Traffic, second: Traffic) -> Traffic:
    """The messages of both."""
    found = Traffic(first.ranks)
    for name in ("sent", "received", "messages", "buffers"):
        setattr(found, name, getattr(first, name) + getattr(second, name))
    return found


def repeated(one: Traffic, times: int) -> Traffic:
    """The messages of as many groups of ranks, each of which sends what one does."""
    found = Traffic(one.ranks * times)
    for name in ("sent", "received", "messages", "buffers"):
        setattr(found, name, np.tile(getattr(one, name), times))
    return found


def all_reduced(vectors: Sequence[int], ranks: int) -> Traffic:
    """All-reduces of float64 vectors of these lengths in a ring: a rank sends 2 (R - 1) / R of each to a neighbour."""
    found = Traffic(ranks)
    for numbers in vectors if ranks > 1 else ():
        each = -(-2 * (ranks - 1) * 8 * numbers // ranks)
        found.sent += each
        found.received += each
        found.messages += 1
        found.buffers += 8 * numbers
    return found


def wire(
    block_groups: Sequence[BlockGroup], rounds: Sequence[Sequence[int]], layouts: Sequence[Layout], times: int
) -> tuple[Traffic, Traffic]:
    """(to owners, from owners) of one step.

    block_groups: the blocks that are exchanged.
    rounds: numbers of the block groups that are sent together.
    layouts: layout of each parameter, by position, all over the same ranks.
    times: how often tensors are sent to owners: once for gradients, once more if a stage needs parameters.
    """
    ranks = len(layouts[0].boxes)
    there, back = Traffic(ranks), Traffic(ranks)
    holdings: dict[Place, Counts] = {}
    for groups in rounds:
        own = [block_groups[index] for index in groups]
        if layouts[0].replicated:
            back.add_all_gather_uneven(_lengths(own, ranks))
        else:
            _exchange(own, layouts, holdings, (there, back), times)
    return there, back


def _lengths(block_groups: Sequence[BlockGroup], ranks: int) -> Counts:
    """`[R]`, bytes of the updates that each rank computes."""
    total = np.zeros(ranks, dtype=np.int64)
    for block_group in block_groups:
        each = block_group.nbytes // max(len(block_group.blocks), 1)
        total += each * np.bincount([block.owner for block in block_group.blocks], minlength=ranks)
    return total


def _exchange(
    block_groups: Sequence[BlockGroup],
    layouts: Sequence[Layout],
    holdings: dict[Place, Counts],
    traffic: tuple[Traffic, Traffic],
    times: int,
) -> None:
    """Adds one round: owner o receives a block from the ranks of its own replica and sends it to all holders."""
    ranks, replicas = len(layouts[0].boxes), np.array(layouts[0].replicas)
    there, back = traffic
    meets = np.zeros((ranks, ranks), dtype=np.bool_)  # [o, r]: rank r holds something of what o owns
    sums = np.zeros((5, ranks), dtype=np.int64)
    for block_group in block_groups:
        itemsize = block_group.gradient_dtype.itemsize, block_group.update_dtype.itemsize
        for held, owned in _alike(block_group, layouts, holdings):
            in_replica = np.bincount(replicas, weights=owned).astype(np.int64)[replicas]
            meets[np.flatnonzero(owned)] |= held > 0
            numel = block_group.nbytes // (len(block_group.blocks) * itemsize[1])
            sums[:2] += itemsize[0] * np.stack([held * in_replica, numel * owned])
            sums[2:4] += itemsize[1] * np.stack([held.sum() * owned, held * owned.sum()])
            sums[4] += held * owned
    np.fill_diagonal(meets, False)
    widths = block_groups[0].gradient_dtype.itemsize, block_groups[0].update_dtype.itemsize
    same = replicas[:, None] == replicas
    for _ in range(times):
        there.add_all_to_all(sums[0], sums[1], sums[4] * widths[0], (meets & same).sum(0))
    back.add_all_to_all(sums[2], sums[3], sums[4] * widths[1], meets.sum(1))


def _alike(
    block_group: BlockGroup, layouts: Sequence[Layout], holdings: dict[Place, Counts]
) -> Iterator[tuple[Counts, Counts]]:
    """(c, number that each rank owns), `[R]` each, of blocks at one place of parameters of one shape."""
    owners: dict[Place, list[int]] = {}
    for block in block_group.blocks:
        grid, shape = block.grid, layouts[block.position].shape
        place = (shape, grid.merged, grid.pieces)
        if place not in holdings:
            holdings[place] = holding(layouts[block.position], grid)
        owners.setdefault(place, []).append(block.owner)
    for where, own in owners.items():
        yield holdings[where], np.bincount(own, minlength=len(holdings[where])).astype(np.int64)
