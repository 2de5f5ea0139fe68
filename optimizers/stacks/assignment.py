"""ASSIGN"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking.blocks import ONE_TENSOR, BlockGrid
from eigengraft.distributed.balance import Balance, Held, Item, Loads, assign, least_work
from eigengraft.distributed.distribution import Distribution
from eigengraft.distributed.layouts import Layout, holding, is_dtensor
from eigengraft.distributed.rank_group import RankGroup, mesh_group
from eigengraft.errors import warn_user
from eigengraft.numerics import compute_dtype, fake_mode
from eigengraft.preconditioners.cadence import Cadence
from eigengraft.quantization import Quantizer, choose

from ..param_groups import flat_piece
from ..recipe.loading import load_recipe
from ..recipe.recipe import Recipe, Route, slot_keys
from ..recipe.routing import ParamInfo
from .placement import (
    ParamKey,
    ParamSpec,
    Phases,
    layout_of,
    lr_factors,
    natural_order,
    place,
    refresh_phases,
    refresh_units,
    refreshes,
)
from .rank_checks import check_construction

FACTORIZATION = 20.0
"""Operations of a decomposition, in units of d^3: eigh takes 10 to 28, a power step with QR 5 (measured on CPUs)."""

LONGEST_INTERVAL = 1000
"""Longest interval over which ranks are evened out step by step, in steps. Refreshes of longer periods count by their
mean, because `Loads` stores a number for each step and rank."""


@dataclass(frozen=True)
class Cost:
    """The cost of one block.

    constant: floating-point operations of every step, without refreshes.
    refreshes: cadence of each stage that refreshes, and the operations of one refresh.
    state: bytes of state.
    """

    constant: float
    refreshes: tuple[tuple[Cadence, float], ...]
    state: int

    @property
    def work(self) -> float:
        """Mean operations of a step: those of a refresh are divided by its interval."""
        return self.constant + sum(refresh / cadence.interval for cadence, refresh in self.refreshes)


def block_cost(
    rule: Recipe | Route, path: str, block: tuple[int, ...], dtype: torch.dtype, storage: Mapping[str, Quantizer]
) -> Cost:
    """Return the cost of a block of that shape under the update at `path` of a recipe; nothing is allocated."""
    constant = sum((stage.work(block) for _, stage in rule.stages()), 0.0)
    rare = tuple((cadence, FACTORIZATION * cost) for cadence, cost in refreshes(rule, block))
    slots = slot_keys(rule, path, block).items()
    return Cost(constant, rare, sum(_bytes(s.shape, s.dtype or dtype, choose(storage, key, s)) for key, s in slots))


@lru_cache(maxsize=4096)
def _bytes(shape: tuple[int, ...], dtype: torch.dtype, quantizer: Quantizer | None) -> int:
    """Return the bytes of a slot. A large quantized slot is extrapolated from fewer rows."""
    numel = math.prod(shape)
    if quantizer is None:
        return numel * dtype.itemsize
    shrunk = (max(1, (1 << 22) * shape[0] // max(numel, 1)), *shape[1:]) if numel > 1 << 22 else shape
    codes = quantizer.encode(torch.zeros((1, *shrunk), dtype=dtype, device="cpu")).values()
    nbytes = sum(code.numel() * code.element_size() for code in codes)
    return nbytes * numel // max(math.prod(shrunk), 1) + 8


def common_interval(recipe: Recipe) -> int:
    """Return the steps after which the refreshes of all updates are due again; if it is too long, of the longest
    periods alone."""
    cadences = [stage.cadence() for rule in recipe.updates().values() for _, stage in rule.stages()]
    interval = 1
    for period in sorted({cadence.period or 1 for cadence in cadences if cadence is not None}, reverse=True):
        if math.lcm(interval, period) <= LONGEST_INTERVAL:
            interval = math.lcm(interval, period)
    return interval


class _Owned(NamedTuple):
    """Blocks of a parameter that have one owner: their keys, their cost, and the entries of them that ranks hold."""

    keys: tuple[int, ...]
    item: Item
    held: Held


def assign_owners(specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, loads: Loads) -> Balance:
    """Fill in the owners of all blocks of parameters that the same ranks share, and add the blocks to the loads.

    The order of the parameters plays no role. Parameters that are updated in place are counted first. Blocks of a
    parameter that a stage takes sums over have one owner. Frozen parameters come last: the others are even without
    them, and the balance returned is that of the others.
    """
    balances = [
        _assign([spec for spec in specs if spec.frozen is frozen], recipe, phases, loads) for frozen in (False, True)
    ]
    return balances[0]


def _assign(specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, loads: Loads) -> Balance:
    """Fill in the owners of the blocks of these parameters, and add the blocks to the loads."""
    owned, places = list[_Owned](), list[dict[int, int]]()
    known = dict[tuple[int, BlockGrid], list[Held]]()
    for spec in sorted(specs, key=lambda spec: natural_order(spec.name)):
        assert spec.placement is not None
        if spec.placement.owners is None:
            layout = spec.placement.updated
            cost = _cost(spec, layout.shape, recipe)
            work = recipe.distribution.measured(layout.shape, cost.work)
            loads.divide(layout.fractions, work, float(cost.state))
            continue
        found = list(_blocks(spec, recipe, phases[spec.key], loads.interval, known))
        if len(found) > 1 and recipe.updates()[spec.path].spans():
            found = [_joined(found)]
        owned += found
        places += [spec.placement.owners] * len(found)
    items = [blocks.item for blocks in owned]
    least = least_work([item.work(loads.interval) for item in items], loads.work)
    for owners, blocks, rank in zip(places, owned, assign(items, loads, [own.held for own in owned]), strict=True):
        owners.update(dict.fromkeys(blocks.keys, rank))
    return Balance(loads.critical_path, least * loads.interval)


def _cost(spec: ParamSpec, block: tuple[int, ...], recipe: Recipe) -> Cost:
    return block_cost(recipe.updates()[spec.path], spec.path, block, compute_dtype(spec.dtype), recipe.storage)


def _blocks(
    spec: ParamSpec,
    recipe: Recipe,
    phases: NDArray[np.float64],
    interval: int,
    known: dict[tuple[int, BlockGrid], list[Held]],
) -> Iterator[_Owned]:
    """Yield the blocks of a parameter, each by itself.

    known: entries that ranks hold of each block, by the layout and grid of the block; filled in.
    """
    assert spec.placement is not None
    layout = spec.placement.layout
    for grid in recipe.updates()[spec.path].blocking.grids(spec.shape, spec.matrices):
        cost = _cost(spec, grid.shape, recipe)
        items = _items(cost, recipe.distribution.measured(grid.shape, cost.work), phases[list(grid.keys)], interval)
        if (id(layout), grid) not in known:
            known[id(layout), grid] = [_held(layout, grid.block(row)) for row in range(len(grid.keys))]
        for key, item, held in zip(grid.keys, items, known[id(layout), grid], strict=True):
            yield _Owned((key,), item, held)


def _items(cost: Cost, work: float, phases: NDArray[np.float64], interval: int) -> Iterator[Item]:
    """Yield n blocks of one cost as items, each with its phase.

    A refresh that is due at every step, or at no fixed steps, counts by its mean.

    work: mean work of a step, measured or counted.
    phases: `[n]`, the phase of each block.
    """
    constant, scale = cost.constant, work / cost.work if cost.work else 0.0
    due: list[dict[int, float]] = [{} for _ in phases]
    for cadence, refresh in cost.refreshes:
        period = cadence.period or 1
        if period == 1 or interval % period:
            constant += refresh / cadence.interval
            continue
        for own, first in zip(due, cadence.steps_due(phases).tolist(), strict=True):
            for step in range(first, interval, period):
                own[step] = own.get(step, 0.0) + refresh * scale
    constant = constant * scale if cost.work else work
    yield from (Item(constant, float(cost.state), tuple(sorted(own.items()))) for own in due)


LEAST_SHARE = 1 / 16
"""Fraction of a block's entries below which `_held` leaves a rank out: as its owner the rank would save little."""


