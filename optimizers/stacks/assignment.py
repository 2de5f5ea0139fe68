"""Assignment of parameters to ranks: the ranks that share each parameter, and the rank that owns each of its blocks.

Owners are chosen such that all ranks have about equal costs. Stages declare the costs of their blocks, and
`distributed/balance.py` divides the costs among ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking.blocks import ONE_TENSOR, BlockGrid
from eigengraft.distributed.balance import Balance, Held, Item, Loads, assign, least_work
from eigengraft.distributed.distribution import Distribution
from eigengraft.distributed.layouts import Layout, holding
from eigengraft.distributed.rank_group import RankGroup, mesh_group
from eigengraft.errors import warn_user
from eigengraft.numerics import compute_dtype, fake_mode, is_dtensor
from eigengraft.preconditioners.cadence import Cadence

from ..param_groups import flat_piece
from ..recipe.loading import load_recipe
from ..recipe.recipe import Recipe, block_bytes
from ..recipe.routing import ParamInfo
from .placement import (
    ParamKey,
    ParamSpec,
    Phases,
    layout_of,
    natural_order,
    place,
    refresh_phases,
    refresh_units,
    refreshes,
)
from .rank_checks import check_construction

FACTORIZATION = 20.0
"""Assumed cost of every decomposition of a d x d matrix, in operations per d^3. Measured on CPUs, eigh needs 10 to 28
and a power step with QR needs 5."""

LONGEST_INTERVAL = 1000
"""Longest interval in steps over which work is balanced step by step. A refresh with a longer period counts with its
mean cost per step. The limit bounds the size of `Loads`, which stores one number for each step and rank."""


@dataclass(frozen=True)
class Cost:
    """The cost of one block.

    constant: floating-point operations of a step without refreshes.
    refreshes: for each stage with refreshes, its cadence and the floating-point operations of one refresh.
    state: bytes of state.
    """

    constant: float
    refreshes: tuple[tuple[Cadence, float], ...]
    state: int

    @property
    def work(self) -> float:
        """Mean floating-point operations of a step. Each refresh contributes its operations divided by its interval."""
        return self.constant + sum(refresh / cadence.interval for cadence, refresh in self.refreshes)


def block_cost(recipe: Recipe, path: str, block: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Return the cost of updating a block: floating-point operations of a step and of each refresh, and bytes of state.

    No state is allocated.

    path: path of the block's update in the recipe.
    block: shape of the block.
    dtype: dtype in which the block's update is computed.
    """
    rule = recipe.rules()[path]
    constant = sum((stage.work(block) for _, stage in rule.stages()), 0.0)
    rare = tuple((cadence, FACTORIZATION * cost) for cadence, cost in refreshes(rule, block))
    return Cost(constant, rare, block_bytes(recipe, path, block, dtype).total())


def common_interval(recipe: Recipe) -> int:
    """Return the number of steps after which the refreshes of all updates repeat.

    The number is the least common multiple of the periods of all cadences. Periods that would raise it above
    LONGEST_INTERVAL are left out.
    """
    cadences = [cadence for rule in recipe.rules().values() for cadence in rule.cadences().values()]
    interval = 1
    for period in sorted({cadence.period or 1 for cadence in cadences}, reverse=True):
        if math.lcm(interval, period) <= LONGEST_INTERVAL:
            interval = math.lcm(interval, period)
    return interval


class _Owned(NamedTuple):
    """Blocks of a parameter that must have one owner.

    keys: keys of the blocks.
    item: sum of the costs of the blocks.
    held: by rank, number of entries of these blocks that the rank holds.
    """

    keys: tuple[int, ...]
    item: Item
    held: Held


