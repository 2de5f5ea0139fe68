"""From parameters to units: blocks of one shape, dtype, device and update together, each on the rank that owns it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.blocks import Piece
from eigengraft.distributed.exchange import Exchange, Family, Member
from eigengraft.distributed.stacks import Stack, fitting
from eigengraft.numerics import compute_dtype
from eigengraft.quantization import Quantizer

from .division import Division, local
from .families import Key, Pieces, families, parts, phased, singly, stack_length
from .recipe import Recipe
from .unit import Unit, slot_keys


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
    found = families(parameters, paths, recipe, None)
    units = _units(found, recipe)
    _require_slots(recipe.storage, found, recipe)
    return _seeded(units, names), None


def _units(found: Mapping[Key, Pieces], recipe: Recipe) -> list[Unit]:
    """The units of families whose blocks are all here."""
    units = []
    for key, pieces, phases in phased(found, recipe):
        for some, own in parts(key, pieces, phases, recipe, stack_length(key, recipe)):
            units.append(Unit(key[0], recipe.updates()[key[0]], Stack(*key[1:], tuple(some)), recipe.storage))
            units[-1].phases = own
    return units


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
    """The families with the owner of each block, and the phases `[N]`; if they can be cut, no family is larger than a
    bucket or than one stack on every rank."""
    ranks = division.peers.size
    for key, pieces, phases in phased(families(parameters, paths, recipe, division), recipe):
        fits = fitting(limit(recipe, ranks), math.prod(key[1]), key[2])
        for some, own in parts(key, pieces, phases, recipe, min(fits, ranks * stack_length(key, recipe))):
            yield _shared(key, singly(some), division, parameters, recipe), own


def _seeded(units: list[Unit], names: Sequence[str]) -> list[Unit]:
    for unit in units:
        unit.seeds = np.array([_seed(names[owner], key) for _, owner, key in unit.rows()], dtype=np.int64)
    return units


def _shared(
    key: Key,
    blocks: Pieces,
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
    return _units(found, recipe)


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