def _held(layout: Layout, block: BlockGrid) -> Held:
    """Return the number of entries of a block that each rank holds; empty if every rank holds all."""
    if layout.replicated:
        return {}
    counts = holding(layout, block)
    near = np.flatnonzero(counts >= LEAST_SHARE * math.prod(block.shape))
    return {int(rank): int(counts[rank]) for rank in near}


def _joined(found: Sequence[_Owned]) -> _Owned:
    """Return several blocks as blocks that have one owner."""
    due, held = dict[int, float](), dict[int, int]()
    for blocks in found:
        for step, work in blocks.item.due:
            due[step] = due.get(step, 0.0) + work
        for rank, count in blocks.held.items():
            held[rank] = held.get(rank, 0) + count
    constant, state = sum(blocks.item.constant for blocks in found), sum(blocks.item.state for blocks in found)
    return _Owned(sum((own.keys for own in found), ()), Item(constant, state, tuple(sorted(due.items()))), held)


class Advice(NamedTuple):
    """Larger waves of refreshes, with which ranks wait less.

    fields: paths of the fields `at_once` in the recipe.
    at_once: their value.
    balance: the balance with this value.
    """

    fields: Sequence[str]
    at_once: int
    balance: Balance


PER_RANK = 4
"""Refreshes of the costliest block in one wave, for each rank. With 4 ranks differ by a quarter of their work at most,
and shipped recipes on models of 16 to 6,656 blocks reach 0.92 of the least critical path or more."""
WORTHWHILE = 0.05
"""Efficiency that must be gained before larger waves are advised."""


