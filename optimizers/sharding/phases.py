"""Phases: where in a refresh interval each block is due, found from names and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..recipe.recipe import Recipe


class ParamKey(NamedTuple):
    """What the phases of a parameter follow from: its name, the path of its update, the shape of the full parameter."""

    name: str
    path: str
    shape: tuple[int, ...]


Phases = Mapping[ParamKey, NDArray[np.float64]]
"""The phases of each parameter's blocks in [0, 1), by block key."""


def refresh_phases(recipe: Recipe, parameters: Iterable[ParamKey]) -> Phases:
    """The phases of all blocks of all parameters of an optimizer.

    A block's phase is the share of the refresh cost of all blocks before it: equal parts of a refresh interval cost the
    same. Blocks are ordered by path and shape, then by name and key, so that neither the order nor the grouping of the
    parameters, nor where they lie, enters a number; blocks of one path and shape that are due together are neighbours.
    """
    updates = recipe.updates()
    found: dict[tuple[str, tuple[int, ...]], list[tuple[ParamKey, tuple[int, ...]]]] = {}
    counts: dict[ParamKey, int] = {}
    for param in sorted(set(parameters), key=lambda param: (natural_order(param.name), *param[1:])):
        counts[param] = 0
        for grid in updates[param.path].blocking.grids(param.shape):
            found.setdefault((param.path, grid.tile), []).append((param, grid.keys))
            counts[param] += len(grid.keys)
    phases = {param: np.zeros(count) for param, count in counts.items()}
    costs = {(path, block): _cost(recipe, path, block) for path, block in sorted(found)}
    total = sum(cost * sum(len(keys) for _, keys in found[kind]) for kind, cost in costs.items())
    before = 0.0
    for kind, cost in costs.items():
        done = 0
        for param, keys in found[kind] if total else ():
            phases[param][list(keys)] = (before + cost * np.arange(done, done + len(keys))) / total
            done += len(keys)
        before += cost * done
    return phases


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """What names are sorted by: numbers in them count as numbers, so that `layers.2` comes before `layers.10`."""
    return (*((text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)), (name, 0))


def _cost(recipe: Recipe, path: str, block: tuple[int, ...]) -> float:
    return float(sum(stage.refresh_cost(block) for _, stage in recipe.updates()[path].stages()))
