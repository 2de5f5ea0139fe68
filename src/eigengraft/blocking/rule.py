"""Blocks: a parameter's shape after merging small axes and splitting long ones (Shi et al. 2023, section 3.3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from eigengraft.component import Component

from .block_grid import BlockGrid, Piece
from .divided import divided_grids, equal_runs
from .views import Matrices

ONE_TENSOR = Matrices()
"""A parameter as it is."""


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

    def __hash__(self) -> int:
        return hash((self.size, self.merge, self.merge_from, self.keep_axes))

    def grids(self, shape: tuple[int, ...], matrices: Matrices = ONE_TENSOR) -> tuple[BlockGrid, ...]:
        """Grids of equal blocks that cover a parameter of that shape, each of its matrices cut alone.

        Empty parameters have none.
        """
        return _grids(self, tuple(shape), matrices)


@lru_cache(maxsize=128)  # an optimizer asks several times, and parameters of a model have few shapes
def _grids(rule: Blocking, shape: tuple[int, ...], matrices: Matrices) -> tuple[BlockGrid, ...]:
    if 0 in shape:
        return ()
    matrices.require_fit(shape)
    divided = matrices.divides or matrices.outputs == "last"
    return tuple(divided_grids(shape, matrices, rule.merged, rule.size) if divided else _even(rule, shape, matrices))


def _even(rule: Blocking, shape: tuple[int, ...], matrices: Matrices) -> Iterator[BlockGrid]:
    """The grids of matrices that are whole axes of a parameter."""
    batch, inner = shape[: matrices.batch], rule.merged(shape[matrices.batch :])
    merged, size = (*batch, *inner), [*(1 for _ in batch), *(min(d, rule.size or d) for d in inner)]
    grid = tuple(math.ceil(d / s) for d, s in zip(merged, size, strict=True))
    joined = tuple((axis,) for axis in range(len(batch), len(merged)))
    for box in itertools.product(*(equal_runs(d, s) for d, s in zip(merged, size, strict=True))):
        first, count, start, tile = zip(*box, strict=True)
        corner = np.ix_(*(np.arange(f, f + c) for f, c in zip(first, count, strict=True)))
        keys = np.ravel_multi_index(np.broadcast_arrays(*corner), grid).ravel()
        piece = Piece(start, tile, (0,) * len(inner))
        blocks = math.prod(grid[len(batch) :])  # of each matrix
        own = tuple(int(k) // blocks for k in keys)
        yield BlockGrid(merged, count, tile, (piece,), joined, tuple(int(k) for k in keys), own)
