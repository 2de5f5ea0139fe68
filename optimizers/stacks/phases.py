"""Phases: at which fraction of a refresh interval each block is due, from names and shapes alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eigengraft.blocking import Matrices
from eigengraft.blocking.blocks import ONE_TENSOR
from eigengraft.preconditioners.cadence import ROUNDED, Cadence

from ..recipe.recipe import Recipe, Route


class ParamKey(NamedTuple):
    """The properties of a parameter that its phases follow from.

    name: of the parameter.
    path: of its update.
    shape: of the full parameter.
    matrices: which of its entries form a matrix.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    matrices: Matrices = ONE_TENSOR


Phases = Mapping[ParamKey, NDArray[np.float64]]
"""The phases of each parameter's blocks in [0, 1), by block key."""


class _Kind(NamedTuple):
    """Blocks of one path and shape: the cost of a refresh of one, and the keys of the blocks of each parameter."""

    cost: float
    blocks: list[tuple[ParamKey, tuple[int, ...]]]

    @property
    def total(self) -> float:
        return self.cost * sum(len(keys) for _, keys in self.blocks)


def refreshes(rule: Recipe | Route, block: tuple[int, ...]) -> Iterator[tuple[Cadence, float]]:
    """Yield the cadence of each stage that refreshes, and the cost of one refresh of a block of that shape."""
    for _, stage in rule.stages():
        cadence = stage.cadence()
        if cadence is not None:
            yield cadence, stage.cached_traits(block).refresh_cost


def refresh_phases(recipe: Recipe, parameters: Iterable[ParamKey]) -> Phases:
    """Return the phases of all blocks of all parameters of an optimizer.

    The blocks are in one order: by path and shape, then by name and key. A block's phase is the cost of the refreshes
    before it and of half its own, as a fraction of the cost of all: equal parts of an interval cost the same, as nearly
    as indivisible blocks can. A cadence that has waves rounds it down to the beginning of a wave.

    Neither the order nor the grouping of the parameters, nor ranks, change a phase. Blocks of one path and shape that
    are due together are neighbours.
    """
    params = set(parameters)
    kinds = _kinds(recipe, params)
    counts = Counter[ParamKey]()
    for kind in kinds.values():
        for param, keys in kind.blocks:
            counts[param] += len(keys)
    phases = {param: np.zeros(counts[param]) for param in params}
    total, units = sum(kind.total for kind in kinds.values()), _units(kinds.values())
    before = 0.0
    for (path, _), kind in kinds.items() if total else ():
        done, waves = 0, _waves(recipe.updates()[path], units)
        for param, keys in kind.blocks:
            spread = (before + kind.cost * (np.arange(done, done + len(keys)) + 0.5)) / total
            phases[param][list(keys)] = spread if waves is None else np.floor(spread * waves + ROUNDED) / waves
            done += len(keys)
        before += kind.cost * done
    return phases


def refresh_units(recipe: Recipe, parameters: Iterable[ParamKey]) -> float:
    """Return the work of all refreshes in an interval, in units of the costliest block; 0 if there are none."""
    return _units(_kinds(recipe, set(parameters)).values())


def _kinds(recipe: Recipe, parameters: Collection[ParamKey]) -> dict[tuple[str, tuple[int, ...]], _Kind]:
    """Return the blocks by path and shape, in the order of their refreshes."""
    updates = recipe.updates()
    found: dict[tuple[str, tuple[int, ...]], list[tuple[ParamKey, tuple[int, ...]]]] = {}
    for param in sorted(parameters, key=lambda param: (natural_order(param.name), *param[1:3])):
        for grid in updates[param.path].blocking.grids(param.shape, param.matrices):
            found.setdefault((param.path, grid.shape), []).append((param, grid.keys))
    costs = {(path, block): sum(cost for _, cost in refreshes(updates[path], block)) for path, block in found}
    return {kind: _Kind(costs[kind], found[kind]) for kind in sorted(found)}


def _units(kinds: Collection[_Kind]) -> float:
    costliest = max((kind.cost for kind in kinds), default=0.0)
    return sum(kind.total for kind in kinds) / costliest if costliest else 0.0


def _waves(rule: Recipe | Route, units: float) -> int | None:
    """Return the fewest waves that a cadence of an update asks for. None: no cadence asks for waves."""
    cadences = [stage.cadence() for _, stage in rule.stages()]
    waves = [cadence.waves(units) for cadence in cadences if cadence is not None]
    return min((count for count in waves if count is not None), default=None)


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """Return what names are sorted by: numbers in them count as numbers, so that `layers.2` precedes `layers.10`."""
    return (*((text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)), (name, 0))
