"""Stacks: equal blocks as one tensor `[N, *block]`, gathered from parameters and scattered back.

Signals over the inputs or outputs of a parameter are matrices; `side_blocks` gathers the parts that belong to blocks.

Legend: a parameter has B matrices along its batch axes, each with n inputs (or outputs); a block has c of the n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..numerics import has_values, kept_on_device
from .blocks import BlockGrid
from .views import Matrices

BYTES_ON_CPU, BYTES_ELSEWHERE = 2 << 20, 1 << 28
"""Largest size of a stack's tensor, in bytes. A step needs memory for a few such tensors: decoded slots and products.

On a CPU several of these tensors must fit into a cache, but fewer and larger stacks save time in Python. Measured for
mid-size models, a step with 2 MiB takes 0.96 times as long as with 1 MiB. A limit of 4 MiB saves another 2 %. But in a
process that never frees a larger tensor, such as training, a step with 4 MiB takes 1.1 times as long, because glibc
returns memory pages and requests them again. A device runs faster with fewer and larger kernels.
"""
ALIGNMENT = 16
"""Alignment of a stack's address, in bytes. At other addresses, products of small matrices may add in another order, as
MKL with AVX-512 does in float32 for sides of at most 11.
"""
JOINED = 1 << 12
"""Largest parameter, in entries, that a CPU copies into a stack to check its gradient and to write its update. Copying
larger parameters takes longer than the kernel calls that it saves (measured).
"""


def max_blocks(numbers: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the largest number of blocks for which no tensor of a stack exceeds the limit in bytes; at least one.

    numbers: entries of a block's largest tensor, which is the block itself or a slot.
    """
    return blocks_that_fit(BYTES_ON_CPU if device.type == "cpu" else BYTES_ELSEWHERE, numbers, dtype)


