"""Owners near their blocks: among blocks that cost the same, each goes to a rank that holds much of it already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from eigengraft.blocking.block_grid import BlockGrid
from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.ownership import Item
from eigengraft.distributed.regions import holding

Held = Mapping[int, int]
"""Number of entries of a block that ranks hold, by rank; ranks that hold few are left out."""

LEAST_SHARE = 16
"""A rank that holds less than one entry in so many of a block is not looked at: little would be saved."""


def exchange_owners(items: Sequence[Item], owners: Sequence[int], held: Sequence[Held]) -> list[int]:
    """The owners of items, exchanged among items of equal cost; every rank carries what it carried, at every step.

    Pairs of an item and a rank are taken in the order of what the rank holds of the item, most first, ties to the owner
    (neighbours have different ones, so that ranks compute at the same time), the earlier item and the lower rank; an
    item goes to the rank if that owned one more of equal cost. held: of each item.
    """
    found = list(owners)
    alike: dict[Item, list[int]] = {}
    for index, cost in enumerate(items):
        if held[index]:
            alike.setdefault(cost, []).append(index)
    for own in alike.values():
        spare: dict[int, int] = {}
        for index in own:
            spare[owners[index]] = spare.get(owners[index], 0) + 1
        free = set(own)
        pairs = [(-count, rank != owners[item], item, rank) for item in own for rank, count in held[item].items()]
        pairs += [(0, False, item, owners[item]) for item in own]
        for _, _, index, rank in sorted(pairs):
            if index in free and spare.get(rank):
                free.remove(index)
                spare[rank] -= 1
                found[index] = rank
        rest = [rank for rank, count in sorted(spare.items()) for _ in range(count)]
        for index, rank in zip(sorted(free), rest, strict=True):
            found[index] = rank
    return found


class Holdings:
    """What ranks hold of blocks, found once for each place in a parameter of one layout."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, BlockGrid], dict[int, Held]] = {}

    def of(self, layout: Layout, grid: BlockGrid, rows: Sequence[int]) -> Held:
        """What ranks hold of some blocks of a grid together; nothing if every rank holds all."""
        if layout.replicated:
            return {}
        known = self._found.setdefault((id(layout), grid), {})
        for row in rows:
            if row not in known:
                known[row] = self._block(layout, grid.block(row))
        found = [known[row] for row in rows]
        if len(found) == 1:
            return found[0]
        ranks = {rank for held in found for rank in held}
        return {rank: sum(held.get(rank, 0) for held in found) for rank in ranks}

    def _block(self, layout: Layout, block: BlockGrid) -> Held:
        counts = holding(layout, block)
        near = np.flatnonzero(counts * LEAST_SHARE >= math.prod(block.shape))
        return {int(rank): int(counts[rank]) for rank in near}
