"""The manifest of a parameter set: shape, dtype, owner and location of every state tensor, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eigengraft.distributed.resharding import Entry
from eigengraft.numerics import compute_dtype
from eigengraft.quantization.base import Location
from eigengraft.slots import StateKey

from ..recipe.recipe import stored_slots
from ..step.step import ParamSet
from ..write.averaging import Mode


@dataclass(frozen=True)
class StateEntry(Entry):
    """Shape, dtype, owner and location of one tensor of the state.

    location: memory in which the tensor is stored between steps. None: the memory of its parameter's device.
    """

    location: Location | None = None


def manifest(param_set: ParamSet, mode: Mode | None = None) -> list[dict[str, StateEntry]]:
    """Return the `StateEntry` (shape, dtype, owner, location) of each state tensor of each parameter, by state key.

    The result is the same on every rank.

    mode: the iterate that the parameters are assumed to hold, because keys depend on it. None: the iterate that they
        hold now.
    """
    entries: list[dict[str, StateEntry]] = [{} for _ in param_set.parameters]
    for group in param_set.block_groups:
        slots = stored_slots(param_set.recipe, group.path, group.shape, group.dtype)
        forms = [
            (str(own._replace(part=part)), form, stored.place(group.device))
            for own, stored in slots.items()
            for part, form in stored.forms().items()
        ]
        for block in group.blocks:
            for name, form, location in forms:
                key = StateKey.join(block.grid.keys[0], name)
                entries[block.position][key] = StateEntry(*form, block.owner, location)
    for position, (state, parameter) in enumerate(zip(param_set.views(mode), param_set.parameters, strict=True)):
        spec = param_set.specs[position]
        # If this rank's shard is empty, it has no block, and `state` lacks slots that other ranks have. The slots are
        # therefore described from the recipe.
        if spec.without_owners and 0 not in spec.shape:
            assert param_set.rank_group is not None
            shard = spec.placed.updated.boxes[param_set.rank_group.rank]
            shape, dtype = shard.shape if shard.numel else spec.shape, compute_dtype(spec.dtype)
            for own, stored in stored_slots(param_set.recipe, spec.path, shape, dtype).items():
                location = stored.place(spec.device)
                entries[position][str(own._replace(block=0))] = StateEntry(spec.shape, stored.dtype, None, location)
        for key, tensor in state.items():
            if key not in entries[position]:
                shape = tuple(tensor.shape)
                if is_divided(tensor, param_set, position):
                    shape = (*shape[: tensor.ndim - parameter.ndim], *parameter.shape)
                entries[position][key] = StateEntry(shape, tensor.dtype)
    return entries


def is_divided(tensor: Tensor, param_set: ParamSet, position: int) -> bool:
    """Return True if a state tensor is sharded over ranks as its parameter is.

    tensor: state that belongs to no block: either a 0-d tensor, such as the step count, which every rank stores, or a
        tensor whose last axes are those of the parameter, such as an averaged iterate.
    position: index of the parameter in its set.
    """
    return tensor.ndim > 0 and not param_set.specs[position].placed.updated.replicated
