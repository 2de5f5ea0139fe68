"""Regions: entries that a block and a rank's shard of its parameter have in common, as views of both.

Blocks are cut from a parameter in its merged shape, shards in its own. A run of entries along a merged axis is a union
of boxes in the axes that were merged, at most 2k - 1 boxes for k axes; along an axis that is divided into groups it is
one box for each group. A region lies in one such box on every axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking.block_grid import BlockGrid, Numbers, Piece
from eigengraft.blocking.boxes import Box, boxes_of_run

from .layouts import Layout

Counts = NDArray[np.int64]


class Stride(NamedTuple):
    """How far on in a block the next entry along an axis of its parameter is: so many places, along which axis."""

    axis: int
    places: int


@dataclass(frozen=True)
class Region:
    """Entries that a block and a shard have in common.

    box: the entries, in the axes of the parameter.
    corner: where the first of them lies in the block.
    strides: along each axis of the parameter, how far on in the block the next entry is.
    """

    box: Box
    corner: Numbers
    strides: tuple[Stride, ...]

    def in_shard(self, shard: Tensor, held: Box) -> Tensor:
        """The entries as a view of a shard that holds the box `held` of the parameter."""
        return shard[self.box.within(held)]

    def in_block(self, block: Tensor) -> Tensor:
        """The entries as a view of the block, in the shape that `in_shard` has."""
        own = block.stride()
        first = block.storage_offset() + sum(at * stride for at, stride in zip(self.corner, own, strict=True))
        return torch.as_strided(block, self.box.shape, [own[s.axis] * s.places for s in self.strides], first)


class _Run(NamedTuple):
    """Entries of a piece of a block that are a box along some axes of the parameter.

    start, stop: the box.
    moves: distance of its first entry from that of the piece, by axis of the merged shape.
    strides: as in a region.
    """

    start: Numbers
    stop: Numbers
    moves: Mapping[int, int]
    strides: tuple[Stride, ...]


def regions(shape: tuple[int, ...], block: BlockGrid, held: Box) -> Iterator[Region]:
    """The regions of one block of a parameter of that shape and of a rank's box `held`, in a fixed order."""
    pairs = list(corresponding(shape, block.merged))
    for piece in block.pieces:
        strides = _strides(block, piece)
        options = [list(_runs([shape[a] for a in own], merged, piece, strides, block.merged)) for own, merged in pairs]
        for runs in itertools.product(*options):
            outer = Box(sum((run.start for run in runs), ()), sum((run.stop for run in runs), ()))
            box = outer.common(held)
            if box is not None:
                yield _region(box, outer, piece, runs, strides)


def holding(layout: Layout, block: BlockGrid) -> Counts:
    """`[R]`, number of entries of a block that each rank holds."""
    start = np.array([box.start for box in layout.boxes]).reshape(len(layout.boxes), -1)  # [R, axes]
    stop = np.array([box.stop for box in layout.boxes]).reshape(len(layout.boxes), -1)
    found = np.zeros(len(layout.boxes), dtype=np.int64)
    for region in regions(layout.shape, block, Box((0,) * len(layout.shape), layout.shape)):
        common = np.minimum(stop, region.box.stop) - np.maximum(start, region.box.start)
        found += common.clip(min=0).prod(1).astype(np.int64)
    return found


def _region(box: Box, outer: Box, piece: Piece, runs: tuple[_Run, ...], strides: Mapping[int, Stride]) -> Region:
    """The region of a box; outer: the box of the runs, which it lies in."""
    own, corner = sum((run.strides for run in runs), ()), list(piece.offset)
    moves = [(strides.get(axis, ALONE), distance) for run in runs for axis, distance in run.moves.items()]
    inside = [first - start for first, start in zip(box.start, outer.start, strict=True)]
    for stride, distance in [*moves, *zip(own, inside, strict=True)]:
        corner[stride.axis] += distance * stride.places
    return Region(box, tuple(corner), own)


ALONE = Stride(0, 0)
"""Along an axis of the parameter of which a block has one entry."""


def corresponding(shape: Numbers, merged: Numbers) -> Iterator[tuple[range, range]]:
    """(axes of a shape, axes of its merged shape) that have the same entries; one side is one axis, or none.

    Several axes were merged into one, or one was divided into several; an axis of length 1 belongs to a neighbour.
    """
    first, place = 0, 0
    while place < len(merged):
        last, end, length, product = first, place + 1, merged[place], 1
        while last < len(shape) and (product < length or shape[last] == 1 or end == len(merged)):
            product *= shape[last]
            last += 1
        while product > length:
            length *= merged[end]
            end += 1
        yield range(first, last), range(place, end)
        first, place = last, end


def _strides(block: BlockGrid, piece: Piece) -> dict[int, Stride]:
    """How far on in the block the next entry of a piece is, by axis of the merged shape."""
    found = {}
    for axis, joined in enumerate(block.joined):
        places = 1
        for own in reversed(joined):
            found[own] = Stride(axis, places)
            places *= piece.lengths[own]
    return found


def _runs(
    lengths: list[int], merged: range, piece: Piece, strides: Mapping[int, Stride], whole: Numbers
) -> Iterator[_Run]:
    """The runs of a piece along axes of the parameter of these lengths, of which there are `merged` in the shape
    `whole`."""
    *groups, axis = merged
    stride, start = strides.get(axis, ALONE), piece.start[axis]
    if not groups:
        inner = [math.prod(lengths[k + 1 :]) for k in range(len(lengths))]
        own = tuple(Stride(stride.axis, stride.places * length) for length in inner)
        for first, low, high in boxes_of_run(start, start + piece.lengths[axis], tuple(lengths)):
            yield _Run(low, high, {axis: first - start}, own)
        return
    wide = next((k for k, length in enumerate(lengths) if length > 1), 0)  # the others have length 1
    for index in itertools.product(*(range(piece.start[a], piece.start[a] + piece.lengths[a]) for a in groups)):
        first = start + sum(i * math.prod(whole[a + 1 : axis + 1]) for a, i in zip(groups, index, strict=True))
        lows = tuple(first if k == wide else 0 for k in range(len(lengths)))
        highs = tuple(first + piece.lengths[axis] if k == wide else 1 for k in range(len(lengths)))
        moves = {a: i - piece.start[a] for a, i in zip(groups, index, strict=True)}
        yield _Run(lows, highs, moves, tuple(stride if k == wide else ALONE for k in range(len(lengths))))
