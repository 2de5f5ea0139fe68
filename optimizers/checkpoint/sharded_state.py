"""State of a parameter set that is divided over ranks, as checkpoints hold it: no key or shape depends on a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from eigengraft.distributed.layouts import divided, is_dtensor, local
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.distributed.resharding import collect, spread

from ..state.composed import ComposedOptimizer
from ..state.manifest import (
    empty_state,
    is_divided,
    layout_of_parameter,
    leading_axes,
    manifest,
    numbers_of_holders,
)
from ..state.shown_state import host_state, own_state
from ..step.step import ParamSet
from ..write.averaging import Mode

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


class ShardedStateDict(dict[str, Any]):
    """A state dict of which this rank holds one shard. torch.distributed.checkpoint takes it; pickling is refused.

    A pickle would pass for the state of all ranks.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "state_dict: this is one rank's part of the state, which would be saved as if it were the whole; call "
            "optimizer.full_state_dict() on every rank and save that on one, or use torch.distributed.checkpoint with "
            "get_optimizer_state_dict"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedStateDict:
        return ShardedStateDict({key: deepcopy(value, memo) for key, value in self.items()})


def sharded_state(param_set: ParamSet) -> list[dict[str, Tensor]]:
    """The state of each parameter as DTensors of the shapes that a checkpoint has; all ranks call it."""
    rank_group = _rank_group(param_set)
    entries = manifest(param_set)
    where = [(p, key) for p, own in enumerate(entries) for key, entry in own.items() if entry.owner is not None]
    owned = {}
    views = param_set.views()
    found: list[dict[str, Tensor]] = [{} for _ in entries]
    for index, (position, key) in enumerate(where):
        if entries[position][key].owner == rank_group.rank:
            owned[index] = views[position][key]
    flat = [entries[position][key] for position, key in where]
    device = param_set.local[0].device
    sent = spread(rank_group, flat, owned, rank_group.mesh(device), device)
    for (position, key), value in zip(where, sent, strict=True):
        found[position][key] = value
    followed = numbers_of_holders(param_set, views)
    for position, state in enumerate(views):
        here = {**empty_state(param_set, position), **state, **followed.get(position, {})}
        for key, entry in entries[position].items():
            if entry.owner is None:
                found[position][key] = _as_parameter(here[key], param_set, position)
    return found


def local_state(
    param_set: ParamSet, values: Mapping[Tensor, Mapping[str, Tensor]], mode: Mode
) -> dict[Tensor, dict[str, Any]]:
    """The tensors that this rank holds, by parameter, of a checkpoint's state that fits; all ranks call it.

    Parameters without saved state have none here either.
    """
    rank_group = _rank_group(param_set)
    entries = manifest(param_set, mode)
    saved = [bool(own_state(values[parameter])) for parameter in param_set.parameters]
    entries = [own if there else {} for own, there in zip(entries, saved, strict=True)]
    where = [(p, key) for p, own in enumerate(entries) for key, entry in own.items() if entry.owner is not None]
    flat = [entries[position][key] for position, key in where]
    device = param_set.local[0].device
    shared = [_evenly(values[param_set.parameters[position]][key], rank_group, device) for position, key in where]
    found: dict[Tensor, dict[str, Any]] = {p: host_state(values[p]) for p in param_set.parameters}
    for index, value in collect(rank_group, flat, shared, device).items():
        position, key = where[index]
        found[param_set.parameters[position]][key] = value
    for position, (parameter, own) in enumerate(zip(param_set.parameters, param_set.views(mode), strict=True)):
        for key, entry in entries[position].items():
            if entry.owner is None and key in own:
                found[parameter][key] = _shard(values[parameter][key], param_set, position, own[key])
    return found


