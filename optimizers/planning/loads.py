"""Loads of the ranks of a plan: blocks and bytes of state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eigengraft.chains import asking
from eigengraft.distributed.comm_plan import BlockGroup
from eigengraft.numerics import compute_dtype
from eigengraft.slots import Slot

from ..recipe.recipe import Recipe
from ..sharding.cost_model import block_cost
from ..sharding.placement import ParamSpec

STEP = 8
"""Bytes of the step count that every rank stores for each parameter."""


def count_owned(block_group: BlockGroup, ranks: int) -> NDArray[np.int64]:
    """`[R]`, blocks of a block group that each rank owns."""
    return np.bincount([block.owner for block in block_group.blocks], minlength=ranks).astype(np.int64)


def state_bytes(
    recipe: Recipe, specs: Sequence[ParamSpec], block_groups: Sequence[BlockGroup], ranks: int
) -> NDArray[np.int64]:
    """`[R]`, bytes of owned blocks, of parameters updated in place, of iterates, and of all step counts."""
    updates = recipe.updates()
    state = np.full(ranks, STEP * len(specs), dtype=np.int64)
    for block_group in block_groups:
        rule = updates[block_group.path]
        cost = block_cost(rule, block_group.path, block_group.shape, block_group.dtype, recipe.storage)
        state += cost.state * count_owned(block_group, ranks)
    found: dict[tuple[str, tuple[int, ...]], NDArray[np.int64]] = {}
    for spec in specs:
        key = spec.path, spec.shape  # parameters of one shape and update lie and are updated in one way
        if key not in found:
            found[key] = _local_bytes(recipe, spec)
        state += found[key]
    return state


def _local_bytes(recipe: Recipe, spec: ParamSpec) -> NDArray[np.int64]:
    """`[R]`, bytes that lie where a parameter's shards lie: iterates, and the state of an update in place."""
    rule, computed, placement = recipe.updates()[spec.path], compute_dtype(spec.dtype), spec.placement
    assert placement is not None

    def size(shape: tuple[int, ...]) -> int:
        kept = [constraint for constraint in rule.constraints if constraint.keeps(spec.dtype)]
        slots = [slot for constraint in kept for slot in constraint.slots(shape).values()]
        if recipe.averaging is not None:
            slots += recipe.averaging.slots(shape, computed != spec.dtype).values()
        if "partner_before" in asking(rule.stages()):
            slots.append(Slot(shape))
        total = sum(math.prod(slot.shape) * (slot.dtype or computed).itemsize for slot in slots)
        if placement.owners is None and 0 not in shape:
            total += block_cost(rule, spec.path, shape, computed, recipe.storage).state
        return total

    shapes = [box.shape for box in placement.updated.boxes]
    sizes = {shape: size(shape) for shape in set(shapes)}
    return np.array([sizes[shape] for shape in shapes], dtype=np.int64)
