"""Block groups: equal blocks of all ranks that are exchanged, in the order in which they are computed and sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from eigengraft.distributed.comm_plan import BlockGroup, PlacedBlock
from eigengraft.numerics import compute_dtype
from eigengraft.stacks import blocks_that_fit

from ..recipe.recipe import Recipe
from ..sharding.phases import Phases
from ..sharding.placement import ParamSpec
from .equal_blocks import EqualBlocks, cut_blocks, equal_blocks, stack_length


def divide(
    specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, ranks: int
) -> Iterator[tuple[BlockGroup, NDArray[np.float64]]]:
    """The block groups with the owner of each block, and the phases `[N]` of their blocks.

    No block group is larger than a round of messages or than one stack on every rank, if its blocks may be parted.
    Block groups of neighbouring parameters follow each other, so that a parameter is complete a few rounds after its
    first block.
    """
    limit = round_bytes(specs, recipe, ranks)
    runs = list(_runs(specs, limit))
    if recipe.distribution.overlap_backward:  # backward comes to the last parameters first
        runs.reverse()
    for positions in runs:
        for blocks in equal_blocks(cut_blocks(specs, recipe, positions), specs, phases):
            fit = blocks_that_fit(limit, math.prod(blocks.kind.shape), blocks.kind.dtype)
            for some in blocks.split(min(fit, ranks * stack_length(blocks.kind, recipe)), recipe):
                yield _place(some, specs, recipe, ranks), some.phases


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
    own = dtypes.pop() if len(dtypes) == 1 else dtype
    gradient = dtype if recipe.decays_in_gradient() else own
    sent = (gradient, own if sends_parameters(specs, recipe) else dtype)
    if recipe.distribution.dtype == "bf16":
        sent = (torch.bfloat16, torch.bfloat16)
    return BlockGroup(path, shape, dtype, *sent, device, tuple(placed))
