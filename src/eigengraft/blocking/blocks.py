"""Rules that cut parameters into blocks.

`Blocking` is the rule that a recipe declares (Shi et al. 2023, section 3.3): small axes of a matrix are merged, then
long axes are split. The result is a list of grids of equal blocks (`BlockGrid`), which together cover the parameter.

The merged shape of a matrix is its shape after small axes were merged.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.component import Component

from .views import Matrices


@dataclass(frozen=True)
class Box:
    """Entries of a tensor with start <= index < stop on every axis."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of the box along each axis, at least 0."""
        return tuple(max(b - a, 0) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of entries of the box."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """Return the intersection of two boxes; None if it is empty."""
        box = Box(tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop)))
        return box if box.numel else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor that consists of the entries of `outer`."""
        corners = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(a - origin, b - origin) for a, b, origin in corners)


def axis_pairs(shape: Numbers, merged: Numbers) -> Iterator[tuple[range, range]]:
    """Yield pairs of ranges of axes, one of `shape` and one of `merged`, that contain the same entries.

    `shape` and `merged` are two shapes of one tensor. For the shapes (2, 3, 4) and (6, 4) the pairs are (axes 0 and 1,
    axis 0) and (axis 2, axis 1). An axis of length 1 belongs to the pair of a neighboring axis.
    """
    first, place = 0, 0
    while place < len(merged):
        last, end, length, product = first, place + 1, merged[place], 1
        while last < len(shape) and (product < length or shape[last] == 1 or end == len(merged)):
            product *= shape[last]
            last += 1
        while product > length > 0:
            length *= merged[end]
            end += 1
        yield range(first, last), range(place, end)
        first, place = last, end