def assign_owners(specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, loads: Loads) -> Balance:
    """Assign an owner to each block of parameters that the same ranks share, and add the cost of the blocks to `loads`.

    The order of the parameters has no effect. The cost of parameters whose blocks need no owners
    (`ParamSpec.without_owners`) is added to `loads` before owners are chosen. If a stage needs sums over a parameter,
    all blocks of that parameter have one owner. Frozen parameters are assigned last, so that the work on all other
    parameters is balanced without frozen ones.

    Return how evenly the work in `loads` is divided over ranks before the work on frozen parameters is added.

    specs: the parameters. The owners are written into their placements (`ParamPlacement.owners`).
    phases: for each parameter, the fractions of a refresh interval at which its blocks are refreshed.
    loads: work and bytes of state of each rank. The work of a block in a step is its floating-point operations, or its
        milliseconds if the recipe has measured times.
    """
    balances = [
        _assign([spec for spec in specs if spec.frozen is frozen], recipe, phases, loads) for frozen in (False, True)
    ]
    return balances[0]


def _assign(specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, loads: Loads) -> Balance:
    """Assign an owner to each block of parameters, and add the cost of the blocks to `loads`.

    Return how evenly the work in `loads` is then divided over ranks.

    The arguments are those of `assign_owners`, which calls this function twice: first for the parameters that are not
    frozen, then for the frozen ones.
    """
    owned, places = list[_Owned](), list[dict[int, int]]()
    known = dict[tuple[int, BlockGrid], list[Held]]()

    @cache
    def cost_of(path: str, block: tuple[int, ...], dtype: torch.dtype) -> Cost:
        return block_cost(recipe, path, block, dtype)

    for spec in sorted(specs, key=lambda spec: natural_order(spec.name)):
        if spec.placed.owners is None:
            layout = spec.placed.updated
            cost = cost_of(spec.path, layout.shape, compute_dtype(spec.dtype))
            work = recipe.distribution.measured(layout.shape, cost.work)
            loads.divide(layout.fractions, work, float(cost.state))
            continue
        found = list(_blocks(spec, recipe, cost_of, phases[spec.key], loads.interval, known))
        if len(found) > 1 and recipe.rules()[spec.path].spans():
            found = [_joined(found)]
        owned += found
        places += [spec.placed.owners] * len(found)
    items = [blocks.item for blocks in owned]
    least = least_work([item.work(loads.interval) for item in items], loads.work)
    for owners, blocks, rank in zip(places, owned, assign(items, loads, [own.held for own in owned]), strict=True):
        owners.update(dict.fromkeys(blocks.keys, rank))
    return Balance(loads.critical_path, least * loads.interval)


def _blocks(
    spec: ParamSpec,
    recipe: Recipe,
    cost_of: Callable[[str, tuple[int, ...], torch.dtype], Cost],
    phases: NDArray[np.float64],
    interval: int,
    known: dict[tuple[int, BlockGrid], list[Held]],
) -> Iterator[_Owned]:
    """Yield each block of a parameter with its cost, and with the number of its entries that each rank holds.

    cost_of: function (path of the update, shape of the block, dtype of the computation) that returns a block's cost.
    phases: for each block, by its key, the fraction of a refresh interval at which it is refreshed.
    interval: number of steps after which the refreshes repeat.
    known: cache of the numbers of entries that each rank holds (`_held`), by layout and grid of blocks. This function
        adds to it.
    """
    layout, dtype = spec.placed.layout, compute_dtype(spec.dtype)
    for grid in recipe.rules()[spec.path].blocking.grids(spec.shape, spec.matrices):
        cost = cost_of(spec.path, grid.shape, dtype)
        items = _items(cost, recipe.distribution.measured(grid.shape, cost.work), phases[list(grid.keys)], interval)
        if (id(layout), grid) not in known:
            known[id(layout), grid] = [_held(layout, grid.block(row)) for row in range(len(grid.keys))]
        for key, item, held in zip(grid.keys, items, known[id(layout), grid], strict=True):
            yield _Owned((key,), item, held)


def _items(cost: Cost, work: float, phases: NDArray[np.float64], interval: int) -> Iterator[Item]:
    """Yield the cost of each of n blocks of one shape and update as an `Item`, for `distributed.balance.assign`.

    The cost of a refresh counts at the steps at which it is due. If a refresh is due at every step, or its steps are
    not known in advance, its mean cost counts at every step.

    cost: floating-point operations and bytes of one block.
    work: mean work of one block in a step: milliseconds if the recipe has measured times, else floating-point
        operations.
    phases: `[n]`, fraction of a refresh interval at which each block is refreshed.
    interval: number of steps after which the refreshes repeat.
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
"""Smallest fraction of a block that a rank must hold for `_held` to list the rank. A rank with a smaller fraction would
save little communication as the block's owner."""


