"""Specifications of parameters, the ranks that hold each parameter, and the phases of its blocks.

The phase of a block is the fraction of a refresh interval at which the block is refreshed.

Specifications, ranks and phases follow from the recipe and from names, shapes and layouts of parameters, not from
values. Every rank therefore computes the same result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking import Matrices
from eigengraft.blocking.blocks import ONE_TENSOR
from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.numerics import is_dtensor
from eigengraft.preconditioners.cadence import ROUNDED, Cadence
from eigengraft.quantization import choose_codec
from eigengraft.signals import known_signals, requested

from ..recipe.recipe import Recipe, Route, slot_keys


class ParamKey(NamedTuple):
    """The properties of a parameter that determine at which step of a refresh interval each of its blocks is refreshed.

    name: name of the parameter.
    path: path of the parameter's update in the recipe, "" or "routes.<name>".
    shape: shape of the full parameter.
    matrices: division of its entries into matrices.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    matrices: Matrices = ONE_TENSOR


Phases = Mapping[ParamKey, NDArray[np.float64]]
"""The phases of each parameter: an array of numbers in [0, 1), indexed by block key.

The phase of a block is the fraction of a refresh interval at which the block is due for a refresh.
"""


class _Kind(NamedTuple):
    """Blocks of one shape under one update.

    cost: cost of one refresh of a block, summed over the stages of the update.
    blocks: pairs of a parameter and the keys of its blocks.
    """

    cost: float
    blocks: list[tuple[ParamKey, tuple[int, ...]]]

    @property
    def total(self) -> float:
        return self.cost * sum(len(keys) for _, keys in self.blocks)


def refreshes(rule: Recipe | Route, block: tuple[int, ...]) -> Iterator[tuple[Cadence, float]]:
    """Yield (cadence, cost of one refresh of the block) for each stage that has refreshes.

    The cost is the `refresh_cost` of the stage's traits.

    block: shape of the block.
    """
    for _, stage in rule.stages():
        cadence = stage.cadence()
        if cadence is not None:
            yield cadence, stage.cached_traits(block).refresh_cost


def refresh_phases(recipe: Recipe, parameters: Iterable[ParamKey]) -> Phases:
    """Return the phases of all blocks of all parameters of an optimizer.

    A block's phase is the fraction of a refresh interval at which the block is refreshed. To compute phases, the blocks
    are sorted by the path of their update rule in the recipe, then by their shape, by the name of their parameter and
    by block key (the number of the block in its parameter). The phase of a block is (B + b / 2) / C: b is the cost of a
    refresh of the block, B that of all blocks before it in the sorted order, and C that of all blocks. Equal parts of a
    refresh interval then have equal costs, as nearly as indivisible blocks allow.

    A cadence may demand a least amount of refresh work for each step that has refreshes (`min_wave_work`). An interval
    then has n such steps (`Cadence.waves`), and phases are rounded down to multiples of 1 / n. Blocks that are
    neighbors in the sorted order are then refreshed in the same step.

    Phases do not depend on ranks, or on the order or the grouping of parameters. Blocks of one update rule and shape
    that are refreshed in the same step are neighbors in the sorted order.
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
        # A wave is the set of refreshes of one step. If several cadences of an update set a number of waves, the
        # smallest number applies.
        numbers = [cadence.waves(units) for cadence in recipe.rules()[path].cadences().values()]
        done, waves = 0, min((number for number in numbers if number is not None), default=None)
        for param, keys in kind.blocks:
            spread = (before + kind.cost * (np.arange(done, done + len(keys)) + 0.5)) / total
            phases[param][list(keys)] = spread if waves is None else np.floor(spread * waves + ROUNDED) / waves
            done += len(keys)
        before += kind.cost * done
    return phases


def refresh_units(recipe: Recipe, parameters: Iterable[ParamKey]) -> float:
    """Return the cost of refreshing every block once, divided by that of the costliest block; 0 without refreshes."""
    return _units(_kinds(recipe, set(parameters)).values())


def _kinds(recipe: Recipe, parameters: Collection[ParamKey]) -> dict[tuple[str, tuple[int, ...]], _Kind]:
    """Return the blocks by (path of the update in the recipe, shape of the block).

    The pairs, and the blocks of each pair, are in the order in which blocks are refreshed.
    """
    rules = recipe.rules()
    found: dict[tuple[str, tuple[int, ...]], list[tuple[ParamKey, tuple[int, ...]]]] = {}
    for param in sorted(parameters, key=lambda param: (natural_order(param.name), *param[1:3])):
        for grid in rules[param.path].blocking.grids(param.shape, param.matrices):
            found.setdefault((param.path, grid.shape), []).append((param, grid.keys))
    costs = {(path, block): sum(cost for _, cost in refreshes(rules[path], block)) for path, block in found}
    return {kind: _Kind(costs[kind], found[kind]) for kind in sorted(found)}


def _units(kinds: Collection[_Kind]) -> float:
    costliest = max((kind.cost for kind in kinds), default=0.0)
    return sum(kind.total for kind in kinds) / costliest if costliest else 0.0


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """Return a sort key of a name in which digits are numbers, so that `layers.2` precedes `layers.10`."""
    return (*((text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)), (name, 0))


@dataclass(frozen=True)
class ParamPlacement:
    """The ranks that hold a parameter and the ranks that update it.

    layout: entries of the parameter that each rank holds.
    owners: by block key, the rank that owns the block: it computes the update and sends it to the other ranks. None: no
        block has an owner. Each rank updates entries that it holds, and no blocks are sent.
    parts: for a parameter without owners whose entries several ranks hold: the entries that each rank updates. After
        the update these ranks send their parts to each other. None: each rank updates all entries that it holds.
    """

    layout: Layout
    owners: dict[int, int] | None
    parts: Layout | None = None

    @property
    def updated(self) -> Layout:
        """For a parameter without owners: the entries that each rank updates, and whose state it stores."""
        return self.layout if self.parts is None else self.parts


@dataclass(frozen=True)
class ParamSpec:
    """The properties of a parameter that decide how it is cut into blocks and where the blocks are computed.

    name: name of the parameter in errors and counts. The seeds of the parameter's random numbers are hashes of it.
    path: path of its update in the recipe.
    shape: shape of the full parameter. A complex parameter has the shape `[..., 2]`, with pairs (real, imaginary).
    dtype: dtype of the parameter; for a complex parameter, the dtype of its real and imaginary parts.
    device: device of the parameter.
    placement: ranks that hold and update the parameter. None: this process updates the full parameter, independently of
        other ranks.
    matrices: division of the parameter's entries into matrices.
    frozen: True if the parameter required no gradient when its param group was added.
    width_factors: for each matrix of the parameter, the number by which its direction is multiplied. (): no factors.
    group: index of the parameter's param group.
    rank_group: ranks that share the parameter. None: this process updates the parameter alone.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    placement: ParamPlacement | None = None
    matrices: Matrices = ONE_TENSOR
    frozen: bool = False
    width_factors: tuple[float, ...] = ()
    group: int = 0
    rank_group: RankGroup | None = None

    @property
    def placed(self) -> ParamPlacement:
        """The placement of a parameter that ranks share. Must not be read for other parameters, which have none."""
        assert self.placement is not None
        return self.placement

    @property
    def divided(self) -> bool:
        """True if some ranks hold only a part of the parameter, or none of its entries."""
        return self.placement is not None and not self.placement.layout.replicated

    @property
    def without_owners(self) -> bool:
        """True if the blocks have no owners. Each rank then updates entries that it holds, and sends no blocks."""
        return self.placement is not None and self.placement.owners is None

    @property
    def key(self) -> ParamKey:
        """The properties that determine in which steps of a refresh interval the blocks are refreshed."""
        return ParamKey(self.name, self.path, self.shape, self.matrices)


