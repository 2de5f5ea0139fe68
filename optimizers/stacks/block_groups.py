"""Blocks of parameters in stacks, and in block groups, which ranks compute and send in one order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eigengraft.blocking.blocks import BlockGrid
from eigengraft.blocking.stacks import Stack, blocks_that_fit, max_blocks, split_ranges
from eigengraft.distributed.comm_plan import BlockGroup, PlacedBlock
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.numerics import compute_dtype, upload

from ..recipe.recipe import Recipe, require_slots, slot_keys
from .phases import Phases
from .placement import ParamSpec
from .stack import FreshCodes, StackState


class BlockKind(NamedTuple):
    """What equal blocks have in common.

    path: path of their update.
    dtype: dtype that they are computed in.
    of_numbers: whether their parameters are single numbers, without an axis. Ranks cannot divide these.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    of_numbers: bool = False


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
            yield (
                BlockKind(spec.path, grid.shape, compute_dtype(spec.dtype), spec.device, not spec.shape),
                position,
                grid,
            )


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


def divide(
    specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, ranks: int
) -> Iterator[tuple[BlockGroup, NDArray[np.float64]]]:
    """The block groups with the owner of each block, and the phases `[N]` of their blocks.

    No block group is larger than a round of messages or than one stack on every rank, if its blocks may be parted.
    Block groups of parameters that stages take sums over follow each other, and are joined.
    Block groups of neighbouring parameters follow each other, so that a parameter is complete a few rounds after its
    first block.
    """
    limit = round_bytes(specs, recipe, ranks)
    runs = list(_runs(specs, limit))
    if recipe.distribution.overlap_backward:  # backward comes to the last parameters first
        runs.reverse()
    for positions in runs:
        lists = list[EqualBlocks]()
        for blocks in equal_blocks(cut_blocks(specs, recipe, positions), specs, phases):
            fit = blocks_that_fit(limit, math.prod(blocks.kind.shape), blocks.kind.dtype)
            lists += blocks.split(min(fit, ranks * stack_length(blocks.kind, recipe)), recipe)
        spans = {path: update.spans() for path, update in recipe.updates().items()}
        for numbers in connected([some.positions if spans[some.kind.path] else set() for some in lists]):
            positions_together = set[int]().union(*(lists[number].positions for number in numbers))
            dtypes = {specs[position].dtype for position in positions_together}
            for number in numbers:
                group = _place(lists[number], specs, recipe, ranks, dtypes)
                yield replace(group, joined=number != numbers[0]), lists[number].phases


def round_bytes(specs: Sequence[ParamSpec], recipe: Recipe, ranks: int) -> int:
    """Bytes of updates that all ranks together send in one round of messages.

    A rank receives those of its part of each parameter: all of them if every rank holds the whole parameter.
    """
    copies = [spec.placement.layout.copies for spec in specs if spec.placement is not None and not spec.in_place]
    return recipe.distribution.message * ranks // max(copies, default=1)


def sends_parameters(specs: Sequence[ParamSpec], recipe: Recipe) -> bool:
    """Whether owners write the parameters of their blocks and send these."""
    return recipe.distribution.gather == "parameters" and _replicated(specs)


def _replicated(specs: Sequence[ParamSpec]) -> bool:
    placements = [spec.placement for spec in specs if not spec.in_place]
    return all(placement is None or placement.layout.replicated for placement in placements)


def _runs(specs: Sequence[ParamSpec], limit: int) -> Iterator[list[int]]:
    """Positions of neighbouring parameters, in lists of at most `limit` bytes of updates or of one parameter."""
    run, size = list[int](), 0
    for position, spec in enumerate(specs):
        nbytes = math.prod(spec.shape) * compute_dtype(spec.dtype).itemsize
        if run and size + nbytes > limit:
            yield run
            run, size = [], 0
        run.append(position)
        size += nbytes
    if run:
        yield run