def advise(
    specs: Sequence[ParamSpec], recipe: Recipe, keys: Iterable[ParamKey], ranks: int, now: Balance
) -> Advice | None:
    """Return the waves that keep ranks busy: PER_RANK refreshes for each. None if they would save little.

    specs: parameters that the same ranks share; their owners stay.
    keys: keys of all parameters of the optimizer.
    ranks: number of ranks that share the parameters.
    now: balance of the recipe as it is.
    """
    known, fields = list(keys), at_once_fields(recipe, dict.fromkeys(spec.path for spec in specs))
    at_once = min(PER_RANK * ranks, int(refresh_units(recipe, known)))
    if not fields or at_once < 2:
        return None
    other = load_recipe(recipe, dict.fromkeys(fields, at_once))
    bare = [_without_owners(spec) for spec in specs]
    balance = assign_owners(bare, other, refresh_phases(other, known), Loads(ranks, common_interval(other)))
    return Advice(fields, at_once, balance) if balance.efficiency >= now.efficiency + WORTHWHILE else None


def at_once_fields(recipe: Recipe, paths: Iterable[str]) -> list[str]:
    """Return the paths of the fields that say how many refreshes are due at once, in the updates at these paths."""
    stages = [(name, stage.cadence()) for path in paths for name, stage in recipe.updates()[path].stages(path)]
    return [f"{name}.refresh.at_once" for name, cadence in stages if cadence is not None and cadence.spread]


def _without_owners(spec: ParamSpec) -> ParamSpec:
    assert spec.placement is not None
    owners = None if spec.placement.owners is None else dict[int, int]()
    return replace(spec, placement=replace(spec.placement, owners=owners))


LEAST_EFFICIENCY = 0.7
"""Efficiency below which an optimizer warns."""
LEAST_WAITING = 1e10
"""Operations that all ranks together wait in an interval before an optimizer warns: about a second of a CPU core."""


def warn_of_waiting(
    specs: Sequence[ParamSpec], recipe: Recipe, keys: Iterable[ParamKey], ranks: int, now: Balance
) -> None:
    """Warn if ranks spend much of an interval waiting for the one that refreshes, and say what would help."""
    waiting = now.critical_path - now.least
    if now.efficiency >= LEAST_EFFICIENCY or (waiting < LEAST_WAITING and not recipe.distribution.work):
        return
    advice = advise(specs, recipe, keys, ranks, now)
    if advice is not None:
        warn_user(
            f"{', '.join(advice.fields)}: {ranks} ranks wait for the one that refreshes, efficiency "
            f"{now.efficiency:.2f} by counted work; with {advice.at_once} it is {advice.balance.efficiency:.2f}, and "
            "the trajectory that of one process with the same value"
        )


REPLICATED = "replicated"
"""The scope of plain parameters that every rank of the default process group holds."""


