"""Products along the axes of stacked blocks, symmetric products, and copies with reordered columns.

Legend:
    N: number of blocks.
    d: length of one axis of a block.
    p, q: products of the lengths of the axes before and after this axis.
    T: `[N, d, d]`, symmetric matrices.
    Y, Z: `[N, d, rest]` with Y Z^T = Z Y^T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from eigengraft.blocking.blocks import matrix_shape
from eigengraft.numerics import cached_tensors, may_branch_on_values, multiplied_in_float32, products

ProductDtype = Literal["input", "bfloat16"]
"""dtype of products. "input" is the dtype of the operands. With "bfloat16", operands and results are rounded to
bfloat16, and sums are computed in float32.
"""


def as_matrices(x: Tensor) -> Tensor:
    """Return the blocks `[N, *block]` as matrices `[N, m, n]`, where (m, n) is the result of `matrix_shape`."""
    return x.reshape(len(x), *matrix_shape(x.shape[1:]))


def unfold(x: Tensor, axis: int) -> Tensor:
    """Return the blocks x `[N, *block]` as matrices `[N, d, rest]`, with `axis` first.

    d is the length of `axis`, and rest is the product of all other lengths. The result is a view if the layout allows
    it.
    """
    if x.ndim == 3:
        return x.mT if axis else x
    return x.movedim(axis + 1, 1).reshape(x.shape[0], x.shape[axis + 1], -1)


def fold(y: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """Return the blocks `[N, *block]` whose unfolding along `axis` is y `[N, d, rest]`. This is the inverse of
    `unfold`.

    shape: shape `[N, *block]` of the result.
    """
    p, d, q = math.prod(shape[1 : axis + 1]), shape[axis + 1], math.prod(shape[axis + 2 :])
    return y.reshape(len(y), d, p, q).transpose(1, 2).reshape(shape)


def mode_product(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """Return the product of blocks with a matrix along one axis.

    The result is sum_j matrix[i, j] x[p, j, q] for x seen as `[N, p, d, q]`, where d is the length of the axis, and p
    and q are the products of the lengths before and after it.

    x: blocks `[N, *block]`.
    matrix: `[N, d', d]`, or the diagonal `[N, d]` of a diagonal matrix.
    axis: axis of the block.
    """
    if multiplied_in_float32(x):
        return mode_product(x.float(), matrix.float(), axis).to(x.dtype)
    if x.ndim == matrix.ndim == 3:
        return products(x, matrix.mT) if axis else products(matrix, x)
    shape = x.shape
    if matrix.ndim == 2:
        return x * matrix.reshape(-1, *(d if place == axis else 1 for place, d in enumerate(shape[1:])))
    p, d, q = math.prod(shape[1 : axis + 1]), shape[axis + 1], math.prod(shape[axis + 2 :])
    if p == 1:
        y = products(matrix, x.reshape(-1, d, q))
    elif q == 1:
        y = products(x.reshape(-1, p, d), matrix.mT)
    elif q < _FEW or d > _LONG * q:
        first = x.reshape(-1, p, d, q).transpose(1, 2).reshape(-1, d, p * q)
        y = torch.bmm(matrix, first).reshape(-1, matrix.shape[1], p, q).transpose(1, 2).contiguous()
    else:
        y = torch.matmul(matrix.unsqueeze(1), x.reshape(-1, p, d, q))
    return y.reshape(*shape[: axis + 1], matrix.shape[1], *shape[axis + 2 :])


_FEW = 16
"""Number of columns below which products are slow, because the columns do not fill a vector register."""
_LONG = 4
"""A middle axis counts as long if its length exceeds this number times the product of the lengths after it. For a long
axis, x is copied in another order of axes, so that one product multiplies all columns. This is faster than one product
with few columns for each index of the axes before it.
"""

_SHORT = 64
"""Limit for joining axes: adjacent axes are rotated by one Kronecker product if the product of their lengths is
smaller. On a CPU, joining two axes of length 7 saves time, and joining two axes of length 8 does not.
"""


def rotate(x: Tensor, matrices: Mapping[int, Tensor], precision: ProductDtype = "input") -> Tensor:
    """Return x `[N, *block]` multiplied along each axis in `matrices` by the matrix `[N, d', d]` of that axis.

    Entries of the matrices must be at most about 1, as in rotations. In blocks of three axes or more, adjacent short
    axes are rotated by the Kronecker product of their matrices. For roots use `mode_products`, because the Kronecker
    product of roots may overflow although the product of each root with x does not.

    matrices: matrix of each rotated axis, by the number of the axis in a block, from 0.
    precision: dtype of the products. The result has the dtype of x.
    """
    if precision == "bfloat16":
        return rotate(x.bfloat16(), _in_bfloat16(matrices)).to(x.dtype)
    return mode_products(x, matrices) if x.ndim <= 3 else _rotate_joined(x, matrices)


def mode_products(x: Tensor, matrices: Mapping[int, Tensor], precision: ProductDtype = "input") -> Tensor:
    """Return x `[N, *block]` multiplied along each axis in `matrices`, one axis after another.

    matrices: for each axis a matrix `[N, d', d]`, or the diagonal `[N, d]` of a diagonal matrix.
    precision: dtype of the products. The result has the dtype of x.
    """
    if precision == "bfloat16":
        return mode_products(x.bfloat16(), _in_bfloat16(matrices)).to(x.dtype)
    short = _short_last(x, matrices)
    if short is not None:
        return _cycled(x, matrices, short)
    for axis, matrix in matrices.items():
        x = mode_product(x, matrix, axis)
    return x


def _short_last(x: Tensor, matrices: Mapping[int, Tensor]) -> int | None:
    """Return the number of short axes at the end of a block, which is the argument `short` of `_cycled`.

    The last k axes are short if the product of their lengths is below `_FEW`. The result is the largest such k. Return
    None if the caller should multiply x by one `mode_product` for each axis, which is then faster than `_cycled`.

    matrices: the matrices by which x is multiplied, by axis.
    """
    block = x.shape[1:]
    if len(block) < 3 or len(matrices) < len(block) or any(matrix.ndim == 2 for matrix in matrices.values()):
        return None
    after = [math.prod(block[axis:]) for axis in range(len(block))]
    short = sum(entries < _FEW for entries in after)
    copied = any(d > _LONG * entries for d, entries in zip(block[1:], after[2:], strict=False))
    return short if short < len(block) - 1 and (short or copied) and not multiplied_in_float32(x) else None


def _cycled(x: Tensor, matrices: Mapping[int, Tensor], short: int) -> Tensor:
    """Return x multiplied by the matrix of every axis, without a copy of x for each axis.

    Let X be x as a matrix whose rows belong to the first axis, and M the matrix of this axis. The product X^T M^T is x
    multiplied by M, with the first axis moved to the end. The next axis is then the first one, and is multiplied in the
    same way. After one such product for each axis, all axes are in their old order again.

    matrices: a matrix `[N, d', d]` for every axis, by axis.
    short: number of axes at the end of the block that are too short for such a product. After the products of all
        other axes, these axes are the first ones. They are then multiplied by `mode_product`, and one copy of x moves
        them back to the end. 0: no axis is too short.
    """
    order = sorted(matrices)
    for axis in order[: len(order) - short]:
        x = torch.bmm(x.reshape(len(x), matrices[axis].shape[2], -1).mT, matrices[axis].mT)
    rows = [matrices[axis].shape[1] for axis in order]
    if short:
        last = rows[-short:]
        x = x.reshape(len(x), *(matrices[axis].shape[2] for axis in order[-short:]), -1)
        for place, axis in enumerate(order[-short:]):
            x = mode_product(x, matrices[axis], place)
        x = x.reshape(len(x), math.prod(last), -1).mT.contiguous()
    return x.reshape(len(x), *rows)


def _in_bfloat16(matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {axis: matrix.bfloat16() for axis, matrix in matrices.items()}


def _rotate_joined(x: Tensor, matrices: Mapping[int, Tensor]) -> Tensor:
    """Return x rotated along all axes in `matrices`. Adjacent short axes are rotated by one Kronecker product."""
    runs = short_runs(tuple(x.shape[1:]), frozenset(axis for axis, matrix in matrices.items() if matrix.ndim == 3))
    y = x.reshape(x.shape[0], *(math.prod(x.shape[run[0] + 1 : run[-1] + 2]) for run in runs))
    joined = {at: kronecker([matrices[axis] for axis in run]) for at, run in enumerate(runs) if run[0] in matrices}
    y = mode_products(y, joined)
    rotated = {axis: matrix.shape[1] for axis, matrix in matrices.items()}
    return y.reshape(x.shape[0], *(rotated.get(axis, d) for axis, d in enumerate(x.shape[1:])))


@lru_cache(maxsize=256)
def short_runs(block: tuple[int, ...], axes: frozenset[int]) -> list[list[int]]:
    """Return the axes of a block in runs: lists of adjacent axes that `rotate` rotates together, by one matrix.

    Adjacent axes that are in `axes` form one run if the product of their lengths is below `_SHORT`. Any other axis is a
    run by itself. All axes are in their order.

    axes: the axes that are rotated by a full matrix.
    """
    runs: list[list[int]] = []
    for axis in reversed(range(len(block))):
        run = runs[-1] if runs else []
        joins = run and {axis, run[0]} <= axes and math.prod(block[axis : run[-1] + 1]) < _SHORT
        if joins:
            run.insert(0, axis)
        else:
            runs.append([axis])
    return runs[::-1]


def kronecker(factors: Sequence[Tensor]) -> Tensor:
    """Return the Kronecker product of stacks of matrices, the `factors` `[N, d', d]`.

    If there is only one factor, the result is this factor, which may be a diagonal `[N, d]`.
    """
    product, *others = factors
    for factor in others:
        outer = product[:, :, None, :, None] * factor[:, None, :, None, :]
        product = outer.reshape(len(outer), product.shape[1] * factor.shape[1], -1)
    return product


def symmetric_product(y: Tensor, z: Tensor) -> Tensor:
    """Return the product Y Z^T `[N, d, d]` of stacks y and z `[N, d, rest]`. The product must be symmetric."""
    if multiplied_in_float32(y):
        return symmetric_product(y.float(), z.float()).to(y.dtype)
    if not _halved(y):
        return torch.bmm(y, z.mT)
    return add_symmetric(y.new_empty(*y.shape[:2], y.shape[1]), y, z, beta=0)


def add_symmetric(total: Tensor, y: Tensor, z: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute T <- beta T + alpha Y Z^T in place, for a symmetric T, and return T. If beta is 0, T is not read.

    On a CPU only the lower triangle of a large T is computed, and then copied to the upper triangle. Every matrix is
    multiplied separately, so that its result does not depend on the other matrices of the stack.
    """
    if multiplied_in_float32(total):
        return total.copy_(add_symmetric(total.float(), y.float(), z.float(), beta, alpha))
    # bmm is used for outer products, because baddbmm rounds their last bit in a stack of one matrix differently than in
    # a stack of several matrices
    if y.shape[2] == 1:
        outer = torch.bmm(y, z.mT)
        return torch.mul(outer, alpha, out=total) if beta == 0 else total.mul_(beta).add_(outer, alpha=alpha)
    if not _halved(y):
        return total.baddbmm_(y, z.mT, beta=beta, alpha=alpha)
    for target, left, right in zip(total.unbind(0), y.unbind(0), z.unbind(0), strict=True):
        for start in range(0, target.shape[0], _PANEL):
            panel = slice(start, start + _PANEL)
            target[start:, panel].addmm_(left[start:], right[panel].mT, beta=beta, alpha=alpha)
            if start:
                target[:start, panel] = _padded(target[panel, :start]).mT
    return total


