"""Products along the axes of stacked blocks.

Legend: N blocks; a axis of the block, of length d; p product of the axes before a; q product of the axes after.

Products of which symmetry is known: on a CPU half of their entries are computed, the others mirrored.

Legend: N blocks; T `[N, d, d]`; Y, Z `[N, d, rest]` with Y Z^T = Z Y^T.

Blocks with the entries of an axis in another order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from eigengraft.numerics import may_branch_on_values, multiplied_in_float32, products

ProductDtype = Literal["input", "bfloat16"]
"""dtype of products: that of what is multiplied, or bfloat16 with sums in float32, of which each result is rounded."""


def matrix_shape(block: Sequence[int]) -> tuple[int, int]:
    """Return (m, n) of a block as a matrix: first axis x the product of all others. A vector is one column."""
    return (block[0] if block else 1), math.prod(block[1:])


def as_matrices(x: Tensor) -> Tensor:
    """Return the blocks `[N, *block]` as matrices `[N, m, n]`, as `matrix_shape` says."""
    return x.reshape(len(x), *matrix_shape(x.shape[1:]))


def unfold(x: Tensor, axis: int) -> Tensor:
    """The blocks as matrices `[N, d, p q]` with `axis` first; a view where the layout allows it."""
    if x.ndim == 3:
        return x.mT if axis else x
    return x.movedim(axis + 1, 1).reshape(x.shape[0], x.shape[axis + 1], -1)


def fold(y: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """The blocks `[N, *block]` of that shape whose unfolding along `axis` is y `[N, d, p q]`."""
    p, d, q = math.prod(shape[1 : axis + 1]), shape[axis + 1], math.prod(shape[axis + 2 :])
    return y.reshape(len(y), d, p, q).transpose(1, 2).reshape(shape)


def mode_product(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """x times_axis matrix: `[N, p, d, q]` with `matrix` `[N, d', d]` contracted over d.

    A diagonal matrix may be given by its diagonal `[N, d]`. An axis in the middle is brought to the front for one large
    product where p products would have few columns each.
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


_FEW, _LONG = 16, 4
"""Columns that fill no vector register, and how much longer than them an axis is of which p copies cost too much."""


_SHORT = 64
"""Products along two axes take two passes over a block, which last as long as the arithmetic of one with so many
columns (measured on a CPU: 3 x 3 and 7 x 7 gain, 8 x 8 does not)."""


def rotate(x: Tensor, matrices: Mapping[int, Tensor], precision: ProductDtype = "input") -> Tensor:
    """x `[N, *block]` times the matrix `[N, d', d]` of every axis given, whose entries are at most about 1.

    Of blocks of three axes and more, adjacent short axes are rotated by the Kronecker product of their matrices. Use
    `mode_products` for roots, whose product may not be finite where that of each with x is.
    """
    if precision == "bfloat16":
        return rotate(x.bfloat16(), _in_bfloat16(matrices)).to(x.dtype)
    return mode_products(x, matrices) if x.ndim <= 3 else _rotate_joined(x, matrices)


def mode_products(x: Tensor, matrices: Mapping[int, Tensor], precision: ProductDtype = "input") -> Tensor:
    """x `[N, *block]` times the matrix `[N, d', d]`, or the diagonal `[N, d]`, of every axis given, one by one."""
    if precision == "bfloat16":
        return mode_products(x.bfloat16(), _in_bfloat16(matrices)).to(x.dtype)
    short = _short_last(x, matrices)
    if short is not None:
        return _cycled(x, matrices, short)
    for axis, matrix in matrices.items():
        x = mode_product(x, matrix, axis)
    return x


def _short_last(x: Tensor, matrices: Mapping[int, Tensor]) -> int | None:
    """How many last axes have few entries together, if `_cycled` is for these products; None: it is not."""
    block = x.shape[1:]
    if len(block) < 3 or len(matrices) < len(block) or any(matrix.ndim == 2 for matrix in matrices.values()):
        return None
    after = [math.prod(block[axis:]) for axis in range(len(block))]
    short = sum(entries < _FEW for entries in after)
    copied = any(d > _LONG * entries for d, entries in zip(block[1:], after[2:], strict=False))
    return short if short < len(block) - 1 and (short or copied) and not multiplied_in_float32(x) else None


