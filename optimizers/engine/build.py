"""From parameters to stacks: equal blocks of one rank as tensors, with their phases and seeds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from eigengraft.distributed.comm_plan import BlockGroup
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.stacks import Stack, blocks_that_fit

from ..recipe.recipe import Recipe
from ..recipe.slot_keys import require_slots
from ..sharding.phases import Phases
from ..sharding.placement import ParamSpec
from .block_groups import divide
from .equal_blocks import BlockKind, EqualBlocks, blocks_in_place, cut_blocks, equal_blocks, stack_length
from .stack_state import StackState


def build(
    specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, rank_group: RankGroup | None = None
) -> tuple[list[StackState], list[BlockGroup]]:
    """The stacks that this rank computes, and the block groups that are exchanged (none without a rank group)."""
    if rank_group is None:
        found = equal_blocks(cut_blocks(specs, recipe, range(len(specs))), specs, phases)
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
    in_place = equal_blocks(blocks_in_place(specs, rank), specs, phases)
    return [*stack_states, *_stack_states(in_place, specs, recipe, recipe.distribution.message)], block_groups


def _stack_states(
    lists: Iterable[EqualBlocks], specs: Sequence[ParamSpec], recipe: Recipe, limit: int | None = None
) -> list[StackState]:
    """Stacks of blocks that are all on this rank; limit: their bytes, if several blocks are in one."""
    found = []
    for blocks in lists:
        most = stack_length(blocks.kind, recipe)
        if limit is not None:
            most = min(most, blocks_that_fit(limit, math.prod(blocks.kind.shape), blocks.kind.dtype))
        found += [_stack_state(some, specs, recipe) for some in blocks.split(most, recipe)]
    return found


def _stack_state(blocks: EqualBlocks, specs: Sequence[ParamSpec], recipe: Recipe) -> StackState:
    """One stack with its state."""
    path, shape, dtype, device = blocks.kind
    stack = Stack(shape, dtype, device, tuple(blocks.grids))
    owners = zip(stack.param_ids.tolist(), stack.keys, strict=True)
    seeds = np.array([_seed(specs[position].name, key) for position, key in owners], dtype=np.int64)
    state = StackState(path, recipe.updates()[path], stack, recipe.storage, blocks.phases, seeds)
    if recipe.lr_scale is not None:
        factors = [specs[position].lr_factors[own] for position, grid in stack.grids for own in grid.matrices]
        state.lr_factors = torch.tensor(factors, dtype=dtype, device=device)
    return state


def _seed(name: str, key: int) -> int:
    """A number made of a parameter's name and a block's key."""
    digest = hashlib.blake2b(f"{name}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
