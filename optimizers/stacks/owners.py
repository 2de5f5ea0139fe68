"""Owners of blocks: the costs that stages declare, as items of `distributed/balance.py`, and the rank of each block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eigengraft.blocking.blocks import BlockGrid
from eigengraft.distributed.balance import Balance, Held, Item, Loads, assign, least_work
from eigengraft.distributed.layouts import Layout, holding
from eigengraft.errors import warn_user
from eigengraft.numerics import compute_dtype
from eigengraft.preconditioners.cadence import Cadence
from eigengraft.quantization import Quantizer, choose

from ..recipe.loading import load_recipe
from ..recipe.recipe import Recipe, Route, slot_keys
from .phases import ParamKey, Phases, natural_order, refresh_phases, refresh_units, refreshes
from .placement import ParamSpec

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
