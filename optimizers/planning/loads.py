"""What the ranks of a plan hold, and how evenly their work can be divided at best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.comm_plan import BlockGroup
from eigengraft.numerics import compute_dtype

from ..recipe.recipe import Recipe
from ..sharding.assignment import Assignment, ParamPlacement
from ..sharding.cost_model import block_cost

STEP = 8
"""Bytes of the count of steps that every rank keeps of each parameter."""


def owned(block_group: BlockGroup, ranks: int) -> NDArray[np.int64]:
    """`[R]`, blocks of a block group."""
    return np.bincount([member.owner for member in block_group.members], minlength=ranks).astype(np.int64)


def state_bytes(
    recipe: Recipe,
    tensors: Sequence[Tensor],
    paths: Sequence[str],
    assignment: Assignment,
    block_groups: Sequence[BlockGroup],
) -> NDArray[np.int64]:
    """`[R]`: of owned blocks, of parts that stay at home, of iterates, and the steps of all parameters."""
    ranks, updates = assignment.rank_group.size, recipe.updates()
    state = np.full(ranks, STEP * len(tensors), dtype=np.int64)
    for block_group in block_groups:
        cost = block_cost(
            updates[block_group.path], block_group.path, block_group.block, block_group.dtype, recipe.storage
        )
        state += cost.state * owned(block_group, ranks)
    found: dict[tuple[str, tuple[int, ...]], NDArray[np.int64]] = {}
    for tensor, path in zip(tensors, paths, strict=True):
        placement = assignment.placements[id(tensor)]  # equal for parameters of one shape and update
        key = path, placement.layout.shape
        if key not in found:
            found[key] = _beside(recipe, path, placement, tensor.dtype)
        state += found[key]
    return state


def _beside(recipe: Recipe, path: str, placement: ParamPlacement, dtype: torch.dtype) -> NDArray[np.int64]:
    """`[R]`, bytes kept beside the parts of a parameter: iterates, and the state of an update that stays at home."""
    rule, computed = recipe.updates()[path], compute_dtype(dtype)

    def size(shape: tuple[int, ...]) -> int:
        slots = [slot for constraint in rule.constraints for slot in constraint.slots(shape).values()]
        if recipe.averaging is not None:
            slots += recipe.averaging.slots(shape, computed != dtype).values()
        total = sum(math.prod(slot.shape) * (slot.dtype or computed).itemsize for slot in slots)
        if placement.owners is None and 0 not in shape:
            total += block_cost(rule, path, shape, computed, recipe.storage).state
        return total

    shapes = [box.shape for box in placement.layout.boxes]
    sizes = {shape: size(shape) for shape in set(shapes)}
    return np.array([sizes[shape] for shape in shapes], dtype=np.int64)


def least_work(recipe: Recipe, block_groups: Sequence[BlockGroup], work: NDArray[np.float64]) -> float:
    """A lower bound of the largest work: the mean, what stays at home, or what the items alone make unavoidable.

    Of the kR + 1 largest items some rank has k + 1, at least as large as the smallest k + 1 of them (k = 0: the largest
    item). Items are blocks, or all blocks of a parameter if a stage spans it. work `[R]`.
    """
    ranks, items, home = len(work), [0.0], work.copy()
    for block_group in block_groups:
        rule = recipe.updates()[block_group.path]
        cost = block_cost(rule, block_group.path, block_group.block, block_group.dtype, recipe.storage)
        each = recipe.distribution.measured(block_group.block, cost.work)
        home -= each * owned(block_group, ranks)
        whole = any(stage.spans_parameter() for _, stage in rule.stages())
        rank_sync = Counter(member.position for member in block_group.members).values()
        items += [each * blocks for blocks in rank_sync] if whole else [each] * len(block_group.members)
    sizes = np.sort(items)[::-1]
    before = np.concatenate([[0.0], np.cumsum(sizes)])
    k = np.arange((len(sizes) - 1) // ranks + 1)
    return float(max(work.mean(), home.max(), (before[k * ranks + 1] - before[k * ranks - k]).max()))
