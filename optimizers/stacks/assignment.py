"""Assignment of param groups to ranks: which ranks share each parameter, and who owns which block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from eigengraft.blocking.blocks import ONE_TENSOR
from eigengraft.distributed.balance import Balance, Loads
from eigengraft.distributed.distribution import Distribution
from eigengraft.distributed.layouts import is_dtensor
from eigengraft.distributed.rank_group import RankGroup, mesh_group
from eigengraft.numerics import fake_mode

from ..param_groups import flat_piece
from ..recipe.recipe import Recipe
from ..recipe.routing import ParamInfo
from .owners import assign_owners, common_interval, warn_of_waiting
from .phases import ParamKey, Phases, refresh_phases
from .placement import ParamSpec, layout_of, lr_factors, place
from .rank_checks import check_construction

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