def shard_hook(optimizer: ComposedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """State dict hook: replaces state that is divided over ranks, of which this rank shows its own, by DTensors."""
    groups, index = zip(optimizer.param_groups, state_dict["param_groups"], strict=True), dict[int, Any]()
    for group, saved in groups:
        index.update(zip(map(id, group["params"]), saved["params"], strict=True))
    shared = [param_set for param_set in optimizer.param_sets if param_set.rank_group is not None]
    for param_set in shared:
        for parameter, state in zip(param_set.parameters, sharded_state(param_set), strict=True):
            state_dict["state"][index[id(parameter)]] = {**state, **host_state(optimizer.state[parameter])}
    return ShardedStateDict(state_dict) if shared else None


def gathered(state_dict: Any) -> Any:
    """A state dict with plain tensors on the CPU in place of DTensors; all ranks call it."""
    if isinstance(state_dict, Mapping):
        return {key: gathered(value) for key, value in state_dict.items()}
    if isinstance(state_dict, (list, tuple)):
        return type(state_dict)(gathered(value) for value in state_dict)
    return full_tensor(state_dict).detach().cpu() if isinstance(state_dict, Tensor) else state_dict


def full_tensor(x: Any) -> Any:
    """A DTensor as a plain tensor, which all its ranks must ask for; anything else as it is."""
    return x.full_tensor() if is_dtensor(x) else x


def _rank_group(param_set: ParamSet) -> RankGroup:
    assert param_set.rank_group is not None
    return param_set.rank_group


def _as_parameter(tensor: Tensor, param_set: ParamSet, position: int) -> Tensor:
    if not is_divided(tensor, param_set, position):
        return tensor
    parameter = param_set.parameters[position]
    lead = leading_axes(tensor, parameter)
    mesh, placements = _division(param_set, position, lead)
    own, size = tuple(tensor.shape[:lead]), parameter.numel()
    strides = [math.prod(own[axis + 1 :]) * size for axis in range(lead)]
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor.clone(),  # of its own storage: asynchronous saving cannot stage rows of a stack
        mesh,
        placements,
        run_check=False,
        shape=torch.Size((*own, *parameter.shape)),
        stride=(*strides, *parameter.stride()),
    )


def _division(param_set: ParamSet, position: int, lead: int) -> tuple[DeviceMesh, list[Placement]]:
    """How state with an entry for each entry of a parameter is divided: as the parameter is, or what copies update.

    lead: number of axes of the state before those of the parameter.
    """
    parameter, placement = param_set.parameters[position], param_set.specs[position].placement
    assert placement is not None
    if is_dtensor(parameter) and not (placement.parts and placement.layout.replicated):
        mesh, placements = parameter.device_mesh, parameter.placements
        cut = None if placement.parts is None else divided(tuple(parameter.shape), tuple(mesh.mesh.shape), placements)
        return mesh, [_after(lead, one) for one in cut or placements]
    from torch.distributed.tensor import Shard

    return _rank_group(param_set).mesh(parameter.device), [Shard(lead)]


def _after(lead: int, placement: Placement) -> Placement:
    """A placement of a tensor as one of a tensor that has more axes before those."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + lead, split_factor=placement.split_factor)
    return Shard(placement.dim + lead) if isinstance(placement, Shard) else placement


def _evenly(value: Tensor, rank_group: RankGroup, device: torch.device) -> Tensor:
    """A DTensor cut along its first axis over the ranks, whatever it was; a plain tensor as it is."""
    if not is_dtensor(value):
        return value
    mesh = rank_group.mesh(device)
    same = value.device_mesh == mesh and len(value.placements) == 1 and value.placements[0].is_shard(0)
    return value if same else value.full_tensor()


def _shard(value: Tensor, param_set: ParamSet, position: int, like: Tensor) -> Tensor:
    """The shard that this rank holds of a value divided as its parameter is; any other value as a plain tensor."""
    if not is_divided(like, param_set, position):
        return local(value)
    if is_dtensor(value):
        mesh, placements = _division(param_set, position, leading_axes(like, param_set.local[position]))
        if (value.device_mesh, list(value.placements)) == (mesh, placements):
            return value.to_local()
        value = value.full_tensor()
    box = layout_of_parameter(param_set, position).boxes[_rank_group(param_set).rank]
    index: tuple[Any, ...] = (..., *(slice(a, b) for a, b in zip(box.start, box.stop, strict=True)))
    return value[index]
