"""From parameters to units: blocks of one shape, dtype, device and update together, each on the rank that owns it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.blocks import Piece
from eigengraft.distributed.exchange import Exchange, Family, Member
from eigengraft.distributed.stacks import Stack
from eigengraft.numerics import compute_dtype
from eigengraft.quantization import Quantizer

from .division import Division, local
from .recipe import Recipe, Route
from .unit import Unit, slot_keys

Key = tuple[str, tuple[int, ...], torch.dtype, torch.device]
"""Of a family: the path of its update, the shape of a block, the dtype to compute in, the device."""


def build(
    parameters: Sequence[Tensor],
    names: Sequence[str],
    paths: Sequence[str],
    recipe: Recipe,
    division: Division | None = None,
) -> tuple[list[Unit], Exchange | None]:
    """The units of some parameters, and the exchange that blocks take to reach them if they are divided over ranks.

    Refreshes are spread over all blocks, wherever they are, so that no block's depends on the number of ranks.
    """
    if division is not None:
        return _divided_units(parameters, names, paths, recipe, division)
    updates, found = recipe.updates(), _families(parameters, paths, recipe, None)
    units = []
    for (path, block, dtype, device), pieces, phases in _phased(found, recipe):
        units.append(Unit(path, updates[path], Stack(block, dtype, device, tuple(pieces)), recipe.storage))
        units[-1].phases = phases
    _require_slots(recipe.storage, found, recipe)
    return _seeded(units, names), None


def _divided_units(
    parameters: Sequence[Tensor], names: Sequence[str], paths: Sequence[str], recipe: Recipe, division: Division
) -> tuple[list[Unit], Exchange]:
    units: list[Unit] = []
    families: list[Family] = []
    me = division.peers.rank
    for family, phases in divided(parameters, paths, recipe, division):
        here = family.owned(me)
        if here:
            stack = Stack(family.block, family.dtype, family.device, tuple((m.position, m.piece) for m in here))
            units.append(Unit(family.path, recipe.updates()[family.path], stack, recipe.storage, family=len(families)))
            units[-1].phases = phases[np.array([member.owner == me for member in family.members])]
        families.append(family)
    units += _at_home(parameters, paths, recipe, division)
    _require_slots(recipe.storage, [(f.path, f.block) for f in families], recipe)
    layouts = [division.shares[id(parameter)].layout for parameter in parameters]
    exchange = Exchange(division.peers, layouts, families, names, limit(recipe, division.peers.size))
    return _seeded(units, names), exchange


def limit(recipe: Recipe, ranks: int) -> int:
    """Bytes of updates in a bucket, of all ranks together."""
    return recipe.distribution.bucket * ranks


def divided(
    parameters: Sequence[Tensor], paths: Sequence[str], recipe: Recipe, division: Division
) -> Iterator[tuple[Family, NDArray[np.float64]]]:
    """The families with the owner of each block, and the phases `[N]`; no family is larger than a bucket if it can be
    cut."""
    for key, pieces, phases in _phased(_families(parameters, paths, recipe, division), recipe):
        whole = any(stage.spans_parameter() for _, stage in recipe.updates()[key[0]].stages())
        blocks = [(position, piece.block(index)) for position, piece in pieces for index in range(len(piece.keys))]
        fits = max(1, limit(recipe, division.peers.size) // max(math.prod(key[1]) * key[2].itemsize, 1))
        cuts = [k * len(blocks) // -(-len(blocks) // fits) for k in range(-(-len(blocks) // fits) + 1)]
        if whole:  # all blocks of a parameter stay together
            cuts = [at for at in cuts if at in (0, len(blocks)) or blocks[at - 1][0] != blocks[at][0]]
        for first, end in pairwise(cuts):
            yield _shared(key, blocks[first:end], division, parameters, recipe), phases[first:end]


def _seeded(units: list[Unit], names: Sequence[str]) -> list[Unit]:
    for unit in units:
        unit.seeds = np.array([_seed(names[owner], key) for _, owner, key in unit.rows()], dtype=np.int64)
    return units


def _families(
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


def _shared(
    key: Key,
    blocks: Sequence[tuple[int, Piece]],
    division: Division,
    parameters: Sequence[Tensor],
    recipe: Recipe,
) -> Family:
    """A family of (position, block) with the owner of each block and its row there."""
    path, block, dtype, device = key
    rows = [0] * division.peers.size
    members = []
    for position, piece in blocks:
        owners = division.shares[id(parameters[position])].owners
        assert owners is not None
        owner = owners[piece.keys[0]]
        members.append(Member(position, piece, owner, rows[owner]))
        rows[owner] += 1
    dtypes = {parameters[position].dtype for position, _ in blocks}
    gradient = dtypes.pop() if len(dtypes) == 1 and not recipe.decays_in_gradient() else dtype
    travels = (torch.bfloat16,) * 2 if recipe.distribution.dtype == "bf16" else (gradient, dtype)
    return Family(path, block, dtype, (travels[0], travels[1]), device, tuple(members))


def _at_home(
    parameters: Sequence[Tensor], paths: Sequence[str], recipe: Recipe, division: Division | None
) -> list[Unit]:
    """Units of the parts of those parameters that every rank updates where they are."""
    if division is None:
        return []
    found: dict[Key, list[tuple[int, Piece]]] = {}
    for position, (parameter, path) in enumerate(zip(parameters, paths, strict=True)):
        part = local(parameter)
        shape = tuple(part.shape)
        if division.shares[id(parameter)].owners is None and part.numel():
            piece = Piece(shape, (0,) * len(shape), (1,) * len(shape), shape, (0,))
            found.setdefault((path, shape, compute_dtype(part.dtype), part.device), []).append((position, piece))
    units = []
    for (path, block, dtype, device), pieces in found.items():
        units.append(Unit(path, recipe.updates()[path], Stack(block, dtype, device, tuple(pieces)), recipe.storage))
    return units


def _phased(
    families: Mapping[Key, Sequence[tuple[int, Piece]]], recipe: Recipe
) -> list[tuple[Key, Sequence[tuple[int, Piece]], NDArray[np.float64]]]:
    """(key, pieces, phases `[N]`) of every family.

    Phases are in proportion to the refresh cost of the blocks before: equal parts of an interval cost the same.
    """
    updates = recipe.updates()
    costs = {key: sum(stage.refresh_cost(key[1]) for _, stage in updates[key[0]].stages()) for key in families}
    blocks = {key: sum(len(piece.keys) for _, piece in pieces) for key, pieces in families.items()}
    total = sum(costs[key] * blocks[key] for key in families)
    before, rows = 0.0, []
    for key, pieces in families.items():
        phases = (before + costs[key] * np.arange(blocks[key])) / total if total else np.zeros(blocks[key])
        rows.append((key, pieces, np.asarray(phases, dtype=np.float64)))
        before += costs[key] * blocks[key]
    return rows


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


def _require_one_stack(rule: Recipe | Route, path: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    for stage_path, stage in rule.stages(path):
        if len(pieces) > 1 and stage.spans_parameter():
            raise ValueError(
                f"{stage_path}: takes norms over whole parameters, so their blocks must be equal, got blocks "
                f"{', '.join(str(piece.tile) for piece in pieces)} of a parameter of shape {shape}; choose a "
                "`blocking.size` that divides its axes, no splitting, or `per: block`"
            )