def _held(layout: Layout, block: BlockGrid) -> Held:
    """Return the number of entries of a block that each rank holds, by rank. Return {} if every rank holds all entries.

    Ranks that hold less than LEAST_SHARE of the block are left out.
    """
    if layout.replicated:
        return {}
    counts = holding(layout, block)
    near = np.flatnonzero(counts >= LEAST_SHARE * math.prod(block.shape))
    return {int(rank): int(counts[rank]) for rank in near}


def _joined(found: Sequence[_Owned]) -> _Owned:
    """Join several sets of blocks into one set, so that all blocks have one owner. The costs of the sets are added."""
    due, held = dict[int, float](), dict[int, int]()
    for blocks in found:
        for step, work in blocks.item.due:
            due[step] = due.get(step, 0.0) + work
        for rank, count in blocks.held.items():
            held[rank] = held.get(rank, 0) + count
    constant, state = sum(blocks.item.constant for blocks in found), sum(blocks.item.state for blocks in found)
    return _Owned(sum((own.keys for own in found), ()), Item(constant, state, tuple(sorted(due.items()))), held)


class Advice(NamedTuple):
    """A recommendation of larger waves of refreshes, so that ranks wait less for each other.

    A wave consists of the blocks whose refreshes are due in the same step.

    fields: paths of the fields `min_wave_work` in the recipe, which set the least refresh work of a wave.
    min_wave_work: recommended value of all fields in `fields`, in units of the most expensive refresh.
    balance: how evenly the work is divided over ranks if the fields have this value. `balance.efficiency` is 1 if no
        choice of owners can be faster.
    """

    fields: Sequence[str]
    min_wave_work: int
    balance: Balance


PER_RANK = 4
"""Recommended number of refreshes for each rank in a wave. A wave is the set of refreshes of one step, and a refresh
counts in units of the most expensive one.

With 4, the work of two ranks differs by at most a quarter. Shipped recipes on models of 16 to 6,656 blocks then have an
efficiency (`Balance.efficiency`, at most 1) of 0.92 or more.
"""
WORTHWHILE = 0.05
"""Smallest gain in efficiency (`Balance.efficiency`, at most 1) for which larger waves are recommended."""


def advise(
    specs: Sequence[ParamSpec], recipe: Recipe, keys: Iterable[ParamKey], ranks: int, now: Balance
) -> Advice | None:
    """Return a recommendation of larger waves, so that ranks wait less for each other. Return None if it is of no use.

    A wave consists of the blocks whose refreshes are due in the same step. The recommended wave has PER_RANK refreshes
    for each rank, in units of the most expensive refresh, or all refreshes of an interval if there are fewer. The
    recommendation is of no use in three cases:

    - The recommended wave is a single refresh.
    - The recipe has no field that sets the size of waves.
    - The efficiency (`Balance.efficiency`, at most 1) would grow by less than WORTHWHILE.

    specs: parameters that the same ranks share. Their present owners do not change.
    keys: keys of all parameters of the optimizer.
    ranks: number of ranks that share the parameters.
    now: how evenly the work is divided over ranks with the present waves of the recipe.
    """
    known, fields = list(keys), wave_fields(recipe, dict.fromkeys(spec.path for spec in specs))
    min_wave_work = min(PER_RANK * ranks, int(refresh_units(recipe, known)))
    if not fields or min_wave_work < 2:
        return None
    other = load_recipe(recipe, dict.fromkeys(fields, min_wave_work))
    bare, loads = [*map(_without_owners, specs)], Loads(ranks, common_interval(other))
    balance = assign_owners(bare, other, refresh_phases(other, known), loads)
    return Advice(fields, min_wave_work, balance) if balance.efficiency >= now.efficiency + WORTHWHILE else None


