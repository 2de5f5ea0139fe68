"""Stacks: equal blocks as one tensor `[N, *block]`, copied from parameters and written back to them.

A stage may request a signal that is a matrix over the inputs or outputs of each parameter. `side_blocks` returns the
part of this matrix that belongs to each block.

Parameters are numbered by their position in the optimizer's list of parameters.

Legend: a parameter has B matrices along its batch axes, each with n inputs (or outputs); a block has c of these n
inputs (or outputs).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..numerics import JOINED, has_values, kept_on_device
from .blocks import BlockGrid
from .views import Matrices

_T = TypeVar("_T")
BYTES_ON_CPU, BYTES_ELSEWHERE = 2 << 20, 1 << 28
"""Largest size of a tensor of a stack, in bytes.

A step needs memory for a few such tensors. On a CPU they should fit into a cache: with 4 MiB a step takes 1.1 times as
long as with 2 MiB, because glibc returns large tensors to the system and requests them again. With 1 MiB it takes 1.04
times as long, because more stacks take more time in Python. A device runs faster with fewer and larger kernels.
"""
ALIGNMENT = 16
"""Alignment of a stack's first entry, in bytes.

At other addresses MKL adds in another order in small products (float32, sides of at most 11, AVX-512), so that results
would depend on the address.
"""


def max_blocks(numbers: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the largest number of blocks of a stack for which no tensor of the stack is too large; at least one.

    The limit for a tensor is `BYTES_ON_CPU` or `BYTES_ELSEWHERE`.

    numbers: entries of a block's largest tensor, which is the block itself or a slot.
    dtype: dtype of the tensor.
    device: device of the stack.
    """
    return blocks_that_fit(BYTES_ON_CPU if device.type == "cpu" else BYTES_ELSEWHERE, numbers, dtype)