def layout_of(parameter: Tensor, rank_group: RankGroup) -> Layout:
    """Return the entries of a parameter that each rank of a group holds.

    Raises ValueError if the shape of a DTensor's local tensor does not agree with its placements.
    """
    shape = tuple(parameter.shape)
    if not is_dtensor(parameter):
        return Layout.replicate(shape, rank_group.size)
    mesh = parameter.device_mesh
    layout = Layout.from_placements(shape, tuple(mesh.mesh.shape), parameter.placements)
    ranks = [dist.get_group_rank(rank_group.group, rank) for rank in mesh.mesh.flatten().tolist()]
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    if order != sorted(order):
        layout = layout.reordered(order)
    held = tuple(parameter.to_local().shape)
    if held != layout.boxes[rank_group.rank].shape:
        raise ValueError(
            f"placement: {parameter.placements} of a tensor of shape {shape} on a mesh of shape "
            f"{tuple(mesh.mesh.shape)} require a shard of shape {layout.boxes[rank_group.rank].shape} on this rank, "
            f"got {held}"
        )
    return layout


def place(recipe: Recipe, path: str, layout: Layout, matrices: Matrices = ONE_TENSOR) -> ParamPlacement:
    """Return the placement of a parameter with a given layout. Its blocks have no owners yet.

    path: path of the parameter's update in the recipe.
    matrices: division of the parameter's entries into matrices.

    Raises ValueError if a constraint of the update needs whole parameters but the layout shards the parameter, or if
    the constraint needs whole rows but the layout shards rows.
    """
    for constraint in recipe.rules()[path].constraints if not layout.replicated else ():
        if not constraint.shardable(layout.whole_rows):
            whole, got = "whole parameters", "a sharded parameter"
            if constraint.shardable(True):
                whole, got = "whole rows", "a parameter with sharded rows"
            raise ValueError(
                f"{constraint.path_in(path or 'recipe')}: the constraint needs {whole}, got {got}; remove the "
                "constraint or change the sharding"
            )
    if not _updates_in_place(recipe, path, layout.shape, matrices):
        return ParamPlacement(layout, {})
    if layout.copies == 1:
        return ParamPlacement(layout, None)
    # An averaging needs the updates of all entries that a rank holds, so ranks with equal entries do not divide them.
    if layout.parts is not None and recipe.averaging is None:
        return ParamPlacement(layout, None, layout.parts)
    return ParamPlacement(layout, {})


def _updates_in_place(recipe: Recipe, path: str, shape: tuple[int, ...], matrices: Matrices) -> bool:
    """Return True if a rank can update entries of the parameter without reading the entries of other ranks.

    This requires that the update mixes no entries, and that each slot has one entry for each entry of the parameter.
    The state is then sharded as evenly as the parameter.

    path: path of the parameter's update in the recipe.
    matrices: division of the parameter's entries into matrices.
    """
    rule = recipe.rules()[path]
    if rule.constraints:  # norms of constrained parameters need sums over all ranks
        return False
    if any(grid.shape != shape or not grid.is_parameter for grid in rule.blocking.grids(shape, matrices)):
        return False
    slots = [
        choose_codec(recipe.storage, key, slot) is None and slot.shape == shape
        for key, slot in slot_keys(rule, path, shape).items()
    ]
    known = known_signals()
    asked = {known[name].extent for _, stage in rule.stages() for name in requested(stage)}
    return all(slots) and not asked & {"parameter", "partner"} and rule.entrywise()