def _padded(rows: Tensor) -> Tensor:
    """Return a copy of a matrix `[c, k]` with padding between its rows.

    A CPU reads the columns of the copy faster. Without padding, all entries of a column may compete for one set of the
    cache.
    """
    copied = rows.new_empty(rows.shape[0], rows.shape[1] + 16)[:, : rows.shape[1]]
    return copied.copy_(rows)


def _halved(y: Tensor) -> bool:
    """Return True if it is faster to compute only the lower triangle of Y Z^T than the whole product.

    y: `[N, d, rest]`; z has the same shape.
    """
    return y.shape[1] >= (6 if y.dtype.itemsize < 4 else 2) * _PANEL and may_branch_on_values(y)


_PANEL = 128
"""Number of columns that `add_symmetric` computes at a time. 64 and 256 columns were slower for some matrices of order
256 to 1024, and not much faster for any.
"""


def reordered(x: Tensor, axis: int, order: Tensor) -> Tensor:
    """Return x `[N, *block]` with the entries along a block axis reordered.

    On a CPU whole rows or blocks are copied where possible, because `gather` is slower.

    order: `[N, d']`, the old index of each new entry. d' is at most the length d of the axis.
    """
    if x.device.type == "cpu" and axis == 0 and x.is_contiguous():
        rows = order + _first_rows(len(x), x.shape[1])
        return x.flatten(0, 1).index_select(0, rows.flatten()).view(*order.shape, *x.shape[2:])
    if x.device.type == "cpu" and x.shape[1:].numel() >= _ONE_BY_ONE:
        out = x.new_empty(*x.shape[: axis + 1], order.shape[1], *x.shape[axis + 2 :])
        for target, source, places in zip(out.unbind(0), x.unbind(0), order.unbind(0), strict=True):
            torch.index_select(source, axis, places, out=target)
        return out
    index = order.reshape(-1, *(order.shape[1] if place == axis else 1 for place in range(x.ndim - 1)))
    return x.gather(axis + 1, index.expand(*x.shape[: axis + 1], -1, *x.shape[axis + 2 :]))


@cached_tensors(maxsize=64)
def _first_rows(blocks: int, rows: int) -> Tensor:
    """Return the index `[N, 1]` of the first row of each block, in a tensor in which the rows of all blocks follow one
    another.

    The result is cached: do not write to it.

    blocks: number of blocks, N.
    rows: number of rows of each block.
    """
    return torch.arange(0, blocks * rows, rows, dtype=torch.int64, device="cpu")[:, None]


_ONE_BY_ONE = 1 << 12
"""Smallest block, in entries, for which `reordered` copies blocks one by one on a CPU. For smaller blocks the separate
calls cost more time than they save.
"""
