"""The state of a cohort that is divided over ranks, as checkpoints hold it: no key and no shape knows of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from eigengraft.distributed.blocks import Piece
from eigengraft.distributed.resharding import Entry, collect, spread
from eigengraft.distributed.stacks import Stack
from eigengraft.numerics import compute_dtype

from .division import local
from .together import Together
from .unit import Unit, slot_keys

if TYPE_CHECKING:
    from .cohort import Cohort
    from .iterates.mode import Mode


class Shares(dict[str, Any]):
    """A state dict of which this rank has its part only. It can be read and given to torch.distributed.checkpoint, but
    not be pickled: a file of it would pass for the whole."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "state_dict: this is one rank's part of the state, which would be saved as if it were the whole; call "
            "optimizer.full_state_dict() on every rank and save that on one, or use torch.distributed.checkpoint with "
            "get_optimizer_state_dict"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Shares:
        return Shares({key: deepcopy(value, memo) for key, value in self.items()})


def manifest(cohort: Cohort, mode: Mode | None = None) -> list[dict[str, Entry]]:
    """Every entry of the whole state of each parameter, by position and key."""
    together = _together(cohort)
    entries: list[dict[str, Entry]] = [{} for _ in cohort.parameters]
    for family, template in zip(together.exchange.families, _templates(cohort, together), strict=True):
        for member in family.members:
            for path, (shape, dtype) in template.items():
                entries[member.position][f"{member.piece.keys[0]}/{path}"] = Entry(shape, dtype, member.owner)
    for position, (state, parameter) in enumerate(zip(cohort.views(mode), cohort.parameters, strict=True)):
        for key, tensor in {**_at_home(cohort, together, position), **state}.items():
            if key not in entries[position]:
                whole = _divided(tensor, cohort.parts[position], together, position)
                entries[position][key] = Entry(tuple(parameter.shape if whole else tensor.shape), tensor.dtype)
    return entries


def visible_state(cohort: Cohort) -> list[dict[str, Tensor]]:
    """What `optimizer.state` shows of each parameter: this rank's views, and empty tensors for what others own.

    The keys are the same on every rank; torch.distributed.checkpoint reads them there.
    """
    views = cohort.views()
    if cohort.together is None:
        return views
    entries = manifest(cohort)
    return [
        {key: view[key] if key in view else torch.empty(0, dtype=entry.dtype) for key, entry in own.items()}
        for view, own in zip(views, entries, strict=True)
    ]


def shared_state(cohort: Cohort) -> list[dict[str, Tensor]]:
    """The whole state of each parameter as it stands in a checkpoint, of which each rank has its part. All call it."""
    together = _together(cohort)
    entries = manifest(cohort)
    where = [(p, key) for p, own in enumerate(entries) for key, entry in own.items() if entry.owner is not None]
    owned = {}
    views = cohort.views()
    found: list[dict[str, Tensor]] = [{} for _ in entries]
    for index, (position, key) in enumerate(where):
        if entries[position][key].owner == together.peers.rank:
            owned[index] = views[position][key]
    flat = [entries[position][key] for position, key in where]
    device = cohort.parts[0].device
    sent = spread(together.peers, flat, owned, together.mesh(device), device)
    for (position, key), value in zip(where, sent, strict=True):
        found[position][key] = value
    for position, state in enumerate(views):
        here = {**_at_home(cohort, together, position), **state}
        for key, entry in entries[position].items():
            if entry.owner is None:
                found[position][key] = _as_parameter(here[key], cohort, together, position)
    return found


def own_state(
    cohort: Cohort, values: Mapping[Tensor, Mapping[str, Tensor]], mode: Mode
) -> dict[Tensor, dict[str, Tensor]]:
    """And back: what this rank keeps of a whole state that fits, by parameter. All call it."""
    together = _together(cohort)
    entries = manifest(cohort, mode)
    where = [(p, key) for p, own in enumerate(entries) for key, entry in own.items() if entry.owner is not None]
    flat = [entries[position][key] for position, key in where]
    device = cohort.parts[0].device
    shared = [_evenly(values[cohort.parameters[position]][key], together, device) for position, key in where]
    found: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in cohort.parameters}
    for index, value in collect(together.peers, flat, shared, device).items():
        position, key = where[index]
        found[cohort.parameters[position]][key] = value
    for position, (parameter, kept) in enumerate(zip(cohort.parameters, cohort.views(mode), strict=True)):
        for key, entry in entries[position].items():
            if entry.owner is None and key in kept:
                found[parameter][key] = _part(values[parameter][key], cohort, together, position, kept[key])
    return found