def _place(
    blocks: EqualBlocks, specs: Sequence[ParamSpec], recipe: Recipe, ranks: int, dtypes: Set[torch.dtype]
) -> BlockGroup:
    """The block group of equal blocks: the owner of each, and its row in the owner's stack; dtypes: of parameters."""
    path, shape, dtype, device, _ = blocks.kind
    rows = [0] * ranks
    placed = []
    for position, grid in blocks.single():
        placement = specs[position].placement
        assert placement is not None and placement.owners is not None
        owner = placement.owners[grid.keys[0]]
        placed.append(PlacedBlock(position, grid, owner, rows[owner]))
        rows[owner] += 1
    own = next(iter(dtypes)) if len(dtypes) == 1 else dtype
    gradient = dtype if recipe.decays_in_gradient() else own
    sent = (gradient, own if sends_parameters(specs, recipe) else dtype)
    if recipe.distribution.dtype == "bf16":
        sent = (torch.bfloat16, torch.bfloat16)
    return BlockGroup(path, shape, dtype, *sent, device, tuple(placed))


def build(
    specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, rank_group: RankGroup | None = None
) -> tuple[list[StackState], list[BlockGroup]]:
    """The stacks that this rank computes, and the block groups that are exchanged (none without a rank group)."""
    if rank_group is None:
        found = equal_blocks(cut_blocks(specs, recipe, range(len(specs))), specs, phases)
        require_slots(recipe, [(blocks.kind.path, blocks.kind.shape) for blocks in found])
        return _stack_states(found, specs, recipe), []
    rank, stack_states, block_groups, fresh = rank_group.rank, list[StackState](), list[BlockGroup](), FreshCodes()
    for group, due in divide(specs, recipe, phases, rank_group.size):
        owned = np.array([block.owner == rank for block in group.blocks])
        if owned.any():
            kind = BlockKind(group.path, group.shape, group.dtype, group.device)
            grids = [(block.position, block.grid) for block in group.owned(rank)]
            number = len(block_groups)
            stack_states.append(_stack_state(EqualBlocks(kind, grids, due[owned]), specs, recipe, fresh, number))
        block_groups.append(group)
    require_slots(recipe, [(group.path, group.shape) for group in block_groups])
    in_place = equal_blocks(blocks_in_place(specs, rank), specs, phases)
    return [*stack_states, *_stack_states(in_place, specs, recipe, recipe.distribution.message)], block_groups


def _stack_states(
    lists: Iterable[EqualBlocks], specs: Sequence[ParamSpec], recipe: Recipe, limit: int | None = None
) -> list[StackState]:
    """Stacks of blocks that are all on this rank; limit: their bytes, if several blocks are in one."""
    found, fresh = [], FreshCodes()
    for blocks in lists:
        most = stack_length(blocks.kind, recipe) if len(blocks.phases) > 1 else 1
        if limit is not None:
            most = min(most, blocks_that_fit(limit, math.prod(blocks.kind.shape), blocks.kind.dtype))
        found += [_stack_state(some, specs, recipe, fresh) for some in blocks.split(most, recipe)]
    return found


def _stack_state(
    blocks: EqualBlocks, specs: Sequence[ParamSpec], recipe: Recipe, fresh: FreshCodes, block_group: int | None = None
) -> StackState:
    """One stack with its state; fresh, block_group: as of `StackState`."""
    path, shape, dtype, device, _ = blocks.kind
    stack = Stack(shape, dtype, device, tuple(blocks.grids))
    owners = zip(stack.param_ids.tolist(), stack.keys, strict=True)
    seeds = np.array([_seed(specs[position].name, key) for position, key in owners], dtype=np.int64)
    rule = recipe.updates()[path]
    state = StackState(path, rule, stack, recipe.storage, blocks.phases, seeds, block_group, fresh=fresh)
    if recipe.lr_scale is not None:
        factors = [specs[position].lr_factors[own] for position, grid in stack.grids for own in grid.matrices]
        state.lr_factors = upload(torch.tensor(factors, dtype=dtype, device="cpu"), device)
    return state


def _seed(name: str, key: int) -> int:
    """A number made of a parameter's name and a block's key."""
    digest = hashlib.blake2b(f"{name}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
