"""Families: blocks of one shape, dtype, device and update, on any rank; when each is due, in what parts they come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking import BlockGrid
from eigengraft.numerics import compute_dtype
from eigengraft.stacks import cut, most_blocks

from ..recipe.recipe import Recipe, Route
from ..recipe.slot_keys import slot_keys
from ..sharding.assignment import Assignment

Key = tuple[str, tuple[int, ...], torch.dtype, torch.device]
"""Of a block group: the path of its update, the shape of a block, the dtype to compute in, the device."""
Grids = Sequence[tuple[int, BlockGrid]]
"""With the position of their parameter."""


def block_groups(
    parameters: Sequence[Tensor], paths: Sequence[str], recipe: Recipe, assignment: Assignment | None
) -> dict[Key, list[tuple[int, BlockGrid]]]:
    """All blocks that have owners, on any rank, in the order of the parameters."""
    updates = recipe.updates()
    found: dict[Key, list[tuple[int, BlockGrid]]] = {}
    for position, (parameter, path) in enumerate(zip(parameters, paths, strict=True)):
        if assignment is not None and assignment.placements[id(parameter)].owners is None:
            continue
        grids = list(updates[path].blocking.grids(tuple(parameter.shape)))
        _require_one_stack(updates[path], path, tuple(parameter.shape), grids)
        for grid in grids:
            key = (path, grid.tile, compute_dtype(parameter.dtype), parameter.device)
            found.setdefault(key, []).append((position, grid))
    return found


def phased(found: Mapping[Key, Grids], recipe: Recipe) -> list[tuple[Key, Grids, NDArray[np.float64]]]:
    """(key, grids, phases `[N]`) of every block group.

    Phases are in proportion to the refresh cost of the blocks before: equal parts of an interval cost the same.
    """
    updates = recipe.updates()
    costs = {key: sum(stage.refresh_cost(key[1]) for _, stage in updates[key[0]].stages()) for key in found}
    blocks = {key: sum(len(grid.keys) for _, grid in grids) for key, grids in found.items()}
    total = sum(costs[key] * blocks[key] for key in found)
    before, rows = 0.0, []
    for key, grids in found.items():
        phases = (before + costs[key] * np.arange(blocks[key])) / total if total else np.zeros(blocks[key])
        rows.append((key, grids, np.asarray(phases, dtype=np.float64)))
        before += costs[key] * blocks[key]
    return rows


def stack_length(key: Key, recipe: Recipe) -> int:
    """How many blocks of a block group make a stack."""
    path, block, dtype, device = key
    slots = slot_keys(recipe.updates()[path], path, block).values()
    return most_blocks(max([math.prod(block), *(math.prod(slot.shape) for slot in slots)]), dtype, device)


def parts(
    key: Key, grids: Grids, phases: NDArray[np.float64], recipe: Recipe, most: int
) -> Iterator[tuple[Grids, NDArray[np.float64]]]:
    """A block group and its phases in parts of at most so many blocks; what a stage spans stays together."""
    whole = any(stage.spans_parameter() for _, stage in recipe.updates()[key[0]].stages())
    ranges = cut([position for position, grid in grids for _ in grid.keys], most, whole)
    if len(ranges) == 1:
        yield grids, phases
    else:
        blocks = singly(grids)
        yield from ((blocks[start:stop], phases[start:stop]) for start, stop in ranges)


def singly(grids: Grids) -> Grids:
    """Each block as a grid of its own."""
    return [(position, grid.block(index)) for position, grid in grids for index in range(len(grid.keys))]


def _require_one_stack(rule: Recipe | Route, path: str, shape: tuple[int, ...], grids: Sequence[BlockGrid]) -> None:
    for stage_path, stage in rule.stages(path):
        if len(grids) > 1 and stage.spans_parameter():
            raise ValueError(
                f"{stage_path}: takes norms over whole parameters, so their blocks must be equal, got blocks "
                f"{', '.join(str(grid.tile) for grid in grids)} of a parameter of shape {shape}; choose a "
                "`blocking.size` that divides its axes, no splitting, or `per: block`"
            )