@dataclass(frozen=True)
class Assignment:
    """The parameters of one param group, by position in the group.

    specs: what each parameter is, where it lies, and who owns its blocks.
    rank_groups: ranks that share each parameter; None: this process alone.
    """

    specs: Sequence[ParamSpec]
    rank_groups: Sequence[RankGroup | None]

    def shared(self) -> dict[RankGroup, list[ParamSpec]]:
        """Parameters by the ranks that share them."""
        found: dict[RankGroup, list[ParamSpec]] = {}
        for spec, rank_group in zip(self.specs, self.rank_groups, strict=True):
            if rank_group is not None:
                found.setdefault(rank_group, []).append(spec)
        return found


class Assignments:
    """The assignment of every param group of an optimizer: what ranks carry of groups that were there before counts.

    recipe: declares the updates.
    others: parameters of the same model that other optimizers have.
    phases: where in a refresh interval each block of all groups is due.
    """

    def __init__(self, recipe: Recipe, others: Sequence[ParamInfo] = ()) -> None:
        self.recipe, self.others = recipe, others
        self.phases: Phases = {}
        self._rank_groups: dict[Any, RankGroup] = {}
        self._loads: dict[RankGroup, Loads] = {}
        self._groups: list[Assignment] = []
        self._loads_before: list[dict[RankGroup, Loads]] = []
        self._balances: dict[RankGroup, Balance] = {}

    def __getitem__(self, index: int) -> Assignment:
        """The assignment of one param group."""
        return self._groups[index]

    def add(
        self, parameters: Sequence[Tensor], infos: Sequence[ParamInfo], names: Sequence[str], frozen: Sequence[bool]
    ) -> None:
        """Adds the next group, whose blocks have no owners and phases yet."""
        specs, rank_groups = [], []
        for parameter, info, name, is_frozen in zip(parameters, infos, names, frozen, strict=True):
            try:
                rank_group = self._rank_group(parameter)
                spec = self._spec(parameter, info, name, rank_group)
                specs.append(replace(spec, frozen=is_frozen, group=len(self._groups)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            rank_groups.append(rank_group)
        self._loads_before.append({rank_group: deepcopy(loads) for rank_group, loads in self._loads.items()})
        self._groups.append(Assignment(specs, rank_groups))

    def assign(self, index: int) -> None:
        """Decides who owns which block of the groups from `index` on, and when the blocks of all groups are due.

        Frozen parameters count, so that nothing changes when one is thawed; their owners are decided last. Owners of
        earlier groups stay, because state lies there.
        """
        self._spread()
        for rank_group, own in self._shared(index).items():
            self._balances[rank_group] = assign_owners(own, self.recipe, self.phases, self._loads[rank_group])

    def _shared(self, index: int) -> dict[RankGroup, list[ParamSpec]]:
        """Parameters of the groups from `index` on, by the ranks that share them."""
        found: dict[RankGroup, list[ParamSpec]] = {}
        for assignment in self._groups[index:]:
            for rank_group, own in assignment.shared().items():
                found.setdefault(rank_group, []).extend(own)
        return found

    def warn_of_waiting(self) -> None:
        """Warns, on one rank, if ranks will spend much of their time waiting for each other's refreshes."""
        for rank_group, own in self._shared(0).items():
            if rank_group.all_ranks.rank == 0:
                warn_of_waiting(own, self.recipe, self._keys(), rank_group.size, self._balances[rank_group])

    def _spread(self) -> None:
        self.phases = refresh_phases(self.recipe, self._keys())

    def _keys(self) -> list[ParamKey]:
        return [spec.key for group in self._groups for spec in group.specs] + [*map(self._key, self.others)]

    def _key(self, info: ParamInfo) -> ParamKey:
        return ParamKey(info.name or "", self.recipe.route(info)[0], info.shape, self.recipe.view_of(info).matrices)

    def forget(self, index: int) -> None:
        """Takes back all groups from that one on, after a failure."""
        self._loads = next(iter(self._loads_before[index:]), self._loads)
        del self._groups[index:], self._loads_before[index:]
        self._spread()

    def _rank_group(self, parameter: Tensor) -> RankGroup | None:
        where = scope(parameter, self.recipe.distribution)
        if where is None:
            return None
        if fake_mode(parameter) is not None:
            raise ValueError(
                "a parameter with numbers is required where ranks divide an optimizer, got a fake tensor, whose "
                "messages nobody can read; `eigengraft plan` computes the memory of every rank without processes"
            )
        if where not in self._rank_groups:
            group = dist.group.WORLD if where == REPLICATED else mesh_group(where)
            ranks, size = RankGroup(group, self.recipe.distribution.timeout), self.recipe.distribution.group_size
            self._rank_groups[where] = ranks if size is None else ranks.subgroup(size)
        rank_group = self._rank_groups[where]
        self._loads.setdefault(rank_group, Loads(rank_group.size, common_interval(self.recipe)))
        return rank_group

    def _spec(self, parameter: Tensor, info: ParamInfo, name: str, rank_group: RankGroup | None) -> ParamSpec:
        path, dtype, placement = self.recipe.route(info)[0], parameter.dtype, None
        if dtype.is_complex:  # real pairs, of which no entries form a matrix
            info, dtype, matrices = replace(info, shape=(*info.shape, 2)), dtype.to_real(), ONE_TENSOR
        else:
            matrices = self.recipe.view_of(info).matrices
        if rank_group is not None:
            placement = place(self.recipe, path, layout_of(parameter, rank_group), matrices)
        spec = ParamSpec(name, path, tuple(info.shape), dtype, parameter.device, placement, matrices)
        return replace(spec, lr_factors=lr_factors(self.recipe, info))

    def check(self, index: int, group: Mapping[str, Any]) -> None:
        """Raise ValueError on every rank if ranks were not given the same recipe and param group."""
        assignment = self._groups[index]
        for rank_group, specs in assignment.shared().items():
            pairs = zip(group["params"], assignment.rank_groups, strict=True)
            own = [parameter for parameter, shared_by in pairs if shared_by is rank_group]
            texts = {
                "recipe": self.recipe.to_json(),
                "parameters": repr([_describe(spec, p) for spec, p in zip(specs, own, strict=True)]),
                "requires_grad": repr([parameter.requires_grad for parameter in own]),
                "lr and weight_decay": repr([float(group[key]) for key in ("lr", "weight_decay")]),
            }
            check_construction(f"param group {index}", rank_group, texts, specs, own)

    def require_same_owners(self, index: int) -> None:
        """Raises ValueError on every rank if some ranks have more param groups than others, or other owners.

        index: the first group that ranks may not agree on yet.
        """
        shared = self._shared(index)
        for rank_group in shared if index else self._rank_groups.values():
            owners = [spec.placement and spec.placement.owners for spec in shared.get(rank_group, ())]
            check_construction("no more param groups", rank_group, {"owners": repr(owners)}, (), ())


def _describe(spec: ParamSpec, parameter: Tensor) -> tuple[Any, ...]:
    """What must be the same of a parameter on all ranks."""
    placements = parameter.placements if is_dtensor(parameter) else None
    return spec.name, spec.dtype, spec.shape, spec.matrices, placements


def scope(parameter: Tensor, distribution: Distribution) -> Any:
    """What parameters that are exchanged together have in common: a device mesh, or REPLICATED; None: no exchange.

    Raises ValueError if the recipe asks for parameters of the other kind, and for flat pieces of parameters.
    """
    if piece := flat_piece(parameter):
        raise ValueError(f"a parameter of its own shape is required, got {piece}")
    sharded = is_dtensor(parameter)
    if distribution.mode in ("replicated", "local") and sharded:
        raise ValueError(f"distribution.mode: '{distribution.mode}' takes plain tensors, got a DTensor")
    if distribution.mode == "sharded" and not sharded:
        raise ValueError("distribution.mode: 'sharded' takes DTensors, got a plain tensor")
    if sharded and distribution.group_size is not None:
        raise ValueError(
            "distribution.group_size: plain tensors are required, got a DTensor, whose mesh says its ranks"
        )
    if sharded:
        return parameter.device_mesh  # type: ignore[attr-defined]
    alone = distribution.mode == "local" or not (dist.is_available() and dist.is_initialized())
    return None if alone or dist.get_world_size() == 1 else REPLICATED
