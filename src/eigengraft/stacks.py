"""Stacks: blocks of equal shape as one tensor, and the way of gradients in and updates out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .blocking import BlockGrid

BYTES_ON_CPU, BYTES_ELSEWHERE = 1 << 22, 1 << 28
"""Of the largest tensor of a stack: what a step needs beside the state, decoded slots and products, is a few of those.
On a CPU memory of more than some megabytes comes fresh from the system each time, page by page; a device wants fewer
and larger kernels.
"""


def most_blocks(numbers: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many blocks a stack holds at most; numbers: those of the largest tensor of a block, itself or a slot."""
    return fitting(BYTES_ON_CPU if device.type == "cpu" else BYTES_ELSEWHERE, numbers, dtype)


def fitting(size: int, numbers: int, dtype: torch.dtype) -> int:
    """How many blocks of so many numbers `size` bytes hold, but at least one."""
    return max(1, size // max(numbers * dtype.itemsize, 1))


def cut(param_ids: Sequence[int], most: int, whole: bool) -> list[tuple[int, int]]:
    """Blocks, by the positions of their parameters, as ranges (start, stop) of nearly equal length, at most `most`.

    whole: all blocks of a parameter stay together, in longer ranges if need be.
    """
    blocks = len(param_ids)
    parts = -(-blocks // most)
    edges = [k * blocks // parts for k in range(parts + 1)]
    if whole:
        edges = [at for at in edges if at in (0, blocks) or param_ids[at - 1] != param_ids[at]]
    return list(pairwise(edges))


@dataclass(frozen=True)
class Stack:
    """Blocks of one shape, dtype and device: grids of parameters (by position) in order, each a range of rows."""

    block: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grids: tuple[tuple[int, BlockGrid], ...]

    @cached_property
    def param_ids(self) -> NDArray[np.int64]:
        """`[N]`, the position of the parameter that each block belongs to."""
        return np.array([param_id for param_id, grid in self.grids for _ in grid.keys], dtype=np.int64)

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """`[N]`, the number of each block in its parameter."""
        return tuple(key for _, grid in self.grids for key in grid.keys)

    def select(self, active: NDArray[np.bool_]) -> tuple[Stack, Tensor | None]:
        """The stack of the active parameters' blocks and their rows in this one; itself and None if all are active."""
        keep = active[self.param_ids]
        if keep.all():
            return self, None
        grids = tuple((param_id, grid) for param_id, grid in self.grids if active[param_id])
        rows = torch.from_numpy(np.flatnonzero(keep)).to(self.device)
        return Stack(self.block, self.dtype, self.device, grids), rows

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The blocks of the parameters' tensors as `[N, *block]`.

        May be a view of the only tensor: do not write to it.
        """
        sources = [self._source(grid, tensors[param_id]) for param_id, grid in self.grids]
        if len(sources) == 1 and sources[0].shape == self.block and sources[0].dtype == self.dtype:
            return sources[0].unsqueeze(0)
        out = torch.empty((len(self.param_ids), *self.block), dtype=self.dtype, device=self.device)
        torch._foreach_copy_(self._targets(out), sources)
        return out

    def scatter(self, rows: Tensor, buffers: Mapping[int, Tensor]) -> None:
        """Writes `[N, *block]` into the buffers of the parameters, each of its merged shape."""
        targets = [grid.cut(buffers[param_id]) for param_id, grid in self.grids]
        sources = zip(self._split(rows), targets, strict=True)
        torch._foreach_copy_(targets, [part.reshape(target.shape) for part, target in sources])

    def _source(self, grid: BlockGrid, x: Tensor) -> Tensor:
        x = x if x.shape == grid.merged else x.reshape(grid.merged)
        return x if grid.whole else grid.cut(x)

    def _targets(self, out: Tensor) -> list[Tensor]:
        if all(grid.whole for _, grid in self.grids):
            return list(out.unbind(0))
        parts = zip(self._split(out), self.grids, strict=True)
        return [part.squeeze(0) if grid.whole else part.view(*grid.count, *grid.tile) for part, (_, grid) in parts]

    def _split(self, rows: Tensor) -> list[Tensor]:
        return list(torch.split(rows, [len(grid.keys) for _, grid in self.grids]))