def boxes_of_run(
    start: int, stop: int, lengths: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield boxes that together contain the entries start <= i < stop of a flattened tensor, in the order of i.

    Each item is (i of the first entry of the box, start of the box, stop of the box). A tensor with k axes needs at
    most 2k - 1 boxes.

    lengths: shape of the tensor before it was flattened.
    """
    if not lengths:
        yield 0, (), ()
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
        for first, low, high in boxes_of_run(column, column + end - at, lengths[1:]):
            yield row * inner + first, (row, *low), (row + 1, *high)
        at = end


Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A set of entries that is a box both in a block and in the parameter.

    A block has several pieces only if an axis of the block was flattened from several axes of the parameter. All blocks
    of a grid have the same pieces, at different places in the parameter. Axes of the parameter are those of the shape
    `BlockGrid.merged`.

    start: first index of the piece in the parameter, along each axis of the parameter, for the first block of the grid.
    lengths: lengths of the piece along the axes of the parameter.
    offset: first index of the piece in its block, along each axis of the block.
    """

    start: Numbers
    lengths: Numbers
    offset: Numbers


@dataclass(frozen=True)
class BlockGrid:
    """A grid of equal, evenly spaced blocks of one parameter. Axes of the parameter are those of its shape `merged`.

    merged: shape of the parameter after small axes were merged, or after one axis was divided into equal groups.
    count: number of blocks along each axis of `merged`.
    step: distance in entries from one block to the next, along each axis of `merged`.
    pieces: the boxes of `merged` of which the first block consists: one, unless an axis of the block was flattened from
        several axes of `merged`.
    joined: for each axis of a block, the axes of `merged` that were flattened into it. A block has length 1 along axes
        of `merged` that are not in `joined`, such as an axis of experts.
    keys: for each block, in row-major order of the grid, its number among all blocks of the parameter.
    matrices: for each block, in the same order, the number of its matrix among the matrices of the parameter.
    """

    merged: Numbers
    count: Numbers
    step: Numbers
    pieces: tuple[Piece, ...]
    joined: tuple[Numbers, ...]
    keys: Numbers
    matrices: Numbers

    @classmethod
    def single(cls, shape: Numbers) -> BlockGrid:
        """Return a grid with one block: a full parameter of the given shape."""
        zeros, axes = (0,) * len(shape), tuple((axis,) for axis in range(len(shape)))
        return cls(shape, (1,) * len(shape), shape, (Piece(zeros, shape, zeros),), axes, (0,), (0,))

    @cached_property
    def shape(self) -> Numbers:
        """Shape of a block."""
        lengths = [[math.prod(p.lengths[axis] for axis in own) for own in self.joined] for p in self.pieces]
        ends = [map(operator.add, p.offset, own) for p, own in zip(self.pieces, lengths, strict=True)]
        return tuple(map(max, zip(*ends, strict=True)))

    @cached_property
    def is_parameter(self) -> bool:
        """True if the grid has one block, which is the full parameter, reshaped."""
        axes = [axis for own in self.joined for axis in own]
        return len(self.pieces) == 1 and self.pieces[0].lengths == self.merged and axes == sorted(axes)

    def block(self, index: int) -> BlockGrid:
        """Return a grid that contains one block of this grid.

        index: position of the block in `keys`.
        """
        at = [int(i) for i in np.unravel_index(index, self.count)]
        shift = [i * step for i, step in zip(at, self.step, strict=True)]
        moved = tuple(
            Piece(tuple(s + d for s, d in zip(piece.start, shift, strict=True)), piece.lengths, piece.offset)
            for piece in self.pieces
        )
        ones, key, matrix = (1,) * len(self.count), self.keys[index], self.matrices[index]
        return BlockGrid(self.merged, ones, self.step, moved, self.joined, (key,), (matrix,))

    def in_parameter(self, x: Tensor) -> list[Tensor]:
        """Return views of x, one for each piece of a block.

        A piece is a part of a block that is a box both in the block and in the parameter. Most blocks are a single
        piece, and all blocks of the grid consist of the same pieces. A view has the entries of its piece in all blocks:
        its first axes are those of the grid (`count`), its last axes are those of the piece.

        x: the parameter, or a tensor with as many entries, in the shape `merged`.
        """
        return self._views(x, self._pieces_of_parameter)

    def in_blocks(self, blocks: Tensor) -> list[Tensor]:
        """Return tensors with the entries of the n blocks, one for each piece of a block.

        A piece is a part of a block that is a box both in the block and in the parameter. Most blocks are a single
        piece, and all blocks of the grid consist of the same pieces. A tensor has the entries of its piece in all n
        blocks. `in_parameter` returns tensors of the same shapes with the same entries of the parameter, so that
        `copy_` between the two lists gathers or scatters blocks. The results are views if `blocks` is contiguous, else
        copies.

        blocks: the n blocks of the grid, `[n, *shape]`.
        """
        return self._views(blocks, self._pieces_of_blocks) if blocks.is_contiguous() else self._pieces_of_blocks(blocks)

    def _views(self, x: Tensor, cut: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Return the views of x that the function `cut` makes.

        The strides and offsets of the views are cached, so that later calls make each view by one operation.

        x: tensor with the entries of the parameter or of all blocks.
        cut: function that returns views of x, each of which takes several operations.
        """
        key, start = (cut.__name__, x.stride()), x.storage_offset()
        if key not in self._layouts:
            found = cut(x)
            self._layouts[key] = [(view.shape, view.stride(), view.storage_offset() - start) for view in found]
            return found
        return [x.as_strided(shape, stride, start + offset) for shape, stride, offset in self._layouts[key]]

    @cached_property
    def _layouts(self) -> dict[tuple[str, Numbers], list[tuple[Numbers, Numbers, Any]]]:
        """Cache of `_views`. A key is (name of the function that makes the views, strides of the tensor). A value is
        the list of (shape, strides, offset) of each view.
        """
        return {}

    def _pieces_of_parameter(self, x: Tensor) -> list[Tensor]:
        return [self._view(x, piece) for piece in self.pieces]

    def _pieces_of_blocks(self, blocks: Tensor) -> list[Tensor]:
        grid, order = blocks.reshape(*self.count, *self.shape), len(self.count)
        found = []
        for piece in self.pieces:
            view = grid
            for axis in reversed(range(len(self.joined))):
                own = tuple(piece.lengths[a] for a in self.joined[axis])
                if math.prod(own) != self.shape[axis]:
                    view = view.narrow(order + axis, piece.offset[axis], math.prod(own))
                if len(own) != 1:
                    view = torch.unflatten(view, order + axis, own) if own else view.squeeze(order + axis)
            found.append(view)
        return found

    def _view(self, x: Tensor, piece: Piece) -> Tensor:
        for axis, (start, length) in enumerate(zip(piece.start, piece.lengths, strict=True)):
            span = (self.count[axis] - 1) * self.step[axis] + length
            if span != x.shape[axis]:
                x = x.narrow(axis, start, span)
            # after this `axis` counts blocks, and a new last axis has their entries
            x = x.unfold(axis, length, self.step[axis])
        order = len(self.merged)
        used = [axis for own in self.joined for axis in own]
        alone = [axis for axis in range(order) if axis not in used]
        x = x.permute(*range(order), *(order + axis for axis in (*used, *alone)))
        for _ in alone:
            x = x.squeeze(-1)
        return x


@dataclass(frozen=True)
class Span:
    """Entries start <= i < start + length along one axis of a parameter."""

    axis: int
    start: int
    length: int


@dataclass(frozen=True)
class EqualMatrices:
    """Matrices of one parameter that have the same shape and are evenly spaced.

    lattice: {axis of the parameter: (number of matrices along this axis, distance from one matrix to the next)}.
    axes: for each axis of the first matrix, the ranges of the parameter's axes (`Span`) that are flattened into it.
    """

    lattice: Mapping[int, tuple[int, int]]
    axes: tuple[tuple[Span, ...], ...]

    @property
    def shape(self) -> Numbers:
        """Shape of a matrix."""
        return tuple(math.prod(span.length for span in spans) for spans in self.axes)


@dataclass(frozen=True)
class Tiles:
    """Ranges of equal length (tiles) of one axis of a matrix. A block is the intersection of one tile on each axis of
    the matrix.

    The axis may consist of several axes of the parameter, flattened into one. A tile then consists of one or more boxes
    of the parameter, one behind the other.

    first: number of the first of these tiles among all tiles of the axis.
    boxes: the boxes of the first tile, each as (offset, {axis of the parameter: (start, length)}). `offset` is the
        number of entries of the tile before the box.
    lattice: {axis of the parameter: (number of tiles along this axis, distance from one tile to the next)}; empty for a
        single tile.
    """

    first: int
    boxes: tuple[tuple[int, Mapping[int, tuple[int, int]]], ...]
    lattice: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def equal_runs(d: int, size: int) -> list[tuple[int, int, int, int]]:
    """Return runs of equal tiles that cover an axis of length d. The last tile may be shorter than `size`.

    A run is (number of its first tile, number of tiles, index of its first entry, length of a tile).
    """
    full = d // size
    runs = [(0, full, 0, size)] if full else []
    return [*runs, (full, 1, full * size, d - full * size)] if d % size else runs


def _matrix_grids(
    shape: Numbers, matrices: Matrices, merge: Callable[[Numbers], Numbers] | None, size: int | None
) -> Iterator[BlockGrid]:
    """Yield the grids of blocks of all matrices of a parameter.

    Blocks are numbered section by section, in each section matrix by matrix, and in each matrix in row-major order. A
    parameter that is not divided into sections is one section.

    shape: shape of the parameter.
    matrices: the matrices of the parameter.
    merge: function that maps the shape of a matrix to its merged shape; None: axes are not merged.
    size: longest axis of a block; None: matrices are not cut.
    """
    axis, keys, numbers = matrices.axis(shape), 0, 0
    groups = (matrices.groups, shape[axis] // matrices.groups) if matrices.groups > 1 else (shape[axis],)
    factored = (*shape[:axis], *groups, *shape[axis + 1 :])
    for equal in _equal_matrices(shape, matrices):
        merged, joined = equal.shape, list(equal.axes)
        if merge is not None:
            merged = merge(equal.shape)
            joined = [sum(equal.axes[own.start : own.stop], ()) for own, _ in axis_pairs(equal.shape, merged)]
        sides = [min(d, size or d) for d in merged]
        tiles = [math.ceil(d / side) for d, side in zip(merged, sides, strict=True)]
        for chosen in itertools.product(
            *(_tiles(spans, side, equal) for spans, side in zip(joined, sides, strict=True))
        ):
            yield _grid(factored, equal, joined, chosen, tiles, (keys, numbers))
        found = math.prod(count for count, _ in equal.lattice.values())
        keys, numbers = keys + found * math.prod(tiles), numbers + found


def _equal_matrices(shape: Numbers, matrices: Matrices) -> Iterator[EqualMatrices]:
    """Yield the matrices of each section of a parameter. A section is a part of one axis, such as the queries of a
    fused projection. All of its matrices have one shape.

    The axis may contain all sections several times, once for each group of heads: queries, keys, values, queries, keys,
    values, and so on. The results then refer to the axes of a reshaped parameter, in which two axes replace this axis:
    the number of the group, and the index within the group.
    """
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
        yield EqualMatrices(lattice, tuple(spans[axis] for axis in matrices.matrix_axes(shape)))
        start += length


def _tiles(spans: Sequence[Span], side: int, equal: EqualMatrices) -> Iterator[Tiles]:
    """Cut one axis of equal matrices into tiles, which are ranges of equal length. Tiles that are evenly spaced in the
    parameter are yielded as one `Tiles`, all other tiles one by one.

    spans: the axis that is cut. It is one or several axes of the parameter, flattened, and `spans` has the range of
        each for the first matrix.
    side: length of a tile. The last tile may be shorter.
    equal: the matrices.
    """
    lengths = tuple(span.length for span in spans)
    for first, count, start, length in equal_runs(math.prod(lengths), side):
        even = len(spans) == 1 and spans[0].axis not in equal.lattice
        for tile in [0] if even else range(count):
            at = start + tile * length
            boxes = tuple(
                (begin - at, {s.axis: (s.start + a, b - a) for s, a, b in zip(spans, low, high, strict=True)})
                for begin, low, high in boxes_of_run(at, at + length, lengths)
            )
            yield Tiles(first + tile, boxes, {spans[0].axis: (count, length)} if even else {})


def _grid(
    factored: Numbers,
    equal: EqualMatrices,
    joined: Sequence[Sequence[Span]],
    chosen: Sequence[Tiles],
    tiles: Sequence[int],
    before: tuple[int, int],
) -> BlockGrid:
    """Return the grid of all blocks whose tiles are in `chosen`.

    A tile is a range of one axis of a matrix. A block is the intersection of one tile for each axis, in one of the
    equal matrices.

    factored: shape of the parameter. An axis that has queries, keys and values of each group of heads is divided into
        two axes: the number of the group, and the index within the group.
    equal: the matrices that are cut into blocks.
    joined: for each axis of a matrix, the ranges of the parameter's axes that are flattened into it.
    chosen: for each axis of a matrix, the tiles of the blocks in this grid.
    tiles: for each axis of a matrix, the number of tiles that the whole axis has, also outside of this grid.
    before: number of blocks, and number of matrices, in the earlier grids of the parameter. This grid continues both
        numberings.
    """
    order = len(factored)
    lattice = dict(equal.lattice)
    for own in chosen:
        lattice.update(own.lattice)
    pieces = tuple(_piece(order, boxes) for boxes in itertools.product(*(own.boxes for own in chosen)))
    count = tuple(lattice.get(axis, (1, 1))[0] for axis in range(order))
    step = tuple(lattice.get(axis, (1, pieces[0].lengths[axis]))[1] for axis in range(order))
    matrix, block = np.zeros((2, *count), dtype=np.int64)
    for axis, (number, _) in equal.lattice.items():
        matrix = matrix * number + _along(axis, count)
    for own, number in zip(chosen, tiles, strict=True):
        block = block * number + own.first + sum(_along(axis, count) for axis in own.lattice)
    keys = (before[0] + matrix * math.prod(tiles) + block).ravel().tolist()
    matrices = (before[1] + matrix).ravel().tolist()
    axes = tuple(tuple(span.axis for span in spans) for spans in joined)
    return BlockGrid(factored, count, step, pieces, axes, tuple(keys), tuple(matrices))


def _piece(order: int, boxes: Sequence[tuple[int, Mapping[int, tuple[int, int]]]]) -> Piece:
    """Return the `Piece` that is given by a range of indices along each axis of a block.

    An axis of the block may be flattened from several axes of the parameter. The range is then a box in these axes.

    order: number of axes of the parameter.
    boxes: for each axis of the block, (offset, box). `box` is {axis of the parameter: (start, length)} for the axes
        from which the block's axis is flattened. `offset` is the first index of the range along the block's axis.
    """
    where = {axis: own for _, box in boxes for axis, own in box.items()}
    start, lengths = zip(*(where.get(axis, (0, 1)) for axis in range(order)), strict=True)
    return Piece(start, lengths, tuple(offset for offset, _ in boxes))


def _along(axis: int, count: Numbers) -> NDArray[np.int64]:
    """Return the indices 0, 1, ... along one axis of a grid, in a shape that broadcasts over the grid.

    count: shape of the grid.
    """
    return np.arange(count[axis]).reshape(*(-1 if k == axis else 1 for k in range(len(count))))


ONE_TENSOR = Matrices()
"""The matrices of a parameter that is not divided: the parameter as one tensor."""


class Blocking(Component):
    """The rule that cuts parameters into blocks. By default each matrix of a parameter is one block."""

    size: int | None = Field(
        default=None,
        ge=1,
        description="longest axis of a block, in entries; longer axes are split; default: no splitting",
    )
    merge: int | None = Field(
        default=None,
        ge=1,
        description="merge adjacent axes while the product of their lengths is at most this; default: no merging",
    )
    merge_from: Literal["last", "first"] = Field(
        default="last", description="axis at which merging starts: the last or the first"
    )
    min_axes: int = Field(default=1, ge=1, description="number of axes at which merging stops")
    drop_ones: bool = Field(
        default=True,
        description="remove axes of length 1 before merging; false: the weight of a layer with one input or one output "
        "stays a matrix",
    )

    @model_validator(mode="after")
    def _merges(self) -> Self:
        for name in ("merge_from", "min_axes", "drop_ones"):
            value = getattr(self, name)
            if self.merge is None and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}: has no effect without `merge`, got {value!r}; set `merge`, or remove `{name}`"
                )
        return self

    def merged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a parameter or matrix after small axes were merged.

        If `merge` is set, axes of length 1 are removed too, unless `drop_ones` is False. The shape of a scalar becomes
        (1,).
        """
        if self.merge is None or 0 in shape:
            return shape or (1,)
        axes = [d for d in shape if d != 1 or not self.drop_ones] or [1]
        axes = axes if self.merge_from == "last" else axes[::-1]
        out = [axes[-1]]
        for done, d in enumerate(reversed(axes[:-1]), start=1):
            left = len(out) + len(axes) - done
            if left > self.min_axes and out[-1] * d <= self.merge:
                out[-1] *= d
            else:
                out.append(d)
        return tuple(out[::-1] if self.merge_from == "last" else out)

    def __hash__(self) -> int:
        return hash((self.size, self.merge, self.merge_from, self.min_axes, self.drop_ones))

    def grids(self, shape: tuple[int, ...], matrices: Matrices = ONE_TENSOR) -> tuple[BlockGrid, ...]:
        """Return grids of blocks that cover a parameter of the given shape; none for an empty parameter.

        matrices: the matrices of the parameter. Each is cut separately.
        """
        return _grids(self, tuple(shape), matrices)


@lru_cache(maxsize=128)  # an optimizer calls it several times, and parameters of a model have few shapes
def _grids(rule: Blocking, shape: tuple[int, ...], matrices: Matrices) -> tuple[BlockGrid, ...]:
    if 0 in shape:
        return ()
    matrices.require_fit(shape)
    if matrices.divides or matrices.outputs == "last":
        return tuple(_matrix_grids(shape, matrices, rule.merged, rule.size))
    merged = (*shape[: matrices.batch], *rule.merged(shape[matrices.batch :]))
    return tuple(_matrix_grids(merged, matrices, None, rule.size))


def matrix_shape(block: Sequence[int]) -> tuple[int, int]:
    """Return the shape (m, n) of a block as a matrix.

    m is the length of the first axis, and n is the product of the lengths of all other axes. A vector has one column.
    """
    return (block[0] if block else 1), math.prod(block[1:])
