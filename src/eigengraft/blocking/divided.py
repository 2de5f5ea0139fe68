"""Blocks of matrices that are sections or heads of a parameter, or are stored transposed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .block_grid import BlockGrid, Numbers, Piece
from .boxes import boxes_of_run, grouping
from .views import Matrices


@dataclass(frozen=True)
class Span:
    """Entries start <= i < start + length along one axis of a parameter."""

    axis: int
    start: int
    length: int


@dataclass(frozen=True)
class Part:
    """Equal matrices of one parameter.

    lattice: (count, step) from one matrix to the next, by axis of the parameter.
    axes: what each axis of the first matrix is made of: spans of axes of the parameter, the last one fastest.
    """

    lattice: Mapping[int, tuple[int, int]]
    axes: tuple[tuple[Span, ...], ...]

    @property
    def shape(self) -> Numbers:
        """The shape of a matrix."""
        return tuple(math.prod(span.length for span in spans) for spans in self.axes)


@dataclass(frozen=True)
class Tiles:
    """Equal tiles of one axis of a block.

    first: number of the first tile.
    boxes: what the first tile is made of: (where it begins in the tile, {axis of the parameter: (start, length)}).
    lattice: (count, step) from one tile to the next, by axis of the parameter.
    """

    first: int
    boxes: tuple[tuple[int, Mapping[int, tuple[int, int]]], ...]
    lattice: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def equal_runs(d: int, size: int) -> list[tuple[int, int, int, int]]:
    """Runs of equal tiles along one axis, as (first grid index, number of tiles, start, tile length)."""
    full = d // size
    runs = [(0, full, 0, size)] if full else []
    return [*runs, (full, 1, full * size, d - full * size)] if d % size else runs


def divided_grids(
    shape: Numbers, matrices: Matrices, merge: Callable[[Numbers], Numbers], size: int | None
) -> Iterator[BlockGrid]:
    """Grids of the blocks of all matrices of a parameter, each matrix merged and cut as if it were a parameter.

    Keys count sections, then the matrices of a section, then the blocks of a matrix in row-major order.
    """
    axis, keys, numbers = matrices.axis(shape), 0, 0
    groups = (matrices.groups, shape[axis] // matrices.groups) if matrices.groups > 1 else (shape[axis],)
    factored = (*shape[:axis], *groups, *shape[axis + 1 :])
    for part in _parts(shape, matrices):
        merged = merge(part.shape)
        ends = list(itertools.accumulate(grouping(part.shape, merged), initial=0))
        joined = [sum(part.axes[a:b], ()) for a, b in itertools.pairwise(ends)]
        sides = [min(d, size or d) for d in merged]
        tiles = [math.ceil(d / side) for d, side in zip(merged, sides, strict=True)]
        for chosen in itertools.product(
            *(_tiles(spans, side, part) for spans, side in zip(joined, sides, strict=True))
        ):
            yield _grid(factored, part, joined, chosen, tiles, (keys, numbers))
        found = math.prod(count for count, _ in part.lattice.values())
        keys, numbers = keys + found * math.prod(tiles), numbers + found


def _parts(shape: Numbers, matrices: Matrices) -> Iterator[Part]:
    """The matrices of each section; axes are those of the parameter with one axis divided into groups, if there are."""
    cut, grouped, start = matrices.axis(shape), matrices.groups > 1, 0
    moved = {axis: axis + (grouped and axis > cut) for axis in range(len(shape))}
    inner = cut + grouped
    for length, head in zip(matrices.parts(shape), matrices.head_lengths, strict=True):
        lattice = {axis: (shape[axis], 1) for axis in range(matrices.batch)}
        spans: dict[int, tuple[Span, ...]] = {
            axis: (Span(moved[axis], 0, shape[axis]),) for axis in matrices.matrix_axes(shape)
        }
        if head:
            lattice |= {cut: (matrices.groups, 1)} if grouped else {}
            lattice[inner] = (length // head, head)
            spans[cut] = (Span(inner, start, head),)
        else:
            spans[cut] = (*([Span(cut, 0, matrices.groups)] if grouped else []), Span(inner, start, length))
        yield Part(lattice, tuple(spans[axis] for axis in matrices.matrix_axes(shape)))
        start += length


def _tiles(spans: Sequence[Span], side: int, part: Part) -> Iterator[Tiles]:
    """The tiles of one axis of a block; equal ones together where they are evenly spaced along one axis."""
    lengths = tuple(span.length for span in spans)
    for first, count, start, length in equal_runs(math.prod(lengths), side):
        even = len(spans) == 1 and spans[0].axis not in part.lattice
        for tile in [0] if even else range(count):
            at = start + tile * length
            boxes = tuple(
                (begin - at, {s.axis: (s.start + a, b - a) for s, a, b in zip(spans, low, high, strict=True)})
                for begin, low, high in boxes_of_run(at, at + length, lengths)
            )
            yield Tiles(first + tile, boxes, {spans[0].axis: (count, length)} if even else {})


def _grid(
    factored: Numbers,
    part: Part,
    joined: Sequence[Sequence[Span]],
    chosen: Sequence[Tiles],
    tiles: Sequence[int],
    before: tuple[int, int],
) -> BlockGrid:
    """The grid of some tiles of all matrices of a part; before: keys and matrices that other parts have used."""
    order = len(factored)
    lattice = dict(part.lattice)
    for own in chosen:
        lattice.update(own.lattice)
    pieces = tuple(_piece(order, boxes) for boxes in itertools.product(*(own.boxes for own in chosen)))
    count = tuple(lattice.get(axis, (1, 1))[0] for axis in range(order))
    step = tuple(lattice.get(axis, (1, pieces[0].lengths[axis]))[1] for axis in range(order))
    matrix, block = np.zeros((2, *count), dtype=np.int64)
    for axis, (number, _) in part.lattice.items():
        matrix = matrix * number + _along(axis, count)
    for own, number in zip(chosen, tiles, strict=True):
        block = block * number + own.first + sum(_along(axis, count) for axis in own.lattice)
    keys = (before[0] + matrix * math.prod(tiles) + block).ravel().tolist()
    matrices = (before[1] + matrix).ravel().tolist()
    axes = tuple(tuple(span.axis for span in spans) for spans in joined)
    return BlockGrid(factored, count, step, pieces, axes, tuple(keys), tuple(matrices))


def _piece(order: int, boxes: Sequence[tuple[int, Mapping[int, tuple[int, int]]]]) -> Piece:
    """The piece of the first block that is a box along each of its axes."""
    where = {axis: own for _, box in boxes for axis, own in box.items()}
    start, lengths = zip(*(where.get(axis, (0, 1)) for axis in range(order)), strict=True)
    return Piece(start, lengths, tuple(offset for offset, _ in boxes))


def _along(axis: int, count: Numbers) -> NDArray[np.int64]:
    """Index along one axis, shaped to broadcast over a grid of that shape."""
    return np.arange(count[axis]).reshape(*(-1 if k == axis else 1 for k in range(len(count))))
