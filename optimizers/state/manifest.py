"""The manifest of a parameter set: shape, dtype and owner of every state tensor. All ranks have the same manifest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from eigengraft.blocking.blocks import BlockGrid
from eigengraft.blocking.stacks import Stack
from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.resharding import Entry
from eigengraft.numerics import compute_dtype
from eigengraft.quantization import choose
from eigengraft.quantization.base import Location
from eigengraft.quantization.offload import available
from eigengraft.slots import StateKey

from ..recipe.recipe import slot_keys
from ..stacks.stack import StackState
from ..step.step import ParamSet
from ..write.averaging import Mode


def manifest(param_set: ParamSet, mode: Mode | None = None) -> list[dict[str, Entry]]:
    """Return a mapping for each parameter, from the key of a state tensor to the tensor's shape, dtype and owner."""
    entries: list[dict[str, Entry]] = [{} for _ in param_set.parameters]
    for block_group, template in zip(param_set.block_groups, _templates(param_set), strict=True):
        for block in block_group.blocks:
            for name, (shape, dtype) in template.items():
                entries[block.position][StateKey.join(block.grid.keys[0], name)] = Entry(shape, dtype, block.owner)
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
    found, storage = dict[tuple[int, str], Location](), param_set.recipe.storage
    if all(quantizer.location is None for quantizer in storage.values()):
        return found
    blocks = [
        (group.path, group.shape, group.device, [(block.position, block.grid.keys[0]) for block in group.blocks])
        for group in param_set.block_groups
    ]
    blocks += [
        (own.path, own.stack.block, own.stack.device, [(position, key) for _, position, key in own.rows()])
        for own in param_set.stack_states
        if own.block_group is None
    ]
    for path, shape, device, places in blocks:
        for key, slot in slot_keys(param_set.rules[path], path, shape).items():
            quantizer = choose(storage, key, slot)
            if quantizer is not None and (location := available(quantizer.location, device)) is not None:
                found.update({(position, StateKey.join(block, str(key))): location for position, block in places})
    return found


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


def _templates(param_set: ParamSet) -> Iterator[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Yield for each block group, in order, the shape and dtype of one block's state, by "<stage path>/<slot>".

    If this rank owns no block of the group, a stack of one block is built, and its tensors are read.
    """
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
            rule, storage = param_set.rules[path], param_set.recipe.storage
            stack_state = StackState(path, rule, stack, storage, np.zeros(1), np.zeros(1, dtype=np.int64))
        yield {path: (tuple(tensor.shape[1:]), tensor.dtype) for path, tensor in stack_state.tensors.items()}
