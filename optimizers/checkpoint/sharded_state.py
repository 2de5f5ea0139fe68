"""Sharded state in checkpoints, as DTensors whose keys and shapes do not depend on ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from eigengraft.blocking.blocks import Box
from eigengraft.blocking.stacks import split_by_size
from eigengraft.distributed.layouts import Layout, divided
from eigengraft.distributed.rank_group import RankGroup, mesh_group
from eigengraft.distributed.resharding import collect, gather, spread
from eigengraft.numerics import is_dtensor, local
from eigengraft.quantization.base import Location
from eigengraft.quantization.offload import HostBuffer

from ..inspect.reporting import ComposedOptimizer
from ..state.manifest import StateEntry, is_divided, manifest
from ..state.shown_state import host_state, own_state
from ..step.step import ParamSet
from ..write.averaging import Mode

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


class ShardedStateDict(dict[str, Any]):
    """A state dict of which this rank holds one shard, to be saved by torch.distributed.checkpoint.

    Pickling it raises RuntimeError, because the file would look like the state of all ranks.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "state_dict: it holds one rank's shard of the state and cannot be pickled as if it were all state; call "
            "optimizer.full_state_dict() on every rank and save the result on one, or use torch.distributed.checkpoint "
            "with get_optimizer_state_dict"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedStateDict:
        return ShardedStateDict({key: deepcopy(value, memo) for key, value in self.items()})


def sharded_state(param_set: ParamSet) -> list[dict[str, Tensor]]:
    """Return the state of each parameter as DTensors, whose global shapes are those of the full state.

    All ranks must call the function.
    """
    rank_group = _rank_group(param_set)
    entries, views = manifest(param_set), param_set.views()
    found: list[dict[str, Tensor]] = [{} for _ in entries]
    device = param_set.own_entries[0].device
    for chunk in _owned(entries):
        own = {i: views[p][key] for i, (p, key, entry) in enumerate(chunk) if entry.owner == rank_group.rank}
        sent = spread(rank_group, [entry for *_, entry in chunk], own, rank_group.mesh(device), device)
        for (position, key, entry), value in zip(chunk, sent, strict=True):
            found[position][key] = _stored(value, entry.location)
    for position, state in enumerate(views):
        for key, entry in entries[position].items():
            if entry.owner is None:
                held = state[key] if key in state else param_set.own_entries[position].to(entry.dtype)  # an empty shard
                found[position][key] = _as_parameter(held, param_set, position, entry.location)
    return found


PIECE = 1 << 26
"""Bytes of full tensors that ranks exchange or gather at a time. An exchange of all state at once would take as much
memory as the state, which offloading saves, and more than 64 MiB would hardly be faster."""


def _owned(entries: Sequence[Mapping[str, StateEntry]]) -> Iterator[list[tuple[int, str, StateEntry]]]:
    """Divide the state tensors that have an owner into lists, and yield the lists.

    The owner is the only rank that stores the tensor. An item of a list is (position of the parameter, key of the
    tensor, `StateEntry` of the tensor). A list has tensors of at most `PIECE` bytes, or one larger tensor. Ranks
    exchange the tensors of a list together.

    entries: for each parameter, the `StateEntry` of each state tensor by key, as `manifest` returns them.
    """
    sizes = (
        ((position, key, entry), math.prod(entry.shape) * entry.dtype.itemsize)
        for position, own in enumerate(entries)
        for key, entry in own.items()
        if entry.owner is not None
    )
    return split_by_size(sizes, PIECE)


def _stored(value: Tensor, location: Location | None) -> Tensor:
    """Return a copy of a tensor or DTensor whose local entries are in host memory, or the tensor itself.

    location: kind of host memory. None: nothing is copied, and the tensor itself is returned.
    """
    if location is None:
        return value
    from torch.distributed.tensor import DTensor

    own = local(value)
    buffer = HostBuffer(location, {"": own})
    stored = buffer.views(buffer.memory)[""].copy_(own)
    buffer.release()
    # the constructor keeps the entries in host memory, whereas `from_local` would copy them to the device of the mesh
    made: Any = DTensor
    return made(stored, value._spec, requires_grad=False) if isinstance(value, DTensor) else stored


