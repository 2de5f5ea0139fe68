"""From parameters to stacks: blocks of one shape, dtype, device and update together, each on the rank that owns it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking import BlockGrid
from eigengraft.distributed.comm_plan import BlockGroup, CommPlan, PlacedBlock
from eigengraft.distributed.layouts import local
from eigengraft.numerics import compute_dtype
from eigengraft.quantization import Quantizer
from eigengraft.stacks import Stack, fitting

from ..recipe.recipe import Recipe
from ..recipe.slot_keys import slot_keys
from ..sharding.assignment import Assignment
from .block_groups import Grids, Key, block_groups, parts, phased, singly, stack_length
from .stack_state import StackState


def build(
    parameters: Sequence[Tensor],
    names: Sequence[str],
    paths: Sequence[str],
    recipe: Recipe,
    assignment: Assignment | None = None,
) -> tuple[list[StackState], CommPlan | None]:
    """The stacks of some parameters, and the exchange that blocks take to reach them if they are divided over ranks.

    Refreshes are spread over all blocks, wherever they are, so that no block's depends on the number of ranks.
    """
    if assignment is not None:
        return _sharded_stack_states(parameters, names, paths, recipe, assignment)
    found = block_groups(parameters, paths, recipe, None)
    stack_states = _stack_states(found, recipe)
    _require_slots(recipe.storage, found, recipe)
    return _seeded(stack_states, names), None


def _stack_states(found: Mapping[Key, Grids], recipe: Recipe) -> list[StackState]:
    """The stacks of block groups whose blocks are all here."""
    stack_states = []
    for key, grids, phases in phased(found, recipe):
        for some, own in parts(key, grids, phases, recipe, stack_length(key, recipe)):
            stack_states.append(
                StackState(key[0], recipe.updates()[key[0]], Stack(*key[1:], tuple(some)), recipe.storage)
            )
            stack_states[-1].phases = own
    return stack_states


def _sharded_stack_states(
    parameters: Sequence[Tensor], names: Sequence[str], paths: Sequence[str], recipe: Recipe, assignment: Assignment
) -> tuple[list[StackState], CommPlan]:
    stack_states: list[StackState] = []
    block_groups: list[BlockGroup] = []
    me = assignment.rank_group.rank
    for block_group, phases in divided(parameters, paths, recipe, assignment):
        here = block_group.owned(me)
        if here:
            stack = Stack(
                block_group.block, block_group.dtype, block_group.device, tuple((m.position, m.grid) for m in here)
            )
            stack_states.append(
                StackState(
                    block_group.path,
                    recipe.updates()[block_group.path],
                    stack,
                    recipe.storage,
                    block_group=len(block_groups),
                )
            )
            stack_states[-1].phases = phases[np.array([member.owner == me for member in block_group.members])]
        block_groups.append(block_group)
    stack_states += _at_home(parameters, paths, recipe, assignment)
    _require_slots(recipe.storage, [(f.path, f.block) for f in block_groups], recipe)
    layouts = [assignment.placements[id(parameter)].layout for parameter in parameters]
    comm_plan = CommPlan(assignment.rank_group, layouts, block_groups, names, limit(recipe, assignment.rank_group.size))
    return _seeded(stack_states, names), comm_plan


def limit(recipe: Recipe, ranks: int) -> int:
    """Bytes of updates in a bucket, of all ranks together."""
    return recipe.distribution.bucket * ranks


def divided(
    parameters: Sequence[Tensor], paths: Sequence[str], recipe: Recipe, assignment: Assignment
) -> Iterator[tuple[BlockGroup, NDArray[np.float64]]]:
    """The block groups with the owner of each block, and the phases `[N]`; if they can be cut, no block group is
    larger than a bucket or than one stack on every rank."""
    ranks = assignment.rank_group.size
    for key, grids, phases in phased(block_groups(parameters, paths, recipe, assignment), recipe):
        fits = fitting(limit(recipe, ranks), math.prod(key[1]), key[2])
        for some, own in parts(key, grids, phases, recipe, min(fits, ranks * stack_length(key, recipe))):
            yield _shared(key, singly(some), assignment, parameters, recipe), own


def _seeded(stack_states: list[StackState], names: Sequence[str]) -> list[StackState]:
    for stack_state in stack_states:
        stack_state.seeds = np.array([_seed(names[owner], key) for _, owner, key in stack_state.rows()], dtype=np.int64)
    return stack_states


def _shared(
    key: Key,
    blocks: Grids,
    assignment: Assignment,
    parameters: Sequence[Tensor],
    recipe: Recipe,
) -> BlockGroup:
    """A block group of (position, block) with the owner of each block and its row there."""
    path, block, dtype, device = key
    rows = [0] * assignment.rank_group.size
    members = []
    for position, grid in blocks:
        owners = assignment.placements[id(parameters[position])].owners
        assert owners is not None
        owner = owners[grid.keys[0]]
        members.append(PlacedBlock(position, grid, owner, rows[owner]))
        rows[owner] += 1
    dtypes = {parameters[position].dtype for position, _ in blocks}
    gradient = dtypes.pop() if len(dtypes) == 1 and not recipe.decays_in_gradient() else dtype
    travels = (torch.bfloat16,) * 2 if recipe.distribution.dtype == "bf16" else (gradient, dtype)
    return BlockGroup(path, block, dtype, (travels[0], travels[1]), device, tuple(members))


def _at_home(
    parameters: Sequence[Tensor], paths: Sequence[str], recipe: Recipe, assignment: Assignment | None
) -> list[StackState]:
    """Units of the parts of those parameters that every rank updates where they are."""
    if assignment is None:
        return []
    found: dict[Key, list[tuple[int, BlockGrid]]] = {}
    for position, (parameter, path) in enumerate(zip(parameters, paths, strict=True)):
        part = local(parameter)
        shape = tuple(part.shape)
        if assignment.placements[id(parameter)].owners is None and part.numel():
            grid = BlockGrid(shape, (0,) * len(shape), (1,) * len(shape), shape, (0,))
            found.setdefault((path, shape, compute_dtype(part.dtype), part.device), []).append((position, grid))
    return _stack_states(found, recipe)


def _require_slots(storage: Mapping[str, Quantizer], keys: Iterable[tuple[Any, ...]], recipe: Recipe) -> None:
    """Raises for a storage key "path/slot" whose stage is there, but not the slot."""
    slots = {slot for path, block, *_ in keys for slot in slot_keys(recipe.updates()[path], path, block)}
    for key in storage:
        path, slash, _ = key.partition("/")
        near = sorted(slot for slot in slots if slot.rpartition("/")[0] == path)
        if slash and near and key not in slots:
            raise ValueError(f"storage: a slot of the stage is required ({', '.join(near)}), got '{key}'")


def _seed(name: str, key: int) -> int:
    digest = hashlib.blake2b(f"{name}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
