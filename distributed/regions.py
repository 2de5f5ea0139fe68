"""Regions: what a block and a rank's part of its parameter have in common, as views of both.

Blocks are cut from a parameter in its merged shape, parts in its own. A run of entries along a merged axis is a box in
the axes that were merged only in grids: at most 2k - 1 of them for k axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eigengraft.blocking import BlockGrid

from .layouts import Box


@dataclass(frozen=True)
class Region:
    """Entries of one block. box: them, in the axes of the parameter; grid: a box around them that is contiguous along
    each merged axis, and begins `offsets` from the start of the block; groups: how many axes each merged axis has."""

    box: Box
    grid: Box
    offsets: tuple[int, ...]
    groups: tuple[int, ...]

    def of_part(self, x: Tensor, held: Box) -> Tensor:
        """The entries as a view of what a rank holds of the parameter."""
        return x[self.box.within(held)]

    def of_block(self, block: Tensor) -> Tensor:
        """The entries as a view of the block, of the same shape."""
        lengths = self.grid.shape
        end = len(lengths)
        for axis in reversed(range(len(self.groups))):
            own = lengths[end - self.groups[axis] : end]
            end -= self.groups[axis]
            block = block.narrow(axis, self.offsets[axis], math.prod(own))
            block = torch.unflatten(block, axis, own) if own else block.squeeze(axis)
        return block[self.box.within(self.grid)]


def regions(shape: tuple[int, ...], block: BlockGrid, held: Box) -> Iterator[Region]:
    """The regions of a single block of a parameter of that shape in what a rank holds of it, in a fixed order."""
    groups = grouping(shape, block.merged)
    runs, first = [], 0
    for group, start, length in zip(groups, block.start, block.tile, strict=True):
        runs.append(list(_boxes(start, start + length, shape[first : first + group])))
        first += group
    for parts in itertools.product(*runs):
        grid = Box(sum((a for _, a, _ in parts), ()), sum((b for _, _, b in parts), ()))
        box = grid.common(held)
        if box is not None:
            offsets = tuple(at - start for (at, _, _), start in zip(parts, block.start, strict=True))
            yield Region(box, grid, offsets, groups)


def grouping(shape: tuple[int, ...], merged: tuple[int, ...]) -> tuple[int, ...]:
    """How many axes of a shape each merged axis is made of; axes of length 1 go wherever they stand."""
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
    """The entries start <= i < stop of the flattened axes as (first i, box start, box stop), in order."""
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