def blocks_that_fit(size: int, numbers: int, dtype: torch.dtype) -> int:
    """Return the number of blocks with `numbers` entries each that fit into `size` bytes; at least one."""
    return max(1, size // max(numbers * dtype.itemsize, 1))


def split_ranges(param_ids: Sequence[int], most: int, together: bool) -> list[tuple[int, int]]:
    """Split blocks into ranges (start, stop) of nearly equal length, with at most `most` blocks each.

    param_ids: position of the parameter that each block belongs to.
    together: True if all blocks of a parameter must be in one range, which may then be longer.
    """
    blocks = len(param_ids)
    ranges = -(-blocks // most)
    edges = [k * blocks // ranges for k in range(ranges + 1)]
    if together:
        edges = [at for at in edges if at in (0, blocks) or param_ids[at - 1] != param_ids[at]]
    return list(pairwise(edges))


@dataclass(frozen=True)
class Stack:
    """N equal blocks.

    block: shape of a block.
    dtype: dtype that the stack is computed in.
    device: device of the stack.
    grids: (position of a parameter, grid of the blocks of this parameter). Rows of the stack are in this order.
    """

    block: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grids: tuple[tuple[int, BlockGrid], ...]

    @cached_property
    def param_ids(self) -> NDArray[np.int64]:
        """`[N]`, position of the parameter that each block belongs to."""
        return np.array([param_id for param_id, grid in self.grids for _ in grid.keys], dtype=np.int64)

    @cached_property
    def positions(self) -> list[int]:
        """`param_ids` as a list."""
        positions: list[int] = self.param_ids.tolist()
        return positions

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """`[N]`, key of each block: its number in its parameter."""
        return tuple(key for _, grid in self.grids for key in grid.keys)

    @cached_property
    def of_parameters(self) -> bool:
        """True if each block is a full parameter, reshaped."""
        return all(grid.is_parameter for _, grid in self.grids)

    @cached_property
    def joins(self) -> bool:
        """True if it is faster to copy the parameters into this stack and run kernels on the stack than to run kernels
        on each parameter.
        """
        many = self.of_parameters and len(self.param_ids) > 1
        return many and self.device.type == "cpu" and math.prod(self.block) <= JOINED

    @cached_property
    def matrix_ids(self) -> NDArray[np.int64]:
        """`[N]`, a number for the matrix that each block belongs to. All matrices of all parameters have different
        numbers.
        """
        return np.array([(param_id << 32) + own for param_id, grid in self.grids for own in grid.matrices], np.int64)

    def select(self, active: NDArray[np.bool_]) -> Stack:
        """Return the stack of the blocks of active parameters.

        active: bool `[P]`, True for each active parameter, by position.
        """
        grids = tuple((param_id, grid) for param_id, grid in self.grids if active[param_id])
        return Stack(self.block, self.dtype, self.device, grids)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the blocks of tensors as `[N, *block]`.

        If the stack has a single block, the result may be a view of its tensor: do not write to the result. A tensor at
        an unaligned address is copied, so that products are rounded as for other tensors. The views of buckets that
        `DistributedDataParallel(..., gradient_as_bucket_view=True)` puts into `grad` can be such tensors.

        tensors: tensors in the shapes of the parameters, by position.
        """
        if self.of_parameters:
            block, dtype = self.block, self.dtype
            held = [tensors[param_id] for param_id in self.positions]
            sources = [x if x.shape == block else x.reshape(block) for x in held]
            if all([x.dtype is dtype for x in sources]):  # noqa: C419  a list is faster than a generator
                alone = len(sources) == 1 and sources[0].is_contiguous() and _is_aligned(sources[0])
                return sources[0].unsqueeze(0) if alone else torch.stack(sources)
        else:
            sources = [view for param_id, grid in self.grids for view in self._sources(grid, tensors[param_id])]
        out = torch.empty((len(self.param_ids), *self.block), dtype=self.dtype, device=self.device)
        torch._foreach_copy_(self._targets(out), sources)
        return out

    def scatter(self, rows: Tensor, buffers: Mapping[int, Tensor]) -> None:
        """Write blocks into buffers.

        rows: the blocks, `[N, *block]`.
        buffers: by position of a parameter, a tensor of its size in the shape `BlockGrid.merged`.
        """
        targets = [view for param_id, grid in self.grids for view in grid.in_parameter(buffers[param_id])]
        split = zip(self._split(rows), self.grids, strict=True)
        torch._foreach_copy_(targets, [view for blocks, (_, grid) in split for view in grid.in_blocks(blocks)])

    def _sources(self, grid: BlockGrid, x: Tensor) -> list[Tensor]:
        if grid.is_parameter:
            return [x if x.shape == grid.shape else x.reshape(grid.shape)]
        return grid.in_parameter(x if x.shape == grid.merged else x.reshape(grid.merged))

    def _targets(self, out: Tensor) -> list[Tensor]:
        if self.of_parameters:
            return list(out.unbind(0))
        pairs = zip(self._split(out), self.grids, strict=True)
        return [v for x, (_, grid) in pairs for v in ([x.squeeze(0)] if grid.is_parameter else grid.in_blocks(x))]

    def _split(self, rows: Tensor) -> list[Tensor]:
        return list(torch.split(rows, [len(grid.keys) for _, grid in self.grids]))


def _is_aligned(x: Tensor) -> bool:
    """Return True if a tensor is aligned as a new tensor is, so that its matrix products have the same rounding."""
    return x.storage_offset() * x.element_size() % ALIGNMENT == 0


MatrixSide = Literal["inputs", "outputs"]
"""The side of a parameter that a matrix `[n, n]` belongs to: its inputs (columns) or its outputs (rows)."""


@dataclass(frozen=True)
class SideMatrix:
    """A matrix over the inputs, or over the outputs, of one parameter.

    value: the matrix `[n, n]`, or one matrix for each index of the batch axes, `[*batch, n, n]`.
    index: number of the input (or output) of each entry of the parameter, as a view in the shape of the parameter. The
        numbers run through all matrices of the parameter: input k belongs to row k of `value.reshape(-1, n)`.
    side: inputs or outputs.
    """

    value: Tensor
    index: Tensor
    side: MatrixSide

    @classmethod
    def of(cls, value: Tensor, shape: tuple[int, ...], matrices: Matrices, side: MatrixSide) -> SideMatrix:
        """Return the matrix `value` over the inputs or outputs (`side`) of a parameter of shape `shape`.

        Raises ValueError if the shape of `value` does not fit the parameter.
        """
        wanted = side_shape(shape, matrices, side)
        if tuple(value.shape) != wanted:
            raise ValueError(
                f"a tensor of shape {wanted} is required for a parameter of shape {shape}, got {tuple(value.shape)}"
            )
        return cls(value, side_index(shape, matrices, side, value.device), side)

    def blocks(self, own: Tensor) -> Tensor:
        """Return for each of k blocks the matrix over its c inputs or outputs, `[k, c, c]`.

        own: the entries of `index` for the inputs or outputs of each block, `[k, c]`.
        """
        n = self.value.shape[-1]
        return self.value.reshape(-1, n)[own[:, :, None], (own % n)[:, None, :]]


def side_shape(shape: tuple[int, ...], matrices: Matrices, side: MatrixSide) -> tuple[int, ...]:
    """Return the shape `[*batch, n, n]` of a matrix over the n inputs or outputs of a parameter of shape `shape`."""
    n = math.prod(shape[axis] for axis in _axes(shape, matrices, side))
    return (*shape[: matrices.batch], n, n)


def side_index(shape: tuple[int, ...], matrices: Matrices, side: MatrixSide, device: torch.device) -> Tensor:
    """Return for each entry of a parameter the number of its input or output, counted over the batch axes.

    The result has the shape of the parameter and is a view.
    """
    counted = sorted([*range(matrices.batch), *_axes(shape, matrices, side)])
    lengths = [shape[axis] if axis in counted else 1 for axis in range(len(shape))]
    return torch.arange(math.prod(lengths), dtype=torch.int64, device=device).reshape(lengths).expand(shape)


def _axes(shape: tuple[int, ...], matrices: Matrices, side: MatrixSide) -> tuple[int, ...]:
    axes = matrices.matrix_axes(shape)
    return axes[1:] if side == "inputs" else axes[:1]


def side_of_blocks(index: Tensor, side: MatrixSide) -> Tensor:
    """Return for each block the indices of its c inputs or outputs (`side`), `[N, c]`.

    Raises ValueError if the rows of a block have different inputs, or if its columns have different outputs.

    index: for each entry of the blocks the index of its input or output, `[N, *block]`.
    """
    flat = index.flatten(2) if index.ndim > 2 else index.unsqueeze(-1)
    flat = flat if side == "inputs" else flat.mT
    if has_values(flat) and bool((flat != flat[:, :1]).any()):
        raise ValueError(
            f"the first axis of blocks must have outputs only, got blocks of shape {tuple(index.shape[1:])} in which "
            "it also has inputs; set `blocking: {merge: ..., min_axes: 2}`"
        )
    return flat[:, 0].long()


def side_blocks(stack: Stack, matrices: Sequence[SideMatrix | None]) -> Tensor:
    """Return for each block of a stack the part of its parameter's matrix that belongs to the c inputs (or outputs) of
    the block, `[N, c, c]`.

    matrices: the matrix of each parameter, by position; None: blocks of the parameter receive zeros.
    """
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