def wave_fields(recipe: Recipe, paths: Iterable[str]) -> list[str]:
    """Return the paths of all fields `min_wave_work` in the updates at the given paths.

    A cadence with this field refreshes only a part of the blocks in a step. The field is the least work of such a step,
    in units of the most expensive refresh. Cadences that refresh all blocks in the same step are left out.
    """
    cadences = chain.from_iterable(recipe.rules()[path].cadences(path).items() for path in paths)
    return [f"{name}.refresh.min_wave_work" for name, cadence in cadences if cadence.spread]


def _without_owners(spec: ParamSpec) -> ParamSpec:
    """Return a copy of a parameter's specification whose blocks have no owners yet."""
    owners = None if spec.placed.owners is None else dict[int, int]()
    return replace(spec, placement=replace(spec.placed, owners=owners))


LEAST_EFFICIENCY = 0.7
"""Efficiency (1: no rank waits for another) below which an optimizer warns that ranks wait."""
LEAST_WAITING = 1e10
"""Smallest waiting time in a refresh interval for which an optimizer warns, in floating-point operations. One CPU core
computes 1e10 operations in about one second."""


def warn_of_waiting(
    specs: Sequence[ParamSpec], recipe: Recipe, keys: Iterable[ParamKey], ranks: int, now: Balance
) -> None:
    """Warn if ranks wait long for each other's refreshes, and would wait less if more refreshes were due together.

    specs: parameters that the same ranks share.
    keys: keys of all parameters of the optimizer.
    ranks: number of ranks that share the parameters.
    now: how evenly the work is divided over ranks with the present waves of the recipe.
    """
    waiting = now.critical_path - now.least
    if now.efficiency >= LEAST_EFFICIENCY or (waiting < LEAST_WAITING and not recipe.distribution.work):
        return
    advice = advise(specs, recipe, keys, ranks, now)
    if advice is not None:
        warn_user(
            f"{', '.join(advice.fields)}: the {ranks} ranks wait for each other's refreshes: the efficiency, computed "
            "as a lower bound of the critical path (the work of the busiest rank at each step, summed over the steps) "
            f"divided by the critical path, is {now.efficiency:.2f}; set min_wave_work to {advice.min_wave_work} for "
            f"an efficiency of {advice.balance.efficiency:.2f}. This changes the steps in which blocks are refreshed, "
            "and so the updates, but the updates do not depend on the number of ranks"
        )


REPLICATED = "replicated"
"""The scope of parameters that are plain tensors, which every rank of the default process group holds. A scope
identifies the set of ranks that exchange the blocks of a parameter."""


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """The parameters of one param group, as they were when the group was added.

    parameters: the parameters, in the order of the group.
    infos: for each parameter, its name, its shape and the facts by which the recipe chooses its update.
    specs: for each parameter, the path of its update, its division into matrices, and the ranks that hold and update
        it. The owners of its blocks are entered later, by `Assignments.assign`.
    """

    parameters: Sequence[Tensor]
    infos: Sequence[ParamInfo]
    specs: Sequence[ParamSpec]

    @property
    def names(self) -> list[str]:
        """The names of the parameters, or "group 0 parameter 2" for a parameter without a name."""
        return [spec.name for spec in self.specs]


