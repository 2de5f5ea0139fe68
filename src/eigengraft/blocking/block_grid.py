"""Grids of equal blocks of one parameter, as views of the parameter and of the stack that they are gathered into."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a block that is a box of the parameter too.

    start: first index in the parameter of the piece of the first block, along each axis of the parameter.
    lengths: lengths along the axes of the parameter.
    offset: where the piece begins in the block, along each axis of the block.
    """

    start: Numbers
    lengths: Numbers
    offset: Numbers


@dataclass(frozen=True)
class BlockGrid:
    """An even grid of equal blocks of one parameter.

    "The parameter" is here the parameter in a shape in which blocks are made of boxes: its small axes merged, or an
    axis divided into equal groups.

    merged: that shape.
    count: number of blocks along each axis of the parameter.
    step: distance of neighbouring blocks along each axis of the parameter.
    pieces: what a block is made of.
    joined: the axes of the parameter that each axis of a block is made of, the last one fastest; along an axis that is
        in none of them, such as one of experts, a block has length 1.
    keys: number of each block among all blocks of the parameter, in row-major order of the grid.
    matrices: number of the matrix of the parameter that each block belongs to, in the same order.
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
        """The grid of one block that is a parameter of that shape."""
        zeros, axes = (0,) * len(shape), tuple((axis,) for axis in range(len(shape)))
        return cls(shape, (1,) * len(shape), shape, (Piece(zeros, shape, zeros),), axes, (0,), (0,))

    @cached_property
    def shape(self) -> Numbers:
        """The shape of a block."""
        ends = [[at + n for at, n in zip(p.offset, self._flat_lengths(p), strict=True)] for p in self.pieces]
        return tuple(map(max, zip(*ends, strict=True)))

    @cached_property
    def is_parameter(self) -> bool:
        """Whether the parameter, reshaped, is the only block."""
        axes = [axis for own in self.joined for axis in own]
        return len(self.pieces) == 1 and self.pieces[0].lengths == self.merged and axes == sorted(axes)

    def block(self, index: int) -> BlockGrid:
        """One block, as a grid of its own."""
        at = [int(i) for i in np.unravel_index(index, self.count)]
        shift = [i * step for i, step in zip(at, self.step, strict=True)]
        moved = tuple(
            Piece(tuple(s + d for s, d in zip(piece.start, shift, strict=True)), piece.lengths, piece.offset)
            for piece in self.pieces
        )
        ones, key, matrix = (1,) * len(self.count), self.keys[index], self.matrices[index]
        return BlockGrid(self.merged, ones, self.step, moved, self.joined, (key,), (matrix,))

    def in_parameter(self, x: Tensor) -> list[Tensor]:
        """The pieces of all blocks as views of x, which has the merged shape: `[*count, *lengths]` each.

        The lengths are in the order of `joined`, those of other axes left out.
        """
        return self._views(x, self._pieces_of_parameter)

    def in_blocks(self, blocks: Tensor) -> list[Tensor]:
        """The pieces of blocks `[n, *shape]`, in the shapes that `in_parameter` has; views of contiguous blocks."""
        return self._views(blocks, self._pieces_of_blocks) if blocks.is_contiguous() else self._pieces_of_blocks(blocks)

    def _views(self, x: Tensor, cut: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Return cut(x), views of x; after the first time for such strides, one operation makes each of them."""
        key, start = (cut.__name__, x.stride()), x.storage_offset()
        if key not in self._layouts:
            found = cut(x)
            self._layouts[key] = [(view.shape, view.stride(), view.storage_offset() - start) for view in found]
            return found
        return [x.as_strided(shape, stride, start + offset) for shape, stride, offset in self._layouts[key]]

    @cached_property
    def _layouts(self) -> dict[tuple[str, Numbers], list[tuple[Numbers, Numbers, Any]]]:
        """Shape, strides and offset of each view, by what was cut and its strides."""
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
            x = x.unfold(axis, length, self.step[axis])  # the count stays at the axis, the length is appended
        order = len(self.merged)
        used = [axis for own in self.joined for axis in own]
        alone = [axis for axis in range(order) if axis not in used]
        x = x.permute(*range(order), *(order + axis for axis in (*used, *alone)))
        for _ in alone:
            x = x.squeeze(-1)
        return x

    def _flat_lengths(self, piece: Piece) -> list[int]:
        return [math.prod(piece.lengths[axis] for axis in own) for own in self.joined]
