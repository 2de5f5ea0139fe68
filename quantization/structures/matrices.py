"""Triangles and unit sizes of stacks of matrices. Legend: N matrices of a stack; d rows."""

from __future__ import annotations

import torch
from torch import Tensor

from eigengraft.numerics import cached_tensors, per_block


def unit_size(a: Tensor) -> tuple[Tensor, Tensor]:
    """(A / s, s) with s `[N]` the largest entry; of a zero matrix s is 0 and A / s is 0."""
    size = a.abs().amax((-2, -1))
    return a / per_block(torch.where(size > 0, size, 1.0), a), size


def folded_shape(d: int) -> tuple[int, int]:
    """The rectangle that the strictly lower triangle of a d x d matrix fills, see `lower_places`."""
    return d // 2, d - 1 + d % 2


@cached_tensors(maxsize=64)
def lower_places(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(places of the strictly lower triangle in the flat d x d matrix, places of the d x d entries in the triangle),
    int32, in the order of the rectangle it is folded to; entries that are not in it have any place.

    Row k of the rectangle is the k-th longest row of the triangle, then the k-th shortest: a format that works along
    rows sees complete rows, of which one block at most is shared by two. Rows of factors differ in size.
    """
    height, width = folded_shape(d)
    k, c = (torch.arange(length, dtype=torch.int64, device=device) for length in (height, width))
    k = k[:, None]
    row = torch.where(c < d - 1 - k, d - 1 - k, k + d % 2)
    column = torch.where(c < d - 1 - k, c, c - (d - 1 - k))
    return _places(row.flatten(), column.flatten(), d)


@cached_tensors(maxsize=64)
def upper_places(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(places of the upper triangle in the flat d x d matrix, places of the d x d entries in the triangle), int32.

    The triangle is taken row by row; entries below it have the places of their mirror images.
    """
    row, column = torch.triu_indices(d, d, dtype=torch.int64, device=device)
    return _places(row, column, d)


def _places(row: Tensor, column: Tensor, d: int) -> tuple[Tensor, Tensor]:
    entry = torch.zeros(d, d, dtype=torch.int32, device=row.device)
    entry[row, column] = entry[column, row] = torch.arange(len(row), dtype=torch.int32, device=row.device)
    return (row * d + column).int(), entry.flatten()


def at_places(x: Tensor, places: Tensor) -> Tensor:
    """`[N, k]` -> `[N, p]`; a single row is taken as a vector, which costs two thirds."""
    return x.reshape(-1).index_select(0, places)[None] if len(x) == 1 else x.index_select(1, places)


def strictly_lower(x: Tensor) -> Tensor:
    """`[N, d, d]` -> the folded triangle `[N, d // 2, d - 1 + d % 2]`."""
    d = x.shape[-1]
    return at_places(x.flatten(1), lower_places(d, x.device)[0]).reshape(-1, *folded_shape(d))


def lower_triangular(diagonal: Tensor, below: Tensor) -> Tensor:
    """The lower triangular matrices `[N, d, d]` of a diagonal `[N, d]` and a folded triangle."""
    n, d = diagonal.shape
    full = at_places(below.flatten(1), lower_places(d, below.device)[1]).reshape(n, d, d).tril_(-1)
    full.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return full
