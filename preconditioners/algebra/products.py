"""Products along the axes of stacked blocks.

Legend: N blocks; a axis of the block, of length d; p product of the axes before a; q product of the axes after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from eigengraft.numerics import multiplied_in_float32, products

ProductDtype = Literal["input", "bfloat16"]
"""dtype of products: that of what is multiplied, or bfloat16 with sums in float32, of which each result is rounded."""


def unfold(x: Tensor, axis: int) -> Tensor:
    """The blocks as matrices `[N, d, p q]` with `axis` first; a view where the layout allows it."""
    # written without einops, which takes three times as long, because statistics unfold every gradient
    if x.ndim == 3:
        return x.mT if axis else x
    return x.movedim(axis + 1, 1).reshape(x.shape[0], x.shape[axis + 1], -1)


def fold(y: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """The blocks `[N, *block]` of that shape whose unfolding along `axis` is y `[N, d, p q]`."""
    folded: Tensor = rearrange(y, "n d (p q) -> n p d q", p=math.prod(shape[1 : axis + 1]))
    return folded.reshape(shape)


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
