"""Matrices over the inputs or the outputs of a parameter, and the part of them that belongs to a block.

Legend: a parameter has B matrices along its batch axes, of n inputs or n outputs each; a block has c of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..numerics import has_values, kept_on_device
from .stacks import Stack
from .views import Matrices

MatrixSide = Literal["inputs", "outputs"]
"""The side of a matrix: its columns are inputs, its rows outputs."""


@dataclass(frozen=True)
class SideMatrix:
    """A matrix over the inputs, or over the outputs, of one parameter.

    value: `[n, n]`, or `[*batch, n, n]`.
    index: for each entry of the parameter, in its shape, the row of `[B n, n]` that its input or output has; a view.
    side: which of both.
    """

    value: Tensor
    index: Tensor
    side: MatrixSide

    @classmethod
    def of(cls, value: Tensor, shape: tuple[int, ...], matrices: Matrices, side: MatrixSide) -> SideMatrix:
        """The matrix of a parameter of that shape. Raises ValueError if it has another number of inputs or outputs."""
        wanted = side_shape(shape, matrices, side)
        if tuple(value.shape) != wanted:
            raise ValueError(f"a tensor of shape {wanted} is required for {shape}, got {tuple(value.shape)}")
        return cls(value, side_index(shape, matrices, side, value.device), side)

    def blocks(self, own: Tensor) -> Tensor:
        """The rows and columns of k blocks, `[k, c, c]`; own `[k, c]`: entries of `index`."""
        n = self.value.shape[-1]
        return self.value.reshape(-1, n)[own[:, :, None], (own % n)[:, None, :]]


def side_shape(shape: tuple[int, ...], matrices: Matrices, side: MatrixSide) -> tuple[int, ...]:
    """The shape `[*batch, n, n]` of a matrix over the inputs or outputs of a parameter of that shape."""
    n = math.prod(shape[axis] for axis in _axes(shape, matrices, side))
    return (*shape[: matrices.batch], n, n)


def side_index(shape: tuple[int, ...], matrices: Matrices, side: MatrixSide, device: torch.device) -> Tensor:
    """For each entry of a parameter, in its shape, the number of its input or output, counted over its batch axes; a
    view."""
    counted = sorted([*range(matrices.batch), *_axes(shape, matrices, side)])
    lengths = [shape[axis] if axis in counted else 1 for axis in range(len(shape))]
    return torch.arange(math.prod(lengths), dtype=torch.int64, device=device).reshape(lengths).expand(shape)


def _axes(shape: tuple[int, ...], matrices: Matrices, side: MatrixSide) -> tuple[int, ...]:
    axes = matrices.matrix_axes(shape)
    return axes[1:] if side == "inputs" else axes[:1]


def side_of_blocks(index: Tensor, side: MatrixSide) -> Tensor:
    """`[N, c]`, the inputs or outputs of blocks, from their `index` `[N, r, *c]`; ValueError if rows of a block differ
    in its inputs, or columns in its outputs."""
    flat = index.flatten(2) if index.ndim > 2 else index.unsqueeze(-1)
    flat = flat if side == "inputs" else flat.mT
    if has_values(flat) and bool((flat != flat[:, :1]).any()):
        raise ValueError(
            f"blocks whose first axis is of outputs alone are required, got blocks of shape {tuple(index.shape[1:])}; "
            "set `blocking: {merge: ..., keep_axes: 2}`"
        )
    return flat[:, 0].long()


def side_blocks(stack: Stack, matrices: Sequence[SideMatrix | None]) -> Tensor:
    """The parts `[n, c, c]` of matrices over inputs or outputs, by position, that belong to blocks; 0 without one."""
    known = {int(at): matrix for at in np.unique(stack.param_ids) if (matrix := matrices[at]) is not None}
    zero = torch.zeros((), dtype=torch.int64, device=stack.device)
    nothing = {at: zero.expand(grid.merged) for at, grid in stack.grids}
    indices = [known[at].index if at in known else nothing.get(at, zero) for at in range(len(matrices))]
    side = next(matrix.side for matrix in matrices if matrix is not None)
    own = side_of_blocks(stack.gather(indices), side)
    out = torch.zeros((*own.shape, own.shape[-1]), dtype=stack.dtype, device=stack.device)
    for at, matrix in known.items():
        rows = kept_on_device(np.flatnonzero(stack.param_ids == at), stack.device)
        out[rows] = matrix.blocks(own[rows]).to(out.dtype)
    return out