def give_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """State dict hook: puts the shares of what is divided over ranks in place of what this rank owns."""
    divided = False
    for group, cohorts, saved in zip(
        optimizer.param_groups, optimizer.divided(), state_dict["param_groups"], strict=True
    ):
        index = dict(zip(map(id, group["params"]), saved["params"], strict=True))
        for cohort in cohorts:
            if cohort.together is not None:
                divided = True
                states = zip(cohort.parameters, shared_state(cohort), strict=True)
                state_dict["state"].update({index[id(parameter)]: state for parameter, state in states})
    return Shares(state_dict) if divided else None


def fill(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copies values into the state of a parameter. ValueError if they are what another rank shows of it."""
    for key, value in values.items():
        if value.shape != state[key].shape:
            raise ValueError(
                f"state '{key}': {tuple(state[key].shape)} is required, got {tuple(value.shape)}; a pickle of an "
                "optimizer that is divided over ranks is one rank's part, use torch.distributed.checkpoint"
            )
        state[key].copy_(value)


@contextmanager
def closing_hook(handle: Any) -> Iterator[None]:
    """Removes a hook afterwards."""
    try:
        yield
    finally:
        handle.remove()


def gathered(state_dict: Any) -> Any:
    """A state dict with whole plain tensors on the CPU in place of DTensors; all ranks call it."""
    if isinstance(state_dict, Mapping):
        return {key: gathered(value) for key, value in state_dict.items()}
    if isinstance(state_dict, (list, tuple)):
        return type(state_dict)(gathered(value) for value in state_dict)
    return whole(state_dict).detach().cpu() if isinstance(state_dict, Tensor) else state_dict


def whole(x: Any) -> Any:
    """A DTensor as a plain tensor; all its ranks call it. Anything else as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def _together(cohort: Cohort) -> Together:
    assert cohort.together is not None
    return cohort.together


def _templates(cohort: Cohort, together: Together) -> Iterator[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """What one block of each family keeps, as (shape, dtype) by "<stage path>/<slot>"; here may be no such block."""
    units = {unit.family: unit for unit in cohort.units if unit.family is not None}
    for index, family in enumerate(together.exchange.families):
        unit = units.get(index)
        if unit is None:
            piece = Piece(family.block, (0,) * len(family.block), (1,) * len(family.block), family.block, (0,))
            stack = Stack(family.block, family.dtype, torch.device("cpu"), ((0, piece),))
            unit = Unit(family.path, cohort.updates[family.path], stack, cohort.recipe.storage)
        yield {path: (tuple(tensor.shape[1:]), tensor.dtype) for path, tensor in unit.tensors.items()}


def _at_home(cohort: Cohort, together: Together, position: int) -> dict[str, Tensor]:
    """Empty state of a parameter that is updated where it is, and of which this rank has no part."""
    share = together.division.shares[id(cohort.parameters[position])]
    part = cohort.parts[position]
    if share.owners is not None or part.numel() or not cohort.parameters[position].numel():
        return {}
    path, _ = cohort.routed[position]
    slots = slot_keys(cohort.updates[path], path, tuple(cohort.parameters[position].shape))
    dtype = compute_dtype(part.dtype)
    return {f"0/{key}": part.new_empty(part.shape, dtype=slot.dtype or dtype) for key, slot in slots.items()}


def _divided(tensor: Tensor, part: Tensor, together: Together, position: int) -> bool:
    """Whether a tensor belongs to the part of a parameter entry by entry, so that it is divided as the parameter is."""
    return not together.layouts[position].replicated and tensor.shape == part.shape and tensor.ndim > 0


def _as_parameter(tensor: Tensor, cohort: Cohort, together: Together, position: int) -> Tensor:
    parameter = cohort.parameters[position]
    if not isinstance(parameter, DTensor) or not _divided(tensor, cohort.parts[position], together, position):
        return tensor
    return DTensor.from_local(
        tensor.clone(),  # of its own storage: asynchronous saving cannot stage rows of a stack
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _evenly(value: Tensor, together: Together, device: torch.device) -> Tensor:
    """A DTensor cut along its first axis over the peers, whatever it was; a plain tensor as it is."""
    if not isinstance(value, DTensor):
        return value
    mesh = together.mesh(device)
    same = value.device_mesh == mesh and len(value.placements) == 1 and value.placements[0].is_shard(0)
    return value if same else value.full_tensor()


def _part(value: Tensor, cohort: Cohort, together: Together, position: int, like: Tensor) -> Tensor:
    """This rank's part of an entry that is divided as its parameter is, or the entry."""
    parameter = cohort.parameters[position]
    if not _divided(like, cohort.parts[position], together, position):
        return local(value)
    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        same = value.device_mesh == parameter.device_mesh and value.placements == parameter.placements
        if same:
            return value.to_local()
        value = value.full_tensor()
    layout = together.layouts[position]
    box = layout.boxes[together.peers.rank]
    return value[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
