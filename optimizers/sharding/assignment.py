"""How the parameters of a group are divided over ranks: who owns which block, and what stays where it is."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from eigengraft.distributed.distribution import Distribution
from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.ownership import Loads, assign
from eigengraft.distributed.rank_group import RankGroup, mesh_group
from eigengraft.numerics import compute_dtype
from eigengraft.quantization import choose

from ..recipe.recipe import Recipe, Route
from ..recipe.routing import ParamInfo
from ..recipe.slot_keys import slot_keys
from .cost_model import block_cost

REPLICATED = "replicated"
"""The place of plain parameters that every rank has."""


@dataclass(frozen=True)
class ParamPlacement:
    """Of one parameter. owners: rank of each block by key; None: every rank updates the part that it holds itself."""

    layout: Layout
    owners: dict[int, int] | None


@dataclass
class Assignment:
    """Of the parameters of one group that the same ranks hold. placements: by `id` of the parameter. names: with
    dtypes."""

    rank_group: RankGroup
    placements: dict[int, ParamPlacement] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def place(parameter: Tensor, distribution: Distribution) -> Any:
    """What parameters must have in common to be exchanged together: a device mesh, REPLICATED, or None for neither.

    Raises ValueError if the recipe says that this parameter must be of another kind.
    """
    sharded = isinstance(parameter, DTensor)
    if distribution.mode in ("replicated", "local") and sharded:
        raise ValueError(f"distribution.mode: '{distribution.mode}' takes plain tensors, got a DTensor")
    if distribution.mode == "sharded" and not sharded:
        raise ValueError("distribution.mode: 'sharded' takes DTensors, got a plain tensor")
    if sharded:
        return parameter.device_mesh  # type: ignore[attr-defined]
    alone = distribution.mode == "local" or not (dist.is_available() and dist.is_initialized())
    return None if alone or dist.get_world_size() == 1 else REPLICATED


class Assignments:
    """Of all groups of an optimizer, in order: what earlier groups have laid on a rank counts in later ones."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._peers: dict[Any, RankGroup] = {}
        self._loads: dict[Any, Loads] = {}
        self._groups: list[dict[Any, Assignment]] = []
        self._before: list[dict[Any, Loads]] = []

    def place(self, parameter: Tensor) -> Any:
        """See `place`."""
        return place(parameter, self.recipe.distribution)

    def of(self, index: int, where: Any) -> Assignment | None:
        """The assignment of those parameters of a group that have that place; None if it is that of this rank alone."""
        return None if where is None else self._groups[index][where]

    def add(self, parameters: Sequence[Tensor], facts: Sequence[ParamInfo], names: Sequence[str]) -> None:
        """Divides the next group; the frozen too, so that owners stay who they are when one is thawed."""
        paths = [self.recipe.route(fact)[0] for fact in facts]
        assignments: dict[Any, Assignment] = {}
        self._groups.append(assignments)
        for parameter, path, name in zip(parameters, paths, names, strict=True):
            try:
                where = self.place(parameter)
                if where is not None:
                    self._add(assignments, where, parameter, path)
                    assignments[where].names.append(f"{name} {parameter.dtype}")
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        self._before.append(copy.deepcopy(self._loads))
        for where, assignment in assignments.items():
            assign_owners(assignment, parameters, paths, self.recipe, self._loads[where])

    def _add(self, assignments: dict[Any, Assignment], where: Any, parameter: Tensor, path: str) -> None:
        if where not in self._peers:
            group = dist.group.WORLD if where == REPLICATED else mesh_group(where)
            self._peers[where] = RankGroup(group, self.recipe.distribution.timeout)
            self._loads[where] = Loads(self._peers[where].size)
        rank_group, rule = self._peers[where], self.recipe.updates()[path]
        layout = layout_of(parameter, rank_group)
        if rule.constraints and not layout.replicated:
            raise ValueError(f"{path or 'recipe'}.constraints: whole parameters are required, got a sharded one")
        stays = entrywise(rule, path, parameter, layout, self.recipe)
        assignments.setdefault(where, Assignment(rank_group)).placements[id(parameter)] = ParamPlacement(
            layout, None if stays else {}
        )

    def forget(self, index: int) -> None:
        """Takes back the groups from that one on, after a failure."""
        self._loads = next(iter(self._before[index:]), self._loads)
        del self._groups[index:], self._before[index:]

    def agree(self, index: int, group: Mapping[str, Any]) -> None:
        """Raises ValueError on every rank if ranks were not given the same recipe and param group."""
        for assignment in self._groups[index].values():
            parameters = [(placement.layout.shape, placement.owners) for placement in assignment.placements.values()]
            mine = {
                "recipe": self.recipe.to_json(),
                "parameters": repr((assignment.names, parameters)),
                "requires_grad": repr([parameter.requires_grad for parameter in group["params"]]),
                "lr and weight_decay": repr([float(group[key]) for key in ("lr", "weight_decay")]),
            }
            digests = {key: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for key, text in mine.items()}
            found = assignment.rank_group.all_gather_object(digests, f"agreement on param group {index}")
            for key in mine:
                others = [rank for rank, other in enumerate(found) if other[key] != found[0][key]]
                if others:
                    raise ValueError(
                        f"param group {index}: all ranks must have the same {key}, got others than rank 0's on "
                        f"{'ranks' if len(others) > 1 else 'rank'} {', '.join(map(str, others[:8]))}"
                    )