def _cycled(x: Tensor, matrices: Mapping[int, Tensor], short: int) -> Tensor:
    """The products along all axes, with one copy for the last `short` of them, and with none if there are none.

    Each product takes the axis in front to the back, as X^T M^T; short axes are multiplied where they then stand, in
    front of all others, and are taken to the back together.
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
    runs = short_runs(tuple(x.shape[1:]), frozenset(axis for axis, matrix in matrices.items() if matrix.ndim == 3))
    y = x.reshape(x.shape[0], *(math.prod(x.shape[run[0] + 1 : run[-1] + 2]) for run in runs))
    joined = {at: kronecker([matrices[axis] for axis in run]) for at, run in enumerate(runs) if run[0] in matrices}
    y = mode_products(y, joined)
    rotated = {axis: matrix.shape[1] for axis, matrix in matrices.items()}
    return y.reshape(x.shape[0], *(rotated.get(axis, d) for axis, d in enumerate(x.shape[1:])))


@lru_cache(maxsize=256)
def short_runs(block: tuple[int, ...], axes: frozenset[int]) -> list[list[int]]:
    """The axes of a block in runs, in order; adjacent ones of `axes` are in one run while its length stays short."""
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
    """The Kronecker product of stacks of matrices `[N, d', d]`; the only one as it is, also if it is a diagonal."""
    product, *others = factors
    for factor in others:
        outer = product[:, :, None, :, None] * factor[:, None, :, None, :]
        product = outer.reshape(len(outer), product.shape[1] * factor.shape[1], -1)
    return product


def symmetric_product(y: Tensor, z: Tensor) -> Tensor:
    """Y Z^T `[N, d, d]`."""
    if multiplied_in_float32(y):
        return symmetric_product(y.float(), z.float()).to(y.dtype)
    if not _halved(y):
        return torch.bmm(y, z.mT)
    return add_symmetric(y.new_empty(*y.shape[:2], y.shape[1]), y, z, beta=0)


def add_symmetric(total: Tensor, y: Tensor, z: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """In place: T <- beta T + alpha Y Z^T, for a symmetric T; what T holds is not read if beta is 0.

    Panels of c = 128 columns, each from the diagonal down, take (1 + c / d) / 2 of the operations. Every matrix is
    multiplied by itself, so that no result depends on the others of a stack.
    """
    if multiplied_in_float32(total):
        return total.copy_(add_symmetric(total.float(), y.float(), z.float(), beta, alpha))
    if y.shape[2] == 1:  # such a sum takes another kernel on a CPU in a stack of one; the product alone does not
        outer = torch.bmm(y, z.mT)
        return torch.mul(outer, alpha, out=total) if beta == 0 else total.mul_(beta).add_(outer, alpha=alpha)
    if not _halved(y):
        return total.baddbmm_(y, z.mT, beta=beta, alpha=alpha)
    for target, left, right in zip(total.unbind(0), y.unbind(0), z.unbind(0), strict=True):
        for start in range(0, len(target), _PANEL):
            panel = slice(start, start + _PANEL)
            target[start:, panel].addmm_(left[start:], right[panel].mT, beta=beta, alpha=alpha)
            if start:
                target[:start, panel] = _spread(target[panel, :start]).mT
    return total


def _spread(rows: Tensor) -> Tensor:
    """A copy of rows `[c, k]` that lie in different sets of a cache, so that columns of it are read faster."""
    copied = rows.new_empty(rows.shape[0], rows.shape[1] + 16)[:, : rows.shape[1]]
    return copied.copy_(rows)


def _halved(y: Tensor) -> bool:
    """Whether panels are faster: not in bfloat16 below 768 rows, where torch multiplies a whole stack at once."""
    return may_branch_on_values(y) and y.shape[1] >= (6 if y.dtype.itemsize < 4 else 2) * _PANEL


_PANEL = 128
"""Columns of a panel: with 64 and 256 some sides of 256 to 1024 took longer, and none much less time (measured)."""


def reordered(x: Tensor, axis: int, order: Tensor) -> Tensor:
    """x `[N, *block]`, its entries along an axis of the block in the order `[N, d]`, d or fewer places.

    On a CPU large blocks are taken one by one: `gather` takes up to eight times as long.
    """
    if x.device.type == "cpu" and x.shape[1:].numel() >= _ONE_BY_ONE:
        out = x.new_empty(*x.shape[: axis + 1], order.shape[1], *x.shape[axis + 2 :])
        for target, source, places in zip(out.unbind(0), x.unbind(0), order.unbind(0), strict=True):
            torch.index_select(source, axis, places, out=target)
        return out
    index = order.reshape(-1, *(order.shape[1] if place == axis else 1 for place in range(x.ndim - 1)))
    return x.gather(axis + 1, index.expand(*x.shape[: axis + 1], -1, *x.shape[axis + 2 :]))


_ONE_BY_ONE = 1 << 12
"""Entries from which on a block is worth a kernel of its own (measured)."""
