"""The state of a parameter set that is divided over ranks, as checkpoints hold it: no key and no shape knows of a
rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from eigengraft.blocking import BlockGrid
from eigengraft.distributed.layouts import Layout, local
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.distributed.resharding import Entry, collect, spread
from eigengraft.numerics import compute_dtype
from eigengraft.stacks import Stack

from ..apply.mode import Mode
from ..engine.param_set import ParamSet
from ..engine.stack_state import StackState
from ..recipe.slot_keys import slot_keys


class ShardedStateDict(dict[str, Any]):
    """A state dict of which this rank has its part only. It can be read and given to torch.distributed.checkpoint, but
    not be pickled: a file of it would pass for the whole."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "state_dict: this is one rank's part of the state, which would be saved as if it were the whole; call "
            "optimizer.full_state_dict() on every rank and save that on one, or use torch.distributed.checkpoint with "
            "get_optimizer_state_dict"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedStateDict:
        return ShardedStateDict({key: deepcopy(value, memo) for key, value in self.items()})


def manifest(param_set: ParamSet, mode: Mode | None = None) -> list[dict[str, Entry]]:
    """Every entry of the whole state of each parameter, by position and key."""
    entries: list[dict[str, Entry]] = [{} for _ in param_set.parameters]
    for block_group, template in zip(param_set.block_groups, _templates(param_set), strict=True):
        for block in block_group.blocks:
            for path, (shape, dtype) in template.items():
                entries[block.position][f"{block.grid.keys[0]}/{path}"] = Entry(shape, dtype, block.owner)
    for position, (state, parameter) in enumerate(zip(param_set.views(mode), param_set.parameters, strict=True)):
        for key, tensor in {**_empty_state(param_set, position), **state}.items():
            if key not in entries[position]:
                whole = _divided(tensor, param_set, position)
                entries[position][key] = Entry(tuple(parameter.shape if whole else tensor.shape), tensor.dtype)
    return entries


def visible_state(param_set: ParamSet) -> list[dict[str, Tensor]]:
    """What `optimizer.state` shows of each parameter: this rank's views, and empty tensors for what others own.

    The keys are the same on every rank; torch.distributed.checkpoint reads them there.
    """
    views = param_set.views()
    if param_set.rank_group is None:
        return views
    entries = manifest(param_set)
    return [
        {key: view[key] if key in view else torch.empty(0, dtype=entry.dtype) for key, entry in own.items()}
        for view, own in zip(views, entries, strict=True)
    ]


def sharded_state(param_set: ParamSet) -> list[dict[str, Tensor]]:
    """The whole state of each parameter as it stands in a checkpoint, of which each rank has its part. All call it."""
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
    for position, state in enumerate(views):
        here = {**_empty_state(param_set, position), **state}
        for key, entry in entries[position].items():
            if entry.owner is None:
                found[position][key] = _as_parameter(here[key], param_set, position)
    return found


def local_state(
    param_set: ParamSet, values: Mapping[Tensor, Mapping[str, Tensor]], mode: Mode
) -> dict[Tensor, dict[str, Tensor]]:
    """What this rank keeps of a whole state that fits, by parameter. All ranks call it."""
    rank_group = _rank_group(param_set)
    entries = manifest(param_set, mode)
    where = [(p, key) for p, own in enumerate(entries) for key, entry in own.items() if entry.owner is not None]
    flat = [entries[position][key] for position, key in where]
    device = param_set.local[0].device
    shared = [_evenly(values[param_set.parameters[position]][key], rank_group, device) for position, key in where]
    found: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in param_set.parameters}
    for index, value in collect(rank_group, flat, shared, device).items():
        position, key = where[index]
        found[param_set.parameters[position]][key] = value
    for position, (parameter, kept) in enumerate(zip(param_set.parameters, param_set.views(mode), strict=True)):
        for key, entry in entries[position].items():
            if entry.owner is None and key in kept:
                found[parameter][key] = _part(values[parameter][key], param_set, position, kept[key])
    return found


