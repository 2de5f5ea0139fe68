"""Stacks: equal blocks as one tensor `[N, *block]`, gathered from parameters and scattered back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .block_grid import BlockGrid

BYTES_ON_CPU, BYTES_ELSEWHERE = 2 << 20, 1 << 28
"""Bytes of the largest tensor of a stack. A step needs memory for a few such tensors: decoded slots and products.

On a CPU several of them must fit into a cache. Fewer stacks take less Python: steps of mid-size models take 0.96 of
their time with 1 MiB. With 4 MiB they take 0.98 of that, but 1.1 times as long in a process that has freed nothing
larger, as training does, where glibc gives the pages back and asks for them anew (measured). A device runs faster with
fewer and larger kernels.
"""


ALIGNMENT = 16
"""Bytes that a stack's address is a multiple of. Elsewhere, products of small matrices add in another order: MKL with
AVX-512 does so for a side of at most 11 in float32."""


def max_blocks(numbers: int, dtype: torch.dtype, device: torch.device) -> int:
    """The largest number of blocks in a stack; numbers: entries of a block's largest tensor, itself or a slot."""
    return blocks_that_fit(BYTES_ON_CPU if device.type == "cpu" else BYTES_ELSEWHERE, numbers, dtype)


def blocks_that_fit(size: int, numbers: int, dtype: torch.dtype) -> int:
    """The number of blocks with `numbers` entries that fit into `size` bytes; at least one."""
    return max(1, size // max(numbers * dtype.itemsize, 1))


def split_ranges(param_ids: Sequence[int], most: int, together: bool) -> list[tuple[int, int]]:
    """Ranges (start, stop) of nearly equal length, at most `most`, that blocks are split into.

    param_ids: position of the parameter that each block belongs to.
    together: whether all blocks of a parameter stay in one range, which may then be longer.
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
    grids: blocks of one parameter each, with the position of the parameter; rows are in this order.
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
    def _positions(self) -> list[int]:
        positions: list[int] = self.param_ids.tolist()
        return positions

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """`[N]`, key of each block: its number in its parameter."""
        return tuple(key for _, grid in self.grids for key in grid.keys)

    @cached_property
    def of_parameters(self) -> bool:
        """Whether each block is a parameter as it is."""
        return all(grid.is_parameter for _, grid in self.grids)

    @cached_property
    def matrix_ids(self) -> NDArray[np.int64]:
        """`[N]`, a number for the matrix that each block belongs to: a parameter, or what its view makes of it."""
        return np.array([(param_id << 32) + own for param_id, grid in self.grids for own in grid.matrices], np.int64)

    def select(self, active: NDArray[np.bool_]) -> Stack:
        """Return the stack of the blocks of active parameters; active: `[P]`, by position of the parameter."""
        grids = tuple((param_id, grid) for param_id, grid in self.grids if active[param_id])
        return Stack(self.block, self.dtype, self.device, grids)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The blocks of tensors, given by position, as `[N, *block]`.

        The result may be a view of the only tensor: do not write to it. An unaligned tensor is copied, as the views of
        buckets are that `DistributedDataParallel(..., gradient_as_bucket_view=True)` leaves in `grad`.
        """
        if self.of_parameters:
            held = (tensors[param_id] for param_id in self._positions)
            sources = [x if x.shape == self.block else x.reshape(self.block) for x in held]
            if all(x.dtype is self.dtype for x in sources):
                alone = len(sources) == 1 and sources[0].is_contiguous() and _is_aligned(sources[0])
                return sources[0].unsqueeze(0) if alone else torch.stack(sources)
        else:
            sources = [view for param_id, grid in self.grids for view in self._sources(grid, tensors[param_id])]
        out = torch.empty((len(self.param_ids), *self.block), dtype=self.dtype, device=self.device)
        torch._foreach_copy_(self._targets(out), sources)
        return out

    def scatter(self, rows: Tensor, buffers: Mapping[int, Tensor]) -> None:
        """Writes blocks `[N, *block]` into buffers of merged shape, given by position."""
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
    """Whether a tensor starts where matrix products of it round as those of a fresh tensor."""
    return x.storage_offset() * x.element_size() % ALIGNMENT == 0
