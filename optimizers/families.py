"""Families: blocks of one shape, dtype, device and update, on any rank; when each is due, in what parts they come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.blocks import Piece
from eigengraft.distributed.stacks import cut, most_blocks
from eigengraft.numerics import compute_dtype

from .division import Division
from .recipe import Recipe, Route
from .unit import slot_keys

Key = tuple[str, tuple[int, ...], torch.dtype, torch.device]
"""Of a family: the path of its update, the shape of a block, the dtype to compute in, the device."""
Pieces = Sequence[tuple[int, Piece]]
"""With the position of their parameter."""


def families(
    parameters: Sequence[Tensor], paths: Sequence[str], recipe: Recipe, division: Division | None
) -> dict[Key, list[tuple[int, Piece]]]:
    """All blocks that have owners, on any rank, in the order of the parameters."""
    updates = recipe.updates()
    found: dict[Key, list[tuple[int, Piece]]] = {}
    for position, (parameter, path) in enumerate(zip(parameters, paths, strict=True)):
        if division is not None and division.shares[id(parameter)].owners is None:
            continue
        pieces = list(updates[path].blocking.pieces(tuple(parameter.shape)))
        _require_one_stack(updates[path], path, tuple(parameter.shape), pieces)
        for piece in pieces:
            key = (path, piece.tile, compute_dtype(parameter.dtype), parameter.device)
            found.setdefault(key, []).append((position, piece))
    return found


def phased(found: Mapping[Key, Pieces], recipe: Recipe) -> list[tuple[Key, Pieces, NDArray[np.float64]]]:
    """(key, pieces, phases `[N]`) of every family.

    Phases are in proportion to the refresh cost of the blocks before: equal parts of an interval cost the same.
    """
    updates = recipe.updates()
    costs = {key: sum(stage.refresh_cost(key[1]) for _, stage in updates[key[0]].stages()) for key in found}
    blocks = {key: sum(len(piece.keys) for _, piece in pieces) for key, pieces in found.items()}
    total = sum(costs[key] * blocks[key] for key in found)
    before, rows = 0.0, []
    for key, pieces in found.items():
        phases = (before + costs[key] * np.arange(blocks[key])) / total if total else np.zeros(blocks[key])
        rows.append((key, pieces, np.asarray(phases, dtype=np.float64)))
        before += costs[key] * blocks[key]
    return rows


def stack_length(key: Key, recipe: Recipe) -> int:
    """How many blocks of a family make a stack."""
    path, block, dtype, device = key
    slots = slot_keys(recipe.updates()[path], path, block).values()
    return most_blocks(max([math.prod(block), *(math.prod(slot.shape) for slot in slots)]), dtype, device)


def parts(
    key: Key, pieces: Pieces, phases: NDArray[np.float64], recipe: Recipe, most: int
) -> Iterator[tuple[Pieces, NDArray[np.float64]]]:
    """A family and its phases in parts of at most so many blocks; what a stage spans stays together."""
    whole = any(stage.spans_parameter() for _, stage in recipe.updates()[key[0]].stages())
    ranges = cut([position for position, piece in pieces for _ in piece.keys], most, whole)
    if len(ranges) == 1:
        yield pieces, phases
    else:
        blocks = singly(pieces)
        yield from ((blocks[start:stop], phases[start:stop]) for start, stop in ranges)


def singly(pieces: Pieces) -> Pieces:
    """Each block as a piece of its own."""
    return [(position, piece.block(index)) for position, piece in pieces for index in range(len(piece.keys))]


def _require_one_stack(rule: Recipe | Route, path: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    for stage_path, stage in rule.stages(path):
        if len(pieces) > 1 and stage.spans_parameter():
            raise ValueError(
                f"{stage_path}: takes norms over whole parameters, so their blocks must be equal, got blocks "
                f"{', '.join(str(piece.tile) for piece in pieces)} of a parameter of shape {shape}; choose a "
                "`blocking.size` that divides its axes, no splitting, or `per: block`"
            )
