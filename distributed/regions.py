"""Regions: entries that a block and a rank's shard of its parameter have in common, as views of both.

Blocks are cut from a parameter in its merged shape, shards in its own. A run of entries along a merged axis is a union
of boxes in the axes that were merged, at most 2k - 1 boxes for k axes. A region lies in one such box on every axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking import BlockGrid

from .layouts import Box, Layout

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Region:
    """Entries that a block and a shard have in common.

    box: the entries, in the axes of the parameter.
    outer: a box around them, in the axes of the parameter, that is contiguous along each merged axis.
    offsets: where `outer` begins in the block, along each merged axis.
    groups: number of parameter axes that each merged axis is made of.
    """

    box: Box
    outer: Box
    offsets: tuple[int, ...]
    groups: tuple[int, ...]

    def in_shard(self, shard: Tensor, held: Box) -> Tensor:
        """The entries as a view of a shard that holds the box `held` of the parameter."""
        return shard[self.box.within(held)]

    def in_block(self, block: Tensor) -> Tensor:
        """The entries as a view of the block, in the shape that `in_shard` has."""
        lengths = self.outer.shape
        end = len(lengths)
        for axis in reversed(range(len(self.groups))):
            own = lengths[end - self.groups[axis] : end]
            end -= self.groups[axis]
            block = block.narrow(axis, self.offsets[axis], math.prod(own))
            block = torch.unflatten(block, axis, own) if own else block.squeeze(axis)
        return block[self.box.within(self.outer)]


def regions(shape: tuple[int, ...], block: BlockGrid, held: Box) -> Iterator[Region]:
    """The regions of one block of a parameter of that shape and of a rank's box `held`, in a fixed order."""
    groups = grouping(shape, block.merged)
    runs, first = [], 0
    for group, start, length in zip(groups, block.start, block.tile, strict=True):
        runs.append(list(_boxes(start, start + length, shape[first : first + group])))
        first += group
    for boxes in itertools.product(*runs):
        outer = Box(sum((a for _, a, _ in boxes), ()), sum((b for _, _, b in boxes), ()))
        box = outer.common(held)
        if box is not None:
            offsets = tuple(at - start for (at, _, _), start in zip(boxes, block.start, strict=True))
            yield Region(box, outer, offsets, groups)


def holding(layout: Layout, block: BlockGrid) -> Counts:
    """`[R]`, number of entries of a block that each rank holds."""
    start = np.array([box.start for box in layout.boxes]).reshape(len(layout.boxes), -1)  # [R, axes]
    stop = np.array([box.stop for box in layout.boxes]).reshape(len(layout.boxes), -1)
    found = np.zeros(len(layout.boxes), dtype=np.int64)
    for region in regions(layout.shape, block, Box((0,) * len(layout.shape), layout.shape)):
        common = np.minimum(stop, region.box.stop) - np.maximum(start, region.box.start)
        found += common.clip(min=0).prod(1).astype(np.int64)
    return found


def grouping(shape: tuple[int, ...], merged: tuple[int, ...]) -> tuple[int, ...]:
    """Number of axes of a shape that each merged axis is made of; an axis of length 1 belongs to a neighbour."""
    groups, first = [], 0
    for place, length in enumerate(merged):
        last, product = first, 1
        final = place == len(merged) - 1
        while last < len(shape) and (product < length or shape[last] == 1 or final):
            product *= shape[last]
            last += 1
        groups.append(last - first)
        first = last
    return tuple(groups)


def _boxes(start: int, stop: int, lengths: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Boxes of the entries start <= i < stop of flattened axes, as (first i, box start, box stop), in order."""
    if not lengths:
        yield 0, (), ()
        return
    if len(lengths) == 1:
        yield start, (start,), (stop,)
        return
    inner = math.prod(lengths[1:])
    at = start
    while at < stop:
        row, column = divmod(at, inner)
        if column == 0 and stop - at >= inner:
            rows = (stop - at) // inner
            yield at, (row, *(0 for _ in lengths[1:])), (row + rows, *lengths[1:])
            at += rows * inner
            continue
        end = min(stop, (row + 1) * inner)
        for first, low, high in _boxes(column, column + end - at, lengths[1:]):
            yield row * inner + first, (row, *low), (row + 1, *high)
        at = end