class Assignments:
    """Finds the ranks that share each parameter of an optimizer, the owners of its blocks, and their phases.

    recipe: recipe of the optimizer.
    others: parameters of the same model that other optimizers update. The phases depend on these parameters too.
    phases: phases of the blocks of all groups. The phase of a block is the fraction of a refresh interval at which the
        block is refreshed.
    """

    def __init__(self, recipe: Recipe, others: Sequence[ParamInfo]) -> None:
        self.recipe, self.others = recipe, others
        self.phases: Phases = {}
        self._rank_groups: dict[Any, RankGroup] = {}

    def group(
        self, index: int, parameters: Sequence[Tensor], infos: Sequence[ParamInfo], frozen: Sequence[bool] | None
    ) -> ParamGroup:
        """Return the record of a param group: its parameters, and for each one its update, shape and ranks.

        Which rank updates a block, and when the block is refreshed, is decided later, by `assign`.

        index: index of the param group in the optimizer.
        infos: for each parameter, its name, its shape and the facts by which the recipe chooses its update.
        frozen: for each parameter, True if it counts as frozen. None: parameters with `requires_grad=False` are frozen.

        Raises ValueError, with the name of the parameter, if its update does not accept it.
        """
        frozen, specs = [not p.requires_grad for p in parameters] if frozen is None else frozen, list[ParamSpec]()
        for number, (parameter, info, is_frozen) in enumerate(zip(parameters, infos, frozen, strict=True)):
            name = info.name or f"group {index} parameter {number}"
            try:
                specs.append(self._spec(parameter, info, name, is_frozen, index))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return ParamGroup(
            list(parameters), list(infos), specs
        )  # copies, because a framework may change the group's list

    def assign(
        self, groups: Iterable[ParamGroup], added: Iterable[ParamGroup], loads: dict[RankGroup, Loads]
    ) -> Mapping[RankGroup, Balance]:
        """Assign owners to the blocks of the added groups, and new phases to the blocks of all groups.

        The owner of a block is the rank that computes its update. The phase of a block is the fraction of a refresh
        interval at which it is refreshed.

        Owners are chosen such that work and state of the added and the earlier groups together are balanced over ranks.
        Frozen parameters get owners too, after all other parameters, so that no owner changes when a parameter is
        thawed. Owners in earlier groups do not change, because these owners already store state.

        Return, for each set of ranks that share added parameters, how evenly its ranks divide the work.

        groups: all groups.
        added: groups whose blocks have no owners yet.
        loads: for each set of ranks, the work and the bytes of state of each rank from earlier groups. Work is in
            floating-point operations or milliseconds, as in `assign_owners`. The work and the bytes of the added
            groups are added in place.
        """
        self.set_phases(groups)
        balances = dict[RankGroup, Balance]()
        for rank_group, own in _shared(added).items():
            load = loads.setdefault(rank_group, Loads(rank_group.size, common_interval(self.recipe)))
            balances[rank_group] = assign_owners(own, self.recipe, self.phases, load)
        return balances

    def set_phases(self, groups: Iterable[ParamGroup]) -> None:
        """Assign to every block its phase: the fraction of a refresh interval at which the block is refreshed.

        groups: all groups.
        """
        self.phases = refresh_phases(self.recipe, self._keys(groups))

    def warn_of_waiting(self, groups: Sequence[ParamGroup], balances: Mapping[RankGroup, Balance]) -> None:
        """Warn, on one rank, if ranks will spend much of their time waiting for each other's refreshes.

        groups: all groups.
        balances: for each set of ranks, how evenly its ranks divide the work of all groups, as `assign` returns it.
        """
        for rank_group, own in _shared(groups).items():
            if rank_group.all_ranks.rank == 0:
                warn_of_waiting(own, self.recipe, self._keys(groups), rank_group.size, balances[rank_group])

    def _keys(self, groups: Iterable[ParamGroup]) -> list[ParamKey]:
        return [spec.key for group in groups for spec in group.specs] + [*map(self._key, self.others)]

    def _key(self, info: ParamInfo) -> ParamKey:
        return ParamKey(info.name or "", self.recipe.route(info)[0], info.shape, self.recipe.view_of(info).matrices)

    def _rank_group(self, parameter: Tensor) -> RankGroup | None:
        """Return the ranks that share a parameter. Return None if this process updates the parameter alone."""
        where = scope(parameter, self.recipe.distribution)
        if where is None:
            return None
        if fake_mode(parameter) is not None:
            raise ValueError(
                "a fake tensor has no values that ranks could send to each other; call `compose` for a model of fake "
                "tensors in one process, or let `eigengraft plan` compute the memory of every rank"
            )
        if where not in self._rank_groups:
            group = dist.group.WORLD if where == REPLICATED else mesh_group(where)
            ranks, size = RankGroup(group, self.recipe.distribution.timeout), self.recipe.distribution.group_size
            self._rank_groups[where] = ranks if size is None else ranks.subgroup(size)
        return self._rank_groups[where]

    def _spec(self, parameter: Tensor, info: ParamInfo, name: str, frozen: bool, index: int) -> ParamSpec:
        rank_group = self._rank_group(parameter)
        path, dtype, placement = self.recipe.route(info)[0], parameter.dtype, None
        if dtype.is_complex:  # complex numbers are computed as pairs of real numbers, which form no matrix
            info, dtype, matrices = replace(info, shape=(*info.shape, 2)), dtype.to_real(), ONE_TENSOR
        else:
            matrices = self.recipe.view_of(info).matrices
        if rank_group is not None:
            placement = place(self.recipe, path, layout_of(parameter, rank_group), matrices)
        kind, factors = (tuple(info.shape), dtype, parameter.device), self.recipe.width_factors(info)
        return ParamSpec(name, path, *kind, placement, matrices, frozen, factors, index, rank_group)

    def check(self, index: int, group: ParamGroup, values: Mapping[str, Any]) -> None:
        """Raise ValueError on every rank if ranks have different recipes or different param groups at this index.

        index: index of the param group in the optimizer.
        values: the same param group as torch stores it, a dictionary with `lr` and `weight_decay`.
        """
        for rank_group, specs in _shared([group]).items():
            pairs = zip(group.parameters, group.specs, strict=True)
            own = [parameter for parameter, spec in pairs if spec.rank_group is rank_group]
            texts = {
                "recipe": self.recipe.to_json(),
                "parameters": repr([_describe(spec, p) for spec, p in zip(specs, own, strict=True)]),
                "requires_grad": repr([parameter.requires_grad for parameter in own]),
                "lr and weight_decay": repr([float(values[key]) for key in ("lr", "weight_decay")]),
            }
            check_construction(f"param group {index}", rank_group, texts, specs, own)

    def require_same_owners(self, added: Iterable[ParamGroup], first: bool) -> None:
        """Raise ValueError on every rank if the ranks differ in the number of param groups, or in the owners of blocks.

        added: groups that were not checked yet.
        first: True if these are the first groups of the optimizer.
        """
        shared = _shared(added)
        for rank_group in self._rank_groups.values() if first else shared:
            owners = [spec.placement and spec.placement.owners for spec in shared.get(rank_group, ())]
            check_construction("no more param groups", rank_group, {"owners": repr(owners)}, (), ())