def layout_of(parameter: Tensor, rank_group: RankGroup) -> Layout:
    """What each rank of the group holds of a parameter."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Layout.whole(shape, rank_group.size)
    mesh = parameter.device_mesh
    layout = Layout.of(shape, tuple(mesh.mesh.shape), parameter.placements)
    ranks = [dist.get_group_rank(rank_group.group, rank) for rank in mesh.mesh.flatten().tolist()]
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    if order != sorted(order):
        layout = Layout(shape, tuple(layout.boxes[i] for i in order), tuple(layout.replicas[i] for i in order))
    held = tuple(parameter.to_local().shape)
    if held != layout.boxes[rank_group.rank].shape:
        raise ValueError(
            f"placement: {parameter.placements} of a tensor of shape {shape} on a mesh of shape "
            f"{tuple(mesh.mesh.shape)} should leave {layout.boxes[rank_group.rank].shape} here, got {held}"
        )
    return layout


def entrywise(rule: Recipe | Route, path: str, parameter: Tensor, layout: Layout, recipe: Recipe) -> bool:
    """Whether a parameter is updated where its parts are: nothing of the update mixes entries, and no part is held
    twice, so that its state is divided as well as the parameter."""
    grids = list(rule.blocking.grids(layout.shape))
    if layout.copies > 1 or len(layout.boxes) == 1 or any(p.merged != layout.shape or not p.whole for p in grids):
        return False
    slots = [
        choose(recipe.storage, key.rpartition("/")[0], key.rpartition("/")[2], slot) is None
        and slot.shape == layout.shape
        for key, slot in slot_keys(rule, path, layout.shape).items()
    ]
    return all(slots) and all(stage.entrywise() and not stage.requires for _, stage in rule.stages())


def assign_owners(
    assignment: Assignment, parameters: Sequence[Tensor], paths: Sequence[str], recipe: Recipe, loads: Loads
) -> None:
    """Fills in the owners, after what stays at home. What must stay together, because a stage spans a parameter, is
    one item."""
    items: list[tuple[dict[int, int], list[int], float, float]] = []
    for parameter, path in zip(parameters, paths, strict=True):
        placement = assignment.placements.get(id(parameter))
        if placement is None:
            continue
        rule, dtype = recipe.updates()[path], compute_dtype(parameter.dtype)
        if placement.owners is None:
            cost = block_cost(rule, path, placement.layout.shape, dtype, recipe.storage)
            work = recipe.distribution.measured(placement.layout.shape, cost.work)
            loads.carry(placement.layout.fractions, work, float(cost.state))
            continue
        whole = any(stage.spans_parameter() for _, stage in rule.stages())
        for grid in rule.blocking.grids(tuple(parameter.shape)):
            cost = block_cost(rule, path, grid.tile, dtype, recipe.storage)
            work = recipe.distribution.measured(grid.tile, cost.work)
            groups = [list(grid.keys)] if whole else [[key] for key in grid.keys]
            items += [(placement.owners, keys, work * len(keys), float(cost.state * len(keys))) for keys in groups]
    ranks = assign([work for _, _, work, _ in items], [state for _, _, _, state in items], loads)
    for (owners, keys, _, _), rank in zip(items, ranks, strict=True):
        owners.update(dict.fromkeys(keys, rank))
