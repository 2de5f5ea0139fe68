"""PLACEMENT"""

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

from eigengraft.blocking import Batches, Matrices, Modules
from eigengraft.blocking.blocks import ONE_TENSOR
from eigengraft.distributed.layouts import Layout, is_dtensor
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.preconditioners.cadence import ROUNDED, Cadence
from eigengraft.quantization import choose
from eigengraft.signals import known_signals, requested

from ..recipe.recipe import Recipe, Route, slot_keys
from ..recipe.routing import ParamInfo


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


@dataclass(frozen=True)
class ParamPlacement:
    """Where one parameter lies and which ranks update it.

    layout: what each rank holds of the parameter.
    owners: rank that owns each block, by block key; None: every rank updates entries in place, and no block travels.
    parts: what each rank updates in place of what several ranks hold, who are then sent each other's parts; None: a
        rank updates in place what it holds.
    """

    layout: Layout
    owners: dict[int, int] | None
    parts: Layout | None = None

    @property
    def updated(self) -> Layout:
        """What each rank updates in place, which is where the state of such an update lies."""
        return self.layout if self.parts is None else self.parts


@dataclass(frozen=True)
class ParamSpec:
    """What decides how a parameter is cut into blocks and where these are computed; values play no role.

    name: what errors and counts call the parameter; random numbers are seeded by it.
    path: path of the parameter's update in the recipe.
    shape: shape of the full parameter, on however many ranks it lies; of a complex one as real pairs `[..., 2]`.
    dtype: dtype of the parameter; of the real pairs of a complex one.
    device: device of the parameter.
    placement: where it lies among ranks; None: this process updates all of it, whatever other ranks do.
    matrices: which of its entries form a matrix.
    frozen: whether it had no gradients when the optimizer was made.
    lr_factors: what the directions of each of its matrices are multiplied by; (): by nothing.
    group: number of its param group.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    placement: ParamPlacement | None = None
    matrices: Matrices = ONE_TENSOR
    frozen: bool = False
    lr_factors: tuple[float, ...] = ()
    group: int = 0

    @property
    def divided(self) -> bool:
        """Whether some ranks hold only a part of the parameter, or nothing of it."""
        return self.placement is not None and not self.placement.layout.replicated

    @property
    def in_place(self) -> bool:
        """Whether every rank updates entries of the parameter in place, so that no block of it travels."""
        return self.placement is not None and self.placement.owners is None

    @property
    def key(self) -> ParamKey:
        """What the phases of its blocks follow from."""
        return ParamKey(self.name, self.path, self.shape, self.matrices)


def layout_of(parameter: Tensor, rank_group: RankGroup) -> Layout:
    """What each rank of a group holds of a parameter."""
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
            f"{tuple(mesh.mesh.shape)} should leave {layout.boxes[rank_group.rank].shape} here, got {held}"
        )
    return layout


def lr_factors(recipe: Recipe, info: ParamInfo) -> tuple[float, ...]:
    """What the directions of each matrix of a parameter are multiplied by, so that steps fit other widths too; (): by
    nothing. Raises ValueError where such a factor would have no effect, or none is known."""
    if recipe.lr_scale is None or 0 in info.shape:
        return ()
    path = recipe.route(info)[0]
    rule, where = recipe.updates()[path], f"{path}." if path else ""
    if rule.after_decay:
        raise ValueError(f"{where}after_decay: an update without it is required with lr_scale")
    for constraint in rule.constraints:
        if constraint.sets_length():
            label = f"{where}constraints.{constraint.label}"
            raise ValueError(f"{label}: sets the length of every update, so that lr_scale has no effect; remove one")
    matrices = recipe.view_of(info).matrices
    if rule.entrywise():  # their blocks are not cut by matrices, all of which have as many inputs
        told = info.facts.convolution is not None and isinstance(rule.view, Batches)
        matrices = (Modules(heads=False) if told else rule.view).of(info.shape, info.facts).matrices
    shapes = list(matrices.each(info.shape)) if info.shape else [()]
    found = {m: recipe.lr_scale.factor(rule.update, info.role, m, f"{where}update") for m in dict.fromkeys(shapes)}
    return tuple(found[shape] for shape in shapes)


def place(recipe: Recipe, path: str, layout: Layout, matrices: Matrices = ONE_TENSOR) -> ParamPlacement:
    """The placement of a parameter of that layout before its blocks have owners.

    Raises ValueError where the update needs more of the parameter in one place than the layout gives.
    """
    for constraint in recipe.updates()[path].constraints if not layout.replicated else ():
        if not constraint.shardable(layout.whole_rows):
            where = f"{path or 'recipe'}.constraints.{constraint.label}"
            kind = "rows" if constraint.shardable(True) else "parameters"
            raise ValueError(f"{where}: whole {kind} are required, got a parameter whose {kind} are sharded")
    if not _updates_in_place(recipe, path, layout.shape, matrices):
        return ParamPlacement(layout, {})
    if layout.copies == 1:
        return ParamPlacement(layout, None)
    if layout.parts is not None and recipe.averaging is None:  # else a rank needs the others' parts between steps
        return ParamPlacement(layout, None, layout.parts)
    return ParamPlacement(layout, {})


def _updates_in_place(recipe: Recipe, path: str, shape: tuple[int, ...], matrices: Matrices) -> bool:
    """Whether a rank can update any entries alone: the update mixes no entries, and has one slot entry for each, so
    that the state is divided as evenly as the parameter."""
    rule = recipe.updates()[path]
    if rule.constraints:  # the norms of which all ranks take together
        return False
    if any(grid.shape != shape or not grid.is_parameter for grid in rule.blocking.grids(shape, matrices)):
        return False
    slots = [
        choose(recipe.storage, key, slot) is None and slot.shape == shape
        for key, slot in slot_keys(rule, path, shape).items()
    ]
    known = known_signals()
    asked = {known[name].extent for _, stage in rule.stages() for name in requested(stage)}
    return all(slots) and not asked & {"parameter", "partner"} and rule.entrywise()
