"""From parameters to stacks: cut into blocks, collect equal blocks, spread their refreshes, place them on owners.

A stack holds equal blocks of one rank, a block group those of all ranks. Both are made of the same lists, so that no
number depends on how many ranks there are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eigengraft.blocking import BlockGrid
from eigengraft.distributed.comm_plan import BlockGroup, PlacedBlock
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.numerics import compute_dtype
from eigengraft.stacks import Stack, blocks_that_fit, max_blocks, split_ranges

from ..recipe.recipe import Recipe
from ..recipe.slot_keys import require_slots, slot_keys
from ..sharding.phases import Phases
from ..sharding.placement import ParamSpec
from .stack_state import StackState


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


def build(
    specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, rank_group: RankGroup | None = None
) -> tuple[list[StackState], list[BlockGroup]]:
    """The stacks that this rank computes, and the block groups that are exchanged (none without a rank group)."""
    if rank_group is None:
        found = _equal_blocks(_cut(specs, recipe), specs, phases)
        require_slots(recipe, [(blocks.kind.path, blocks.kind.shape) for blocks in found])
        return _stack_states(found, specs, recipe), []
    rank, stack_states, block_groups = rank_group.rank, list[StackState](), list[BlockGroup]()
    for group, due in divide(specs, recipe, phases, rank_group.size):
        owned = np.array([block.owner == rank for block in group.blocks])
        if owned.any():
            kind = BlockKind(group.path, group.shape, group.dtype, group.device)
            grids = [(block.position, block.grid) for block in group.owned(rank)]
            stack_states.append(_stack_state(EqualBlocks(kind, grids, due[owned]), specs, recipe))
            stack_states[-1].block_group = len(block_groups)
        block_groups.append(group)
    require_slots(recipe, [(group.path, group.shape) for group in block_groups])
    in_place = _equal_blocks(_in_place(specs, rank), specs, phases)
    return [*stack_states, *_stack_states(in_place, specs, recipe)], block_groups


def divide(
    specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, ranks: int
) -> Iterator[tuple[BlockGroup, NDArray[np.float64]]]:
    """The block groups with the owner of each block, and the phases `[N]` of their blocks.

    No block group is larger than a bucket of messages or than one stack on every rank, if its blocks may be parted.
    """
    for blocks in _equal_blocks(_cut(specs, recipe), specs, phases):
        fit = blocks_that_fit(bucket_bytes(recipe, ranks), math.prod(blocks.kind.shape), blocks.kind.dtype)
        for some in blocks.split(min(fit, ranks * _stack_length(blocks.kind, recipe)), recipe):
            yield _place(some, specs, recipe, ranks), some.phases


def bucket_bytes(recipe: Recipe, ranks: int) -> int:
    """Bytes of updates that all ranks together put into one round of messages."""
    return recipe.distribution.bucket * ranks


def _cut(specs: Sequence[ParamSpec], recipe: Recipe) -> Iterator[tuple[BlockKind, int, BlockGrid]]:
    """(kind, position, grid) of the blocks of all parameters, but of those that every rank updates in place."""
    for position, spec in enumerate(specs):
        if spec.placement is not None and spec.placement.owners is None:
            continue
        grids = list(recipe.updates()[spec.path].blocking.grids(spec.shape))
        _require_one_stack(spec, recipe, grids)
        for grid in grids:
            yield BlockKind(spec.path, grid.tile, compute_dtype(spec.dtype), spec.device), position, grid


def _in_place(specs: Sequence[ParamSpec], rank: int) -> Iterator[tuple[BlockKind, int, BlockGrid]]:
    """(kind, position, grid) of what a rank holds of the parameters that every rank updates in place."""
    for position, spec in enumerate(specs):
        if spec.placement is not None and spec.placement.owners is None:
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
                f"{', '.join(str(grid.tile) for grid in grids)} of a parameter of shape {spec.shape}; choose a "
                "`blocking.size` that divides its axes, no splitting, or `per: block`"
            )


def _equal_blocks(
    cut: Iterable[tuple[BlockKind, int, BlockGrid]], specs: Sequence[ParamSpec], phases: Phases
) -> list[EqualBlocks]:
    """Blocks by kind, in the order in which kinds are met, by phase within each."""
    found: dict[BlockKind, list[tuple[int, BlockGrid]]] = {}
    for kind, position, grid in cut:
        found.setdefault(kind, []).append((position, grid))

    lists = []
    for kind, grids in found.items():
        due = {position: phases[specs[position].key][list(grid.keys)] for position, grid in grids}
        grids.sort(key=lambda item: float(due[item[0]][0]))
        lists.append(EqualBlocks(kind, grids, np.concatenate([due[position] for position, _ in grids])))
    return lists


def _stack_length(kind: BlockKind, recipe: Recipe) -> int:
    """The largest number of blocks in one stack."""
    slots = slot_keys(recipe.updates()[kind.path], kind.path, kind.shape).values()
    return max_blocks(max([math.prod(kind.shape), *(math.prod(slot.shape) for slot in slots)]), kind.dtype, kind.device)


def _stack_states(lists: Iterable[EqualBlocks], specs: Sequence[ParamSpec], recipe: Recipe) -> list[StackState]:
    """Stacks of blocks that are all on this rank."""
    split = [some for blocks in lists for some in blocks.split(_stack_length(blocks.kind, recipe), recipe)]
    return [_stack_state(some, specs, recipe) for some in split]


def _stack_state(blocks: EqualBlocks, specs: Sequence[ParamSpec], recipe: Recipe) -> StackState:
    """One stack with its state."""
    path, shape, dtype, device = blocks.kind
    stack = Stack(shape, dtype, device, tuple(blocks.grids))
    owners = zip(stack.param_ids.tolist(), stack.keys, strict=True)
    seeds = np.array([_seed(specs[position].name, key) for position, key in owners], dtype=np.int64)
    return StackState(path, recipe.updates()[path], stack, recipe.storage, blocks.phases, seeds)


def _place(blocks: EqualBlocks, specs: Sequence[ParamSpec], recipe: Recipe, ranks: int) -> BlockGroup:
    """The block group of equal blocks: the owner of each, and its row in the owner's stack."""
    path, shape, dtype, device = blocks.kind
    rows = [0] * ranks
    placed = []
    for position, grid in blocks.single():
        placement = specs[position].placement
        assert placement is not None and placement.owners is not None
        owner = placement.owners[grid.keys[0]]
        placed.append(PlacedBlock(position, grid, owner, rows[owner]))
        rows[owner] += 1
    dtypes = {specs[block.position].dtype for block in placed}
    gradient = dtypes.pop() if len(dtypes) == 1 and not recipe.decays_in_gradient() else dtype
    sent = (torch.bfloat16, torch.bfloat16) if recipe.distribution.dtype == "bf16" else (gradient, dtype)
    return BlockGroup(path, shape, dtype, *sent, device, tuple(placed))


def _seed(name: str, key: int) -> int:
    """A number made of a parameter's name and a block's key."""
    digest = hashlib.blake2b(f"{name}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
