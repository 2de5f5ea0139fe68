"""Blocks: a parameter's shape after merging small axes and splitting long ones (Shi et al. 2023, section 3.3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.component import Component


class Blocking(Component):
    """Rule by which a parameter becomes blocks. Default: one block, the parameter as it is."""

    size: int | None = Field(
        default=None, ge=1, description="longest axis of a block; longer ones are split; default: no splitting"
    )
    merge: int | None = Field(
        default=None,
        ge=1,
        description="merge adjacent axes while their product is at most this; default: none",
    )
    merge_from: Literal["last", "first"] = Field(default="last", description="the axis that merging begins at")
    keep_axes: int = Field(default=1, ge=1, description="stop merging when so many axes are left")

    @model_validator(mode="after")
    def _merges(self) -> Self:
        for name in ("merge_from", "keep_axes"):
            value = getattr(self, name)
            if self.merge is None and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}: `merge` is required, without which no axes are merged, got {value!r}")
        return self

    def merged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape after merging; axes of length 1 vanish when merging is on, and a scalar is a vector of length 1."""
        if self.merge is None or 0 in shape:
            return shape or (1,)
        axes = [d for d in shape if d != 1] or [1]
        axes = axes if self.merge_from == "last" else axes[::-1]
        out = [axes[-1]]
        for done, d in enumerate(reversed(axes[:-1]), start=1):
            left = len(out) + len(axes) - done
            if left > self.keep_axes and out[-1] * d <= self.merge:
                out[-1] *= d
            else:
                out.append(d)
        return tuple(out[::-1] if self.merge_from == "last" else out)

    def grids(self, shape: tuple[int, ...]) -> Iterator[BlockGrid]:
        """Grids of equal blocks that cover a parameter of that shape. Empty parameters have none."""
        merged = self.merged(shape)
        if 0 in merged:
            return
        size = [min(d, self.size or d) for d in merged]
        grid = tuple(math.ceil(d / s) for d, s in zip(merged, size, strict=True))
        runs = [_runs(d, s) for d, s in zip(merged, size, strict=True)]
        for box in itertools.product(*runs):
            first, count, start, tile = zip(*box, strict=True)
            corner = np.ix_(*(np.arange(f, f + c) for f, c in zip(first, count, strict=True)))
            keys = np.ravel_multi_index(np.broadcast_arrays(*corner), grid).ravel()
            yield BlockGrid(merged, start, count, tile, tuple(int(k) for k in keys))


def _runs(d: int, size: int) -> list[tuple[int, int, int, int]]:
    """Runs of equal tiles along one axis, as (first grid index, number of tiles, start, tile length)."""
    full = d // size
    runs = [(0, full, 0, size)] if full else []
    return [*runs, (full, 1, full * size, d - full * size)] if d % size else runs


@dataclass(frozen=True)
class BlockGrid:
    """An even grid of equal blocks in a box of one parameter.

    merged: shape of the parameter after merging; the box lies in it.
    start: first index of the box along each axis.
    count: number of blocks along each axis.
    tile: shape of a block.
    keys: row-major number of each block among all blocks of the parameter.
    """

    merged: tuple[int, ...]
    start: tuple[int, ...]
    count: tuple[int, ...]
    tile: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def single(cls, shape: tuple[int, ...]) -> BlockGrid:
        """The grid of one block that is a parameter of that shape."""
        return cls(shape, (0,) * len(shape), (1,) * len(shape), shape, (0,))

    @property
    def is_parameter(self) -> bool:
        """Whether the grid is the parameter itself, as one block."""
        return self.tile == self.merged

    def block(self, index: int) -> BlockGrid:
        """One block, as a grid of its own."""
        at = np.unravel_index(index, self.count)
        start = tuple(s + int(i) * t for s, i, t in zip(self.start, at, self.tile, strict=True))
        return BlockGrid(self.merged, start, (1,) * len(self.tile), self.tile, (self.keys[index],))

    def cut(self, x: Tensor) -> Tensor:
        """The box of x as a view `[*count, *tile]`; x has the merged shape."""
        for axis, (start, count, tile) in enumerate(zip(self.start, self.count, self.tile, strict=True)):
            if count * tile != x.shape[axis]:
                x = x.narrow(axis, start, count * tile)
        for axis in reversed(range(len(self.tile))):
            x = torch.unflatten(x, axis, (self.count[axis], self.tile[axis]))
        order = len(self.tile)
        return x.permute(*range(0, 2 * order, 2), *range(1, 2 * order, 2))