def local_state(
    param_set: ParamSet, values: Mapping[Tensor, Mapping[str, Tensor]], mode: Mode
) -> dict[Tensor, dict[str, Any]]:
    """Return this rank's part of a checkpoint's state, by parameter and key. All ranks must call it.

    The state must have been checked. A parameter without saved state has an empty mapping.

    values: the state in the checkpoint, by parameter and key.
    mode: the iterate that the saved parameters hold.
    """
    rank_group = _rank_group(param_set)
    entries = manifest(param_set, mode)
    saved = [bool(own_state(values[parameter])) for parameter in param_set.parameters]
    entries = [own if there else {} for own, there in zip(entries, saved, strict=True)]
    device, parameters = param_set.own_entries[0].device, param_set.parameters
    found: dict[Tensor, dict[str, Any]] = {p: host_state(values[p]) for p in parameters}
    for chunk in _owned(entries):
        shared = [_evenly(values[parameters[position]][key], rank_group, device) for position, key, _ in chunk]
        for index, value in collect(rank_group, [entry for *_, entry in chunk], shared, device).items():
            position, key, entry = chunk[index]
            found[parameters[position]][key] = _stored(value, entry.location)
    for position, (parameter, own) in enumerate(zip(param_set.parameters, param_set.views(mode), strict=True)):
        for key, entry in entries[position].items():
            if entry.owner is None and key in own:
                found[parameter][key] = _shard(values[parameter][key], param_set, position, own[key])
    return found


def shard_hook(optimizer: ComposedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Replace the local tensors of sharded state in a state dict by DTensors (a hook of torch).

    Return a `ShardedStateDict`, or None if no parameter is shared with other ranks.
    """
    groups, index = zip(optimizer.param_groups, state_dict["param_groups"], strict=True), dict[int, Any]()
    for group, saved in groups:
        index.update(zip(map(id, group["params"]), saved["params"], strict=True))
    shared = [param_set for param_set in optimizer.param_sets if param_set.rank_group is not None]
    for param_set in shared:
        for parameter, state in zip(param_set.parameters, sharded_state(param_set), strict=True):
            state_dict["state"][index[id(parameter)]] = {**state, **host_state(optimizer.state[parameter])}
    return ShardedStateDict(state_dict) if shared else None


def gathered(state_dict: Any) -> Any:
    """Return a state dict with plain tensors on the CPU in place of DTensors. All ranks must call it."""
    found = list[Tensor]()
    _mapped(state_dict, found.append)
    full = {id(x): value.detach().cpu() for x, value in zip(found, full_tensors(found), strict=True)}
    return _mapped(state_dict, lambda x: full[id(x)])


def _mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested mappings, lists and tuples in which each tensor x is replaced by `change(x)`."""
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, change) for value in tree)
    return change(tree) if isinstance(tree, Tensor) else tree


