"""Algebra along the axes of stacked blocks.

Legend: N blocks; a axis of the block, of length d; p product of the axes before a; q product of the axes after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor


def unfold(x: Tensor, axis: int) -> Tensor:
    """The blocks as matrices `[N, d, p q]` with `axis` first; a view where the layout allows it."""
    # written without einops, which takes three times as long, because statistics unfold every gradient
    return x.movedim(axis + 1, 1).reshape(x.shape[0], x.shape[axis + 1], -1)


def fold(y: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """The blocks `[N, *block]` of that shape whose unfolding along `axis` is y `[N, d, p q]`."""
    folded: Tensor = rearrange(y, "n d (p q) -> n p d q", p=math.prod(shape[1 : axis + 1]))
    return folded.reshape(shape)


def mode_product(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """x times_axis matrix: `[N, p, d, q]` with `matrix` `[N, d', d]` contracted over d, without moving any axis.

    A diagonal matrix may be given by its diagonal `[N, d]`.
    """
    shape = x.shape
    if matrix.ndim == 2:
        return x * matrix.reshape(-1, *(d if place == axis else 1 for place, d in enumerate(shape[1:])))
    p, d, q = math.prod(shape[1 : axis + 1]), shape[axis + 1], math.prod(shape[axis + 2 :])
    if p == 1:
        y = torch.bmm(matrix, x.reshape(-1, d, q))
    elif q == 1:
        y = torch.bmm(x.reshape(-1, p, d), matrix.mT)
    else:
        y = torch.matmul(matrix.unsqueeze(1), x.reshape(-1, p, d, q))
    return y.reshape(*shape[: axis + 1], matrix.shape[1], *shape[axis + 2 :])


def rotate(x: Tensor, matrices: Mapping[int, Tensor]) -> Tensor:
    """x `[N, *block]` times the matrix `[N, d', d]`, or the diagonal `[N, d]`, of every axis given."""
    for axis, matrix in matrices.items():
        x = mode_product(x, matrix, axis)
    return x
