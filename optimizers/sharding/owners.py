"""Owners of blocks: what the blocks of parameters cost at each step, and which ranks own them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eigengraft.distributed.ownership import Item, Loads, assign
from eigengraft.numerics import compute_dtype

from ..recipe.recipe import Recipe
from .cost_model import Cost, block_cost
from .near_owners import Held, Holdings, exchange_owners
from .phases import Phases, natural_order
from .placement import ParamSpec


@dataclass(frozen=True)
class Balance:
    """How evenly the work of ranks is divided.

    critical_path: work of a refresh interval in which every step lasts until the last rank is done.
    least: the least that it could be, whoever owns which block and whenever refreshes are due.
    """

    critical_path: float
    least: float

    @property
    def efficiency(self) -> float:
        """Part of an interval that is not spent waiting for other ranks, where that can be avoided."""
        return self.least / self.critical_path if self.critical_path else 1.0


class _OwnedTogether(NamedTuple):
    """Blocks of a parameter that have one owner: the owners to fill in, keys of the blocks, what they cost, and what
    ranks hold of them."""

    owners: dict[int, int]
    keys: Sequence[int]
    item: Item
    held: Held


def assign_owners(specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, loads: Loads) -> Balance:
    """Fills in the owners of all blocks of parameters that the same ranks share; loads: what ranks carry, updated.

    The order of the parameters plays no role. Parameters that are updated in place are counted before any block is
    assigned. Blocks of a parameter that a stage takes sums over go to one owner. Of blocks that cost the same, ranks
    own those that they hold much of already, which then need not travel. Frozen parameters come last, so that work is
    even without them: the balance is that of the others.
    """
    frozen = [spec for spec in specs if spec.frozen]
    balance = _assign([spec for spec in specs if not spec.frozen], recipe, phases, loads)
    if frozen:
        _assign(frozen, recipe, phases, loads)
    return balance


def _assign(specs: Sequence[ParamSpec], recipe: Recipe, phases: Phases, loads: Loads) -> Balance:
    """Fills in the owners of all blocks of some parameters, beside what ranks carry."""
    found, holdings = list[_OwnedTogether](), Holdings()
    for spec in sorted(specs, key=lambda spec: natural_order(spec.name)):
        assert spec.placement is not None
        if spec.placement.owners is not None:
            found += _blocks(spec, recipe, phases, loads.interval, holdings)
            continue
        layout = spec.placement.updated
        cost = _cost(spec, layout.shape, recipe)
        loads.carry(layout.fractions, recipe.distribution.measured(layout.shape, cost.work), float(cost.state))
    least = least_work([blocks.item.work(loads.interval) for blocks in found], loads.work)
    items = [blocks.item for blocks in found]
    owners = exchange_owners(items, assign(items, loads), [blocks.held for blocks in found])
    for blocks, rank in zip(found, owners, strict=True):
        blocks.owners.update(dict.fromkeys(blocks.keys, rank))
    return Balance(loads.critical_path, least * loads.interval)


def _cost(spec: ParamSpec, block: tuple[int, ...], recipe: Recipe) -> Cost:
    return block_cost(recipe.updates()[spec.path], spec.path, block, compute_dtype(spec.dtype), recipe.storage)


def _blocks(
    spec: ParamSpec, recipe: Recipe, phases: Phases, interval: int, holdings: Holdings
) -> Iterator[_OwnedTogether]:
    """The blocks of a parameter, all together if a stage takes sums over them."""
    found = list(_grid_blocks(spec, recipe, phases, interval, holdings))
    if len(found) > 1 and recipe.updates()[spec.path].spans():
        found = [_together(found)]
    yield from found


def _together(found: Sequence[_OwnedTogether]) -> _OwnedTogether:
    """Blocks of several grids of a parameter as blocks that have one owner."""
    due: dict[int, float] = {}
    for step, work in (pair for blocks in found for pair in blocks.item.due):
        due[step] = due.get(step, 0.0) + work
    constant, state = sum(blocks.item.constant for blocks in found), sum(blocks.item.state for blocks in found)
    keys = [key for blocks in found for key in blocks.keys]
    ranks = {rank for blocks in found for rank in blocks.held}
    held = {rank: sum(blocks.held.get(rank, 0) for blocks in found) for rank in ranks}
    return _OwnedTogether(found[0].owners, keys, Item(constant, state, tuple(sorted(due.items()))), held)


def _grid_blocks(
    spec: ParamSpec, recipe: Recipe, phases: Phases, interval: int, holdings: Holdings
) -> Iterator[_OwnedTogether]:
    """The blocks of a parameter, those of one grid together if a stage takes sums over them."""
    assert spec.placement is not None and spec.placement.owners is not None
    rule, placement, owners = recipe.updates()[spec.path], spec.placement, spec.placement.owners
    together = rule.spans()
    for grid in rule.blocking.grids(spec.shape, spec.matrices):
        cost = _cost(spec, grid.shape, recipe)
        measured = recipe.distribution.measured(grid.shape, cost.work)
        scale = measured / cost.work if cost.work else 0.0
        often, rest = _refreshes(cost, phases[spec.key][list(grid.keys)], interval)
        constant = rest * scale if cost.work else measured
        for rows in [range(len(grid.keys))] if together else [[row] for row in range(len(grid.keys))]:
            due: dict[int, float] = {}
            for steps, refresh in often:
                for step in [step for row in rows for step in steps[row]]:
                    due[step] = due.get(step, 0.0) + refresh * scale
            item = Item(constant * len(rows), float(cost.state * len(rows)), tuple(sorted(due.items())))
            keys, held = [grid.keys[row] for row in rows], holdings.of(placement.layout, grid, rows)
            yield _OwnedTogether(owners, keys, item, held)


def _refreshes(
    cost: Cost, phases: NDArray[np.float64], interval: int
) -> tuple[list[tuple[list[list[int]], float]], float]:
    """What n equal blocks refresh: (steps of the interval at which each is due, work) by cadence, and constant work.

    What is due at every step, or at no fixed steps, is constant: its mean over steps.
    """
    constant, found = cost.constant, []
    for cadence, refresh in cost.refreshes:
        period = cadence.period or 1
        if period == 1 or interval % period:
            constant += refresh / cadence.interval
            continue
        steps = cadence.steps_due(phases)[:, None] + np.arange(0, interval, period)
        found.append((steps.tolist(), refresh))
    return found, constant


def least_work(work: Sequence[float], carried: NDArray[np.float64]) -> float:
    """A lower bound of the largest work: the mean, what a rank carries anyway, or what the items make unavoidable.

    Some rank has k + 1 of the kR + 1 largest items, at least as much as the smallest k + 1 of these (k = 0: the largest
    item). work: of each item. carried: `[R]`, work of each rank before any item is assigned.
    """
    ranks, sizes = len(carried), np.sort([0.0, *work])[::-1]
    before = np.concatenate([[0.0], np.cumsum(sizes)])
    k = np.arange((len(sizes) - 1) // ranks + 1)
    mean = (carried.sum() + before[-1]) / ranks
    return float(max(mean, carried.max(), (before[k * ranks + 1] - before[k * ranks - k]).max()))
