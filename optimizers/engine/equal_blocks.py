"""Equal blocks of parameters, in one order whatever the number of ranks: stacks and block groups are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eigengraft.blocking.block_grid import BlockGrid
from eigengraft.blocking.stacks import max_blocks, split_ranges
from eigengraft.numerics import compute_dtype

from ..recipe.recipe import Recipe, slot_keys
from ..sharding.phases import Phases
from ..sharding.placement import ParamSpec


class BlockKind(NamedTuple):
    """What equal blocks have in common: the path of their update, shape, dtype to compute in, device."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class EqualBlocks:
    """N blocks of one kind, those that are due together next to each other.

    grids: blocks of one parameter, with the position of the parameter.
    phases: `[N]` in [0, 1), where in a refresh interval each block is due.
    """

    kind: BlockKind
    grids: Sequence[tuple[int, BlockGrid]]
    phases: NDArray[np.float64]

    @property
    def positions(self) -> set[int]:
        """Positions of the parameters that the blocks are of."""
        return {position for position, _ in self.grids}

    def single(self) -> list[tuple[int, BlockGrid]]:
        """Every block as a grid of its own."""
        return [(position, grid.block(index)) for position, grid in self.grids for index in range(len(grid.keys))]

    def split(self, most: int, recipe: Recipe) -> Iterator[EqualBlocks]:
        """Lists of at most `most` blocks; blocks of a parameter that a stage takes sums over stay in one list."""
        together = recipe.updates()[self.kind.path].spans()
        ranges = split_ranges([position for position, grid in self.grids for _ in grid.keys], most, together)
        if len(ranges) == 1:
            yield self
            return
        blocks = self.single()
        for start, stop in ranges:
            yield EqualBlocks(self.kind, blocks[start:stop], self.phases[start:stop])


def cut_blocks(
    specs: Sequence[ParamSpec], recipe: Recipe, positions: Iterable[int]
) -> Iterator[tuple[BlockKind, int, BlockGrid]]:
    """(kind, position, grid) of the blocks of some parameters, but of those that every rank updates in place."""
    for position in positions:
        spec = specs[position]
        if spec.in_place:
            continue
        for grid in recipe.updates()[spec.path].blocking.grids(spec.shape, spec.matrices):
            yield BlockKind(spec.path, grid.shape, compute_dtype(spec.dtype), spec.device), position, grid


def blocks_in_place(specs: Sequence[ParamSpec], rank: int) -> Iterator[tuple[BlockKind, int, BlockGrid]]:
    """(kind, position, grid) of what a rank holds of the parameters that every rank updates in place."""
    for position, spec in enumerate(specs):
        if spec.placement is not None and spec.in_place:
            box = spec.placement.updated.boxes[rank]
            if box.numel:
                kind = BlockKind(spec.path, box.shape, compute_dtype(spec.dtype), spec.device)
                yield kind, position, BlockGrid.single(box.shape)


def equal_blocks(
    cut: Iterable[tuple[BlockKind, int, BlockGrid]], specs: Sequence[ParamSpec], phases: Phases
) -> list[EqualBlocks]:
    """Blocks by kind, in the order in which kinds are met, by phase within each."""
    found: dict[BlockKind, list[tuple[int, BlockGrid]]] = {}
    for kind, position, grid in cut:
        found.setdefault(kind, []).append((position, grid))

    lists = []
    for kind, grids in found.items():
        due = [(phases[specs[position].key][list(grid.keys)], (position, grid)) for position, grid in grids]
        due.sort(key=lambda item: float(item[0][0]))
        own, ordered = zip(*due, strict=True)
        lists.append(EqualBlocks(kind, ordered, np.concatenate(own)))
    return lists


def connected(sets: Sequence[Set[int]]) -> list[list[int]]:
    """Numbers of the sets in lists, those together that share a member with one another, in order of the first."""
    found: list[tuple[set[int], list[int]]] = []
    for index, members in enumerate(sets):
        joined = [own for own in found if own[0] & members]
        merged = set(members).union(*(own for own, _ in joined))
        numbers = sorted([index, *(number for _, numbers in joined for number in numbers)])
        found = [*(own for own in found if not own[0] & members), (merged, numbers)]
    return sorted(numbers for _, numbers in found)


def stack_length(kind: BlockKind, recipe: Recipe) -> int:
    """The largest number of blocks in one stack."""
    slots = slot_keys(recipe.updates()[kind.path], kind.path, kind.shape).values()
    return max_blocks(max([math.prod(kind.shape), *(math.prod(slot.shape) for slot in slots)]), kind.dtype, kind.device)
