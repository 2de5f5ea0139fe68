"""Phases: where in a refresh interval each block is due, found from names and shapes alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eigengraft.blocking import Matrices
from eigengraft.blocking.rule import ONE_TENSOR
from eigengraft.preconditioners.cadence import ROUNDED

from ..recipe.recipe import Recipe


class ParamKey(NamedTuple):
    """What the phases of a parameter follow from.

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
    """Blocks of one path and shape: the cost of one refresh, and keys of the blocks of each parameter."""

    cost: float
    blocks: list[tuple[ParamKey, tuple[int, ...]]]

    @property
    def total(self) -> float:
        return self.cost * sum(len(keys) for _, keys in self.blocks)


def refresh_phases(recipe: Recipe, parameters: Iterable[ParamKey], at_once: int | None = None) -> Phases:
    """The phases of all blocks of all parameters of an optimizer.

    A block's phase is the share of the refresh cost of all blocks before it and of half its own: equal parts of a
    refresh interval cost the same, as nearly as whole blocks can. Blocks are ordered by path and shape, then by name
    and key, so that neither the order nor the grouping of the parameters, nor where they lie, enters a number; blocks
    of one path and shape that are due together are neighbours. A cadence may have phases rounded down to those of its
    waves.

    at_once: instead of what the cadences say.
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
    for (path, _), kind in kinds.items():
        done, waves = 0, _waves(recipe, path, units, at_once)
        for param, keys in kind.blocks if total else ():
            spread = (before + kind.cost * (np.arange(done, done + len(keys)) + 0.5)) / total
            phases[param][list(keys)] = spread if waves is None else np.floor(spread * waves + ROUNDED) / waves
            done += len(keys)
        before += kind.cost * done
    return phases


def refresh_units(recipe: Recipe, parameters: Iterable[ParamKey]) -> float:
    """The work of all refreshes in an interval, in units of the costliest block; 0 if there are none."""
    return _units(_kinds(recipe, set(parameters)).values())


def _kinds(recipe: Recipe, parameters: Collection[ParamKey]) -> dict[tuple[str, tuple[int, ...]], _Kind]:
    """Blocks by path and shape, in the order of their refreshes."""
    updates = recipe.updates()
    found: dict[tuple[str, tuple[int, ...]], list[tuple[ParamKey, tuple[int, ...]]]] = {}
    for param in sorted(parameters, key=lambda param: (natural_order(param.name), *param[1:3])):
        for grid in updates[param.path].blocking.grids(param.shape, param.matrices):
            found.setdefault((param.path, grid.shape), []).append((param, grid.keys))
    costs = {kind: sum(stage.refresh_cost(kind[1]) for _, stage in updates[kind[0]].stages()) for kind in found}
    return {kind: _Kind(costs[kind], found[kind]) for kind in sorted(found)}


def _units(kinds: Collection[_Kind]) -> float:
    costliest = max((kind.cost for kind in kinds), default=0.0)
    return sum(kind.total for kind in kinds) / costliest if costliest else 0.0


def _waves(recipe: Recipe, path: str, refreshes: float, at_once: int | None) -> int | None:
    """The fewest waves that a cadence of an update asks for; None: none does."""
    cadences = [stage.cadence() for _, stage in recipe.updates()[path].stages()]
    waves = [cadence.waves(refreshes, at_once) for cadence in cadences if cadence is not None and cadence.period != 1]
    return min((count for count in waves if count is not None), default=None)


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """What names are sorted by: numbers in them count as numbers, so that `layers.2` comes before `layers.10`."""
    return (*((text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)), (name, 0))