def full_tensors(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Return DTensors as full plain tensors, and plain tensors unchanged, one after another.

    All ranks must call it with the same DTensors in the same order, and must iterate to the end, because each result
    may need a collective.
    """
    full = _full_dtensors([x for x in tensors if is_dtensor(x)])
    return (next(full) if is_dtensor(x) else x for x in tensors)


def _full_dtensors(dtensors: Sequence[Any]) -> Iterator[Tensor]:
    """Return DTensors as full plain tensors, one after another.

    Successive DTensors on the same ranks are gathered in one collective, at most `PIECE` bytes at a time, because a
    state has thousands of small tensors.
    """
    layouts = [_sharded(x) for x in dtensors]
    ranks = [
        None if layout is None else (x.device_mesh.device_type, x.device_mesh.mesh.flatten().tolist())
        for x, layout in zip(dtensors, layouts, strict=True)
    ]
    for same, run in itertools.groupby(range(len(dtensors)), lambda index: ranks[index]):
        found = list(run)
        if same is None:
            yield from (full_tensor(dtensors[index]) for index in found)
            continue
        rank_group, device = RankGroup(mesh_group(dtensors[found[0]].device_mesh)), torch.device(same[0])
        sizes = ((index, dtensors[index].numel() * dtensors[index].element_size()) for index in found)
        for part in split_by_size(sizes, PIECE):
            cut = [layout for index in part if (layout := layouts[index]) is not None]
            yield from gather(rank_group, cut, [dtensors[index].to_local() for index in part], device)


def _sharded(x: Any) -> Layout | None:
    """Return the layout of a sharded DTensor, or None for any other DTensor.

    Also return None if the mesh does not list its ranks in ascending order. A layout numbers ranks in the order of the
    process group, which is ascending.
    """
    mesh = x.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks) or any(placement.is_partial() for placement in x.placements):
        return None
    layout = Layout.from_placements(tuple(x.shape), tuple(mesh.mesh.shape), tuple(x.placements))
    return None if layout.replicated else layout


def full_tensor(x: Any) -> Any:
    """Return a DTensor as a full plain tensor. Return any other value unchanged.

    For a DTensor all ranks of its mesh must call it. Offloaded entries are first copied to the device of the mesh,
    because collectives need them there.
    """
    if not is_dtensor(x):
        return x
    there: Any = x.to(x.device_mesh.device_type)
    return there.full_tensor()


def _rank_group(param_set: ParamSet) -> RankGroup:
    assert param_set.rank_group is not None
    return param_set.rank_group


def _as_parameter(tensor: Tensor, param_set: ParamSet, position: int, location: Location | None) -> Tensor:
    if not is_divided(tensor, param_set, position):
        return tensor
    parameter = param_set.parameters[position]
    lead = tensor.ndim - parameter.ndim
    mesh, placements, cut = _division(param_set, position, lead)
    if cut:
        ranks, layout = _rank_group(param_set), param_set.specs[position].placed.updated
        full = layout.gather(tensor, ranks, f"state of {param_set.names[position]}")
        tensor = _entries(full, Layout.by_rows(layout.shape, ranks.size).boxes[ranks.rank])
    own, size = tuple(tensor.shape[:lead]), parameter.numel()
    strides = [math.prod(own[axis + 1 :]) * size for axis in range(lead)]
    from torch.distributed.tensor import DTensor

    # asynchronous saving cannot copy a tensor that is a view of a stack, so the tensor gets storage of its own
    value: Tensor = DTensor.from_local(
        tensor.clone() if location is None else tensor,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size((*own, *parameter.shape)),
        stride=(*strides, *parameter.stride()),
    )
    return _stored(value, location)


def _division(param_set: ParamSet, position: int, lead: int) -> tuple[DeviceMesh, list[Placement], bool]:
    """Return (mesh, placements, cut), which describe the entry-wise state of a parameter as a DTensor.

    The state is sharded as the parameter is. If replicas divide the update of the parameter among themselves, the state
    is also sharded over the replicas.

    position: index of the parameter in its set.
    lead: number of axes of the state before the axes of the parameter.

    The parts of the result are:
    mesh: the device mesh.
    placements: placement of the state on each axis of the mesh.
    cut: True if no placements can describe the shards that ranks store, because replicas divide the rows of one shard
        among themselves. In a checkpoint the state is then sharded evenly along the first axis of the parameter, which
        `placements` describe, so the caller must gather the state and cut it again.
    """
    parameter, placement = param_set.parameters[position], param_set.specs[position].placed
    cut = False
    if is_dtensor(parameter) and (placement.parts is None or not placement.layout.replicated):
        mesh, own = parameter.device_mesh, parameter.placements
        parts = placement.parts is not None
        placements = divided(tuple(parameter.shape), tuple(mesh.mesh.shape), own) if parts else own
        if placements is not None:
            return mesh, [_after(lead, one) for one in placements], False
        cut = True
    from torch.distributed.tensor import Shard

    return _rank_group(param_set).mesh(parameter.device), [Shard(lead)], cut


def _entries(full: Tensor, box: Box) -> Tensor:
    """Return a view of the entries of a full tensor whose indices along its last axes are in a box."""
    index: tuple[Any, ...] = (..., *map(slice, box.start, box.stop))
    return full[index]


def _after(lead: int, placement: Placement) -> Placement:
    """Return a placement for a tensor with `lead` more axes in front: the index of the sharded axis grows by `lead`."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + lead, split_factor=placement.split_factor)
    return Shard(placement.dim + lead) if isinstance(placement, Shard) else placement


def _evenly(value: Tensor, rank_group: RankGroup, device: torch.device) -> Tensor:
    """Return a DTensor unchanged if the ranks of a group shard it along its first axis, and nothing else shards it.

    Return any other DTensor as a full plain tensor, and a plain tensor unchanged.

    device: device of the mesh of the group.
    """
    if not is_dtensor(value):
        return value
    mesh = rank_group.mesh(device)
    same = value.device_mesh == mesh and len(value.placements) == 1 and value.placements[0].is_shard(0)
    return value if same else value.full_tensor()


def _shard(value: Tensor, param_set: ParamSet, position: int, like: Tensor) -> Tensor:
    """Return this rank's shard of a state tensor, or the full plain tensor if ranks do not shard the tensor.

    value: the state tensor of a checkpoint.
    position: index of the parameter in its set.
    like: the tensor in which this rank stores the same state now.
    """
    if not is_divided(like, param_set, position):
        return local(value)
    if is_dtensor(value):
        mesh, placements, cut = _division(param_set, position, like.ndim - param_set.own_entries[position].ndim)
        if not cut and (value.device_mesh, list(value.placements)) == (mesh, placements):
            return value.to_local()
        value = value.full_tensor()
    return _entries(value, param_set.specs[position].placed.updated.boxes[_rank_group(param_set).rank])
