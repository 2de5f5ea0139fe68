"""Equal blocks of parameters, in one order whatever the number of ranks: stacks and block groups are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eigengraft.blocking.block_grid import BlockGrid
from eigengraft.numerics import compute_dtype
from eigengraft.stacks import max_blocks, split_ranges

from ..recipe.recipe import Recipe
from ..recipe.slot_keys import slot_keys
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

    def single(self) -> list[tuple[int, BlockGrid]]:
        """Every block as a grid of its own."""
        return [(position, grid.block(index)) for position, grid in self.grids for index in range(len(grid.keys))]

    def split(self, most: int, recipe: Recipe) -> Iterator[EqualBlocks]:
        """Lists of at most `most` blocks; blocks of a parameter that a stage takes norms over stay in one list."""
        together = any(stage.spans_parameter() for _, stage in recipe.updates()[self.kind.path].stages())
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
        grids = list(recipe.updates()[spec.path].blocking.grids(spec.shape, spec.matrices))
        _require_one_stack(spec, recipe, grids)
        for grid in grids:
            yield BlockKind(spec.path, grid.shape, compute_dtype(spec.dtype), spec.device), position, grid


def blocks_in_place(specs: Sequence[ParamSpec], rank: int) -> Iterator[tuple[BlockKind, int, BlockGrid]]:
    """(kind, position, grid) of what a rank holds of the parameters that every rank updates in place."""
    for position, spec in enumerate(specs):
        if spec.placement is not None and spec.in_place:
            box = spec.placement.updated.boxes[rank]
            if box.numel:
                kind = BlockKind(spec.path, box.shape, compute_dtype(spec.dtype), spec.device)
                yield kind, position, BlockGrid.single(box.shape)


def _require_one_stack(spec: ParamSpec, recipe: Recipe, grids: Sequence[BlockGrid]) -> None:
    """Raises ValueError for blocks of several shapes under a stage that takes norms over parameters."""
    for stage_path, stage in recipe.updates()[spec.path].stages(spec.path):
        if len(grids) > 1 and stage.spans_parameter():
            raise ValueError(
                f"{stage_path}: takes norms over whole parameters, so their blocks must be equal, got blocks "
                f"{', '.join(str(grid.shape) for grid in grids)} of a parameter of shape {spec.shape}; choose a "
                "`blocking.size` that divides its axes, no splitting, or `per: block`"
            )


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


def stack_length(kind: BlockKind, recipe: Recipe) -> int:
    """The largest number of blocks in one stack."""
    slots = slot_keys(recipe.updates()[kind.path], kind.path, kind.shape).values()
    return max_blocks(max([math.prod(kind.shape), *(math.prod(slot.shape) for slot in slots)]), kind.dtype, kind.device)