def blocks_that_fit(size: int, numbers: int, dtype: torch.dtype) -> int:
    """Return the number of blocks with `numbers` entries each that fit into `size` bytes; at least one."""
    return max(1, size // max(numbers * dtype.itemsize, 1))


def split_ranges(param_ids: Sequence[int], most: int, together: bool) -> list[tuple[int, int]]:
    """Return ranges (start, stop) of nearly equal length that divide blocks among stacks, with at most `most` blocks
    each.

    param_ids: position of each block's parameter.
    together: True if all blocks of a parameter must be in one range, which may then be longer.
    """
    blocks = len(param_ids)
    ranges = -(-blocks // most)
    edges = [k * blocks // ranges for k in range(ranges + 1)]
    if together:
        edges = [at for at in edges if at in (0, blocks) or param_ids[at - 1] != param_ids[at]]
    return list(pairwise(edges))


def split_by_size(sizes: Iterable[tuple[_T, int]], limit: int) -> Iterator[list[_T]]:
    """Yield lists of neighboring items, each with at most `limit` bytes in sum. A larger item has a list of its own.

    sizes: pairs of an item, which may be any object, and its size in bytes.
    """
    part, size = list[_T](), 0
    for item, nbytes in sizes:
        if part and size + nbytes > limit:
            yield part
            part, size = [], 0
        part.append(item)
        size += nbytes
    if part:
        yield part


@dataclass(frozen=True)
class Stack:
    """N equal blocks of one or more parameters.

    block: shape of a block.
    dtype: dtype that the stack is computed in.
    device: device of the stack.
    grids: pairs (position of a parameter, grid of its blocks), in the order of the rows of the stack.
    """

    block: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grids: tuple[tuple[int, BlockGrid], ...]

    @cached_property
    def param_ids(self) -> NDArray[np.int64]:
        """For each block, the index of its parameter in the optimizer's list of parameters, `[N]`."""
        return np.array([param_id for param_id, grid in self.grids for _ in grid.keys], dtype=np.int64)

    @cached_property
    def positions(self) -> list[int]:
        """The numbers of `param_ids` as a list: for each block, the index of its parameter in the optimizer's list."""
        positions: list[int] = self.param_ids.tolist()
        return positions

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Number of each block among the blocks of its parameter."""
        return tuple(key for _, grid in self.grids for key in grid.keys)

    @cached_property
    def of_parameters(self) -> bool:
        """True if each block is a full parameter, reshaped."""
        return all(grid.is_parameter for _, grid in self.grids)

    @cached_property
    def joins(self) -> bool:
        """True if it is faster to copy the parameters into one tensor and run kernels on it than to run kernels on each
        parameter.
        """
        many = self.of_parameters and len(self.param_ids) > 1
        return many and self.device.type == "cpu" and math.prod(self.block) <= JOINED

    @cached_property
    def matrix_ids(self) -> NDArray[np.int64]:
        """Number of the matrix that each block belongs to, `[N]`. Matrices of different parameters have different
        numbers.
        """
        return np.array([(param_id << 32) + own for param_id, grid in self.grids for own in grid.matrices], np.int64)

    def select(self, active: NDArray[np.bool_]) -> Stack:
        """Return a stack of those blocks whose parameters are active.

        active: bool `[P]`, True for each active parameter, by position.
        """
        grids = tuple((param_id, grid) for param_id, grid in self.grids if active[param_id])
        return Stack(self.block, self.dtype, self.device, grids)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the blocks of tensors as `[N, *block]`.

        The result must not be written to, because it may be a view of a tensor if the stack has a single block. A
        tensor at an unaligned address is copied, so that products are rounded as for other tensors. Gradients can be
        such tensors with `DistributedDataParallel(..., gradient_as_bucket_view=True)`.

        tensors: by position, tensors in the shapes of the parameters.
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
        """Write blocks into tensors of the size of their parameters.

        rows: the blocks, `[N, *block]`.
        buffers: by position, the tensor that is written to, in the shape `BlockGrid.merged`.
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


class Assembly:
    """Collects the entries of each parameter's update, which arrive in parts, until the update is complete.

    If this rank holds a shard of the parameter, the update has only the entries of the shard.

    begun: by position of the parameter, updates that `completed` has not returned yet.
    """

    def __init__(self) -> None:
        self.begun: dict[int, Tensor] = {}
        self._missing: dict[int, int] = {}

    def target(
        self, position: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, numel: int
    ) -> Tensor:
        """Return the tensor that collects the update of a parameter. The first call for a parameter makes the tensor.

        The caller writes `numel` entries of the tensor, which then count as collected.

        position: position of the parameter.
        shape, dtype, device: those of the tensor.
        numel: number of entries that the caller writes.
        """
        if position not in self.begun:
            self.begun[position] = torch.empty(shape, dtype=dtype, device=device)
            self._missing[position] = math.prod(shape)
        self._missing[position] -= numel
        return self.begun[position]

    def completed(self, positions: Iterable[int]) -> dict[int, Tensor]:
        """Return the complete updates among those of the given parameters, by position, and remove them from `begun`.

        An update is complete once all of its entries have been collected.
        """
        return {at: self.begun.pop(at) for at in positions if not self._missing[at]}


def _is_aligned(x: Tensor) -> bool:
    """Return True if a tensor is aligned as new tensors are, so that its products have the same rounding."""
    return x.storage_offset() * x.element_size() % ALIGNMENT == 0


MatrixSide = Literal["inputs", "outputs"]
"""The side of a parameter that a matrix `[n, n]` belongs to: its inputs (columns) or its outputs (rows)."""


@dataclass(frozen=True)
class SideMatrix:
    """A square matrix over the inputs (columns), or over the outputs (rows), of one parameter.

    value: the matrix `[n, n]`, or one matrix for each index of the batch axes, `[*batch, n, n]`.
    index: for each entry of the parameter, the index of its input (or output), as a view in the shape of the
        parameter. Inputs are numbered through all batches: input i belongs to row i of `value.reshape(-1, n)`.
    side: inputs or outputs.
    """

    value: Tensor
    index: Tensor
    side: MatrixSide

    @classmethod
    def of(cls, value: Tensor, shape: tuple[int, ...], matrices: Matrices, side: MatrixSide) -> SideMatrix:
        """Return the matrix `value` over the inputs or outputs (`side`) of a parameter of shape `shape`.

        Raises ValueError if the shape of `value` does not fit the parameter.

        matrices: the matrices of the parameter, which say how many batch axes it has.
        """
        wanted = side_shape(shape, matrices, side)
        if tuple(value.shape) != wanted:
            raise ValueError(
                f"a tensor of shape {wanted} is required for a parameter of shape {shape}, got {tuple(value.shape)}"
            )
        return cls(value, side_index(shape, matrices, side, value.device), side)

    def blocks(self, own: Tensor) -> Tensor:
        """Return for each of k blocks the part of the matrix that belongs to the block's c inputs (or outputs),
        `[k, c, c]`.

        own: `[k, c]`, the indices of the inputs (or outputs) of each block, as in the field `index`.
        """
        n = self.value.shape[-1]
        return self.value.reshape(-1, n)[own[:, :, None], (own % n)[:, None, :]]


def side_shape(shape: tuple[int, ...], matrices: Matrices, side: MatrixSide) -> tuple[int, ...]:
    """Return the shape `[*batch, n, n]` of a matrix over the n inputs or outputs of a parameter of shape `shape`.

    matrices: the matrices of the parameter, which say how many batch axes it has.
    side: inputs or outputs.
    """
    n = math.prod(shape[axis] for axis in _axes(shape, matrices, side))
    return (*shape[: matrices.batch], n, n)


def side_index(shape: tuple[int, ...], matrices: Matrices, side: MatrixSide, device: torch.device) -> Tensor:
    """Return for each entry of a parameter the number of the input (or output, by `side`) that the entry belongs to.

    A parameter `[*batch, m, n]` has n inputs for each index of `batch`. The inputs of the first index have the numbers
    0, ..., n - 1, those of the second n, ..., 2n - 1. The result is a view in the shape of the parameter.

    shape: shape of the parameter.
    matrices: the matrices of the parameter, which say how many batch axes it has.
    """
    counted = sorted([*range(matrices.batch), *_axes(shape, matrices, side)])
    lengths = [shape[axis] if axis in counted else 1 for axis in range(len(shape))]
    return torch.arange(math.prod(lengths), dtype=torch.int64, device=device).reshape(lengths).expand(shape)


def _axes(shape: tuple[int, ...], matrices: Matrices, side: MatrixSide) -> tuple[int, ...]:
    axes = matrices.matrix_axes(shape)
    return axes[1:] if side == "inputs" else axes[:1]


def side_of_blocks(index: Tensor, side: MatrixSide) -> Tensor:
    """Return for each block the numbers of the c inputs (columns) or outputs (rows) that it covers, `[N, c]`.

    Raises ValueError if the rows of a block have different inputs, or if its columns have different outputs.

    index: for each entry of the blocks, the number of its input (or output), as in `SideMatrix.index`, `[N, *block]`.
    side: inputs or outputs.
    """
    flat = index.flatten(2) if index.ndim > 2 else index.unsqueeze(-1)
    flat = flat if side == "inputs" else flat.mT
    if has_values(flat) and bool((flat != flat[:, :1]).any()):
        raise ValueError(
            f"the first axis of blocks must have outputs only, got blocks of shape {tuple(index.shape[1:])} in which "
            "it also has inputs; set `blocking: {merge: N, min_axes: 2}`, with N at least the number of inputs"
        )
    return flat[:, 0].long()


def side_blocks(stack: Stack, matrices: Sequence[SideMatrix | None]) -> Tensor:
    """Return for each block the part of its parameter's matrix that belongs to the block's c inputs (or outputs).

    The result is `[N, c, c]`.

    matrices: for each parameter, by position, a matrix over its inputs or outputs, such as a covariance of the inputs.
        None: blocks of the parameter receive zeros.
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
