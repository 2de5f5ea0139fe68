"""The manifest of a parameter set: shape, dtype and owner of every state tensor. All ranks have the same manifest."""

from __future__ import annotations

from torch import Tensor

from eigengraft.distributed.comm_plan import BlockGroup
from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.resharding import Entry
from eigengraft.numerics import compute_dtype
from eigengraft.quantization.base import Location
from eigengraft.quantization.offload import available
from eigengraft.slots import StateKey

from ..recipe.recipe import slot_keys
from ..stacks.stored_slots import StoredSlot, stored_slots
from ..step.step import ParamSet
from ..write.averaging import Mode


def manifest(param_set: ParamSet, mode: Mode | None = None) -> list[dict[str, Entry]]:
    """Return a mapping for each parameter, from the key of a state tensor to the tensor's shape, dtype and owner."""
    entries: list[dict[str, Entry]] = [{} for _ in param_set.parameters]
    for group in param_set.block_groups:
        slots = _stored_slots(param_set, group).items()
        forms = {str(own._replace(part=part)): form for own, stored in slots for part, form in stored.forms().items()}
        for block in group.blocks:
            for name, form in forms.items():
                entries[block.position][StateKey.join(block.grid.keys[0], name)] = Entry(*form, block.owner)
    for position, (state, parameter) in enumerate(zip(param_set.views(mode), param_set.parameters, strict=True)):
        spec = param_set.specs[position]
        # a rank whose shard is empty has no block, so `state` lacks the slots that other ranks have
        if spec.in_place and 0 not in spec.shape:
            for own, slot in slot_keys(param_set.rules[spec.path], spec.path, spec.shape).items():
                dtype = slot.dtype or compute_dtype(spec.dtype)
                entries[position][str(own._replace(block=0))] = Entry(spec.shape, dtype)
        for key, tensor in state.items():
            if key not in entries[position]:
                shape = tuple(tensor.shape)
                if is_divided(tensor, param_set, position):
                    shape = (*shape[: tensor.ndim - parameter.ndim], *parameter.shape)
                entries[position][key] = Entry(shape, tensor.dtype)
    return entries


def locations(param_set: ParamSet) -> dict[tuple[int, str], Location]:
    """Return where each offloaded slot is stored, by (position of the parameter, state key).

    The result is the same on all ranks.
    """
    found = dict[tuple[int, str], Location]()
    if all(quantizer.location is None for quantizer in param_set.recipe.storage.values()):
        return found
    blocks = [
        (
            _stored_slots(param_set, group),
            group.device,
            [(block.position, block.grid.keys[0]) for block in group.blocks],
        )
        for group in param_set.block_groups
    ]
    blocks += [
        (own.stored_slots(), own.stack.device, [(position, key) for _, position, key in own.rows()])
        for own in param_set.stack_states
        if own.block_group is None
    ]
    for slots, device, places in blocks:
        for key, stored in slots.items():
            if (location := available(stored.location, device)) is not None:
                found.update({(position, StateKey.join(block, str(key))): location for position, block in places})
    return found


def _stored_slots(param_set: ParamSet, group: BlockGroup) -> dict[StateKey, StoredSlot]:
    """Return the storage of the slots of each block of a block group."""
    return stored_slots(param_set.rules[group.path], group.path, group.shape, group.dtype, param_set.recipe.storage)


def is_divided(tensor: Tensor, param_set: ParamSet, position: int) -> bool:
    """Return True if a state tensor without an owner is sharded as its parameter is.

    A state tensor without an owner has one of two shapes. Either it is a number, which every rank stores, or its last
    axes are those of the parameter.
    """
    return tensor.ndim > 0 and not layout_of_parameter(param_set, position).replicated


def layout_of_parameter(param_set: ParamSet, position: int) -> Layout:
    """Return the layout of a parameter's entry-wise state: the entries of the parameter that each rank updates."""
    placement = param_set.specs[position].placement
    assert placement is not None
    return placement.updated