def _shared(groups: Iterable[ParamGroup]) -> dict[RankGroup, list[ParamSpec]]:
    """Return the parameters that several ranks share, in lists by their rank group."""
    found: dict[RankGroup, list[ParamSpec]] = {}
    for spec in chain.from_iterable(group.specs for group in groups):
        if spec.rank_group is not None:
            found.setdefault(spec.rank_group, []).append(spec)
    return found


def _describe(spec: ParamSpec, parameter: Tensor) -> tuple[Any, ...]:
    """Return the properties of a parameter that must be the same on all ranks."""
    placements = parameter.placements if is_dtensor(parameter) else None
    return spec.name, spec.dtype, spec.shape, spec.matrices, placements


def scope(parameter: Tensor, distribution: Distribution) -> Any:
    """Return the scope of a parameter, a key that identifies the ranks that exchange its blocks.

    The scope is the mesh of a DTensor, REPLICATED for a plain tensor, or None if this process updates the parameter
    alone.

    Raises ValueError if the recipe's distribution mode excludes the parameter, or if the parameter is a flat piece of
    another tensor.
    """
    if piece := flat_piece(parameter):
        raise ValueError(f"a parameter must not be flattened, got {piece}")
    sharded = is_dtensor(parameter)
    if distribution.mode in ("replicated", "local") and sharded:
        raise ValueError(
            f"distribution.mode: '{distribution.mode}' is for plain tensors, got a DTensor; use 'sharded' or 'auto'"
        )
    if distribution.mode == "sharded" and not sharded:
        raise ValueError(
            "distribution.mode: 'sharded' is for DTensors, got a plain tensor; use 'replicated', 'local' or 'auto'"
        )
    if sharded and distribution.group_size is not None:
        raise ValueError(
            f"distribution.group_size: {distribution.group_size} cannot be combined with a DTensor, whose mesh defines "
            "its ranks; remove it"
        )
    if sharded:
        return parameter.device_mesh  # type: ignore[attr-defined]
    alone = distribution.mode == "local" or not (dist.is_available() and dist.is_initialized())
    return None if alone or dist.get_world_size() == 1 else REPLICATED