def shard_hook(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """State dict hook: puts the placements of what is divided over ranks in place of what this rank owns."""
    divided = False
    for group, param_sets, saved in zip(
        optimizer.param_groups, optimizer.param_sets.groups, state_dict["param_groups"], strict=True
    ):
        index = dict(zip(map(id, group["params"]), saved["params"], strict=True))
        for param_set in param_sets:
            if param_set.rank_group is not None:
                divided = True
                states = zip(param_set.parameters, sharded_state(param_set), strict=True)
                state_dict["state"].update({index[id(parameter)]: state for parameter, state in states})
    return ShardedStateDict(state_dict) if divided else None


def fill(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copies values into the state of a parameter. ValueError if they are what another rank shows of it."""
    for key, value in values.items():
        if value.shape != state[key].shape:
            raise ValueError(
                f"state '{key}': {tuple(state[key].shape)} is required, got {tuple(value.shape)}; a pickle of an "
                "optimizer that is divided over ranks is one rank's part, use torch.distributed.checkpoint"
            )
        state[key].copy_(value)


def gathered(state_dict: Any) -> Any:
    """A state dict with whole plain tensors on the CPU in place of DTensors; all ranks call it."""
    if isinstance(state_dict, Mapping):
        return {key: gathered(value) for key, value in state_dict.items()}
    if isinstance(state_dict, (list, tuple)):
        return type(state_dict)(gathered(value) for value in state_dict)
    return full_tensor(state_dict).detach().cpu() if isinstance(state_dict, Tensor) else state_dict


def full_tensor(x: Any) -> Any:
    """A DTensor as a plain tensor; all its ranks call it. Anything else as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def _rank_group(param_set: ParamSet) -> RankGroup:
    assert param_set.rank_group is not None
    return param_set.rank_group


def _layout(param_set: ParamSet, position: int) -> Layout:
    placement = param_set.specs[position].placement
    assert placement is not None
    return placement.layout


def _templates(param_set: ParamSet) -> Iterator[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """What one block of each block group keeps, as (shape, dtype) by "<stage path>/<slot>"; here may be no such
    block."""
    stack_states = {
        stack_state.block_group: stack_state
        for stack_state in param_set.stack_states
        if stack_state.block_group is not None
    }
    for index, block_group in enumerate(param_set.block_groups):
        stack_state = stack_states.get(index)
        if stack_state is None:
            path, shape, cpu = block_group.path, block_group.shape, torch.device("cpu")
            stack = Stack(shape, block_group.dtype, cpu, ((0, BlockGrid.single(shape)),))
            rule, storage = param_set.updates[path], param_set.recipe.storage
            stack_state = StackState(path, rule, stack, storage, np.zeros(1), np.zeros(1, dtype=np.int64))
        yield {path: (tuple(tensor.shape[1:]), tensor.dtype) for path, tensor in stack_state.tensors.items()}


def _empty_state(param_set: ParamSet, position: int) -> dict[str, Tensor]:
    """Empty state of a parameter that every rank updates in place, where this rank holds none of its entries."""
    spec, shard = param_set.specs[position], param_set.local[position]
    assert spec.placement is not None
    if spec.placement.owners is not None or shard.numel() or not math.prod(spec.shape):
        return {}
    slots = slot_keys(param_set.updates[spec.path], spec.path, spec.shape)
    dtype = compute_dtype(shard.dtype)
    return {f"0/{key}": shard.new_empty(shard.shape, dtype=slot.dtype or dtype) for key, slot in slots.items()}


def _divided(tensor: Tensor, param_set: ParamSet, position: int) -> bool:
    """Whether a tensor has an entry for each entry of a shard, so that it is divided as the parameter is."""
    same = tensor.shape == param_set.local[position].shape
    return same and tensor.ndim > 0 and not _layout(param_set, position).replicated


def _as_parameter(tensor: Tensor, param_set: ParamSet, position: int) -> Tensor:
    parameter = param_set.parameters[position]
    if not isinstance(parameter, DTensor) or not _divided(tensor, param_set, position):
        return tensor
    return DTensor.from_local(
        tensor.clone(),  # of its own storage: asynchronous saving cannot stage rows of a stack
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _evenly(value: Tensor, rank_group: RankGroup, device: torch.device) -> Tensor:
    """A DTensor cut along its first axis over the ranks, whatever it was; a plain tensor as it is."""
    if not isinstance(value, DTensor):
        return value
    mesh = rank_group.mesh(device)
    same = value.device_mesh == mesh and len(value.placements) == 1 and value.placements[0].is_shard(0)
    return value if same else value.full_tensor()


def _part(value: Tensor, param_set: ParamSet, position: int, like: Tensor) -> Tensor:
    """This rank's part of an entry that is divided as its parameter is, or the entry."""
    parameter = param_set.parameters[position]
    if not _divided(like, param_set, position):
        return local(value)
    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        same = value.device_mesh == parameter.device_mesh and value.placements == parameter.placements
        if same:
            return value.to_local()
        value = value.full_tensor()
    box = _layout(param_set, position).boxes[_rank_group(param_set).rank]
    return value[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
