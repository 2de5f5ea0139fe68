"""Codebooks: ascending levels in [-1, 1] that numbers, divided by the scale of their block, are rounded to.

linear_square, dynamic: 4-bit Shampoo (Wang et al. 2024, appendix C); dynamic is dynamic tree quantization (Dettmers
2016). nf4: quantiles of the normal law (Dettmers et al. 2023, appendix E). unsigned: the zero-free linear codebook for
second moments (Li, Chen & Zhu 2023, section 4). symmetric_integer: k / 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eigengraft.numerics import cached_tensors, may_branch_on_values

from .chunks import look_up, scratch

Levels = tuple[float, ...]


def linear_square(bits: int) -> Levels:
    """sign(t) t^2 with t_j = -1 + 2 j / (2^bits - 1), where the largest negative t is replaced by 0."""
    codes = 1 << bits
    t = [-1 + 2 * j / (codes - 1) for j in range(codes)]
    t[codes // 2 - 1] = 0.0
    return tuple(x * abs(x) for x in t)


def dynamic(bits: int, signed: bool = True) -> Levels:
    """0, 1 and, for i < e = bits - 1, the midpoints of 2^i equal encoded of [.1, 1] times 10^(i-e+1), with both signs.

    Unsigned: 2^(i+1) encoded.
    """
    powers = bits - 1
    found = [0.0, 1.0]
    for i in range(powers):
        equal = 1 << (i if signed else i + 1)
        middles = [(0.1 + 0.9 * (j + 0.5) / equal) * 10.0 ** (i - powers + 1) for j in range(equal)]
        found += middles + [-x for x in middles] * signed
    return tuple(sorted(found))


NORMAL_FLOAT: Levels = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
SYMMETRIC_INTEGER: Levels = tuple(k / 7 for k in range(-7, 8))
UNSIGNED: Levels = tuple((j + 1) / 16 for j in range(16))


@dataclass(frozen=True)
class Codebook:
    """Ascending levels; codes are their positions."""

    levels: Levels

    def nearest(self, y: Tensor, out: Tensor | None = None) -> Tensor:
        """Codes uint8, in `out` if it is given, of the nearest values of y, which is not NaN: how many middles are
        below it."""
        if y.dtype == torch.float32 and may_branch_on_values(y):
            found = _found(y, _steps(self.levels))
        else:
            found = torch.bucketize(y, _middles(self.levels, y.dtype, y.device), out_int32=True)
        return found.to(torch.uint8) if out is None else out.copy_(found)

    def values(self, codes: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The values of integer codes, shaped like them; in `out` if it is given, else fresh."""
        return look_up(_tensor(self.levels, dtype, codes.device), codes, out)

    def pairs(self, codes: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The values `[..., 2 n]` of n bytes with two codes each, the first in the low half; in `out` or fresh."""
        table = _pairs(self.levels, dtype, codes.device)
        both = None if out is None else out.view(table.dtype)
        return look_up(table, codes, both).view(dtype)


def _found(y: Tensor, steps: Tensor) -> Tensor:
    """The search as one look-up by the upper half of the bits of y; int32 in memory that is used again.

    k = |bits as an integer| increases with y on either side of 0 (-0 counts as 2^31, which wraps around). The table
    holds what makes the upper half of the sum with k the code: `start` becomes the first k of it.
    """
    bits, n = y.reshape(-1).view(torch.int32), y.numel()
    k, codes = scratch("k", n, torch.int32), scratch("codes", n, torch.int32)
    torch.bitwise_right_shift(bits, 16, out=k)
    torch.index_select(steps, 0, k.abs_(), out=codes)
    return codes.add_(torch.abs(bits, out=k)).bitwise_right_shift_(16).view(y.shape)


@cached_tensors(maxsize=256)
def _tensor(levels: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=dtype, device=device)


@cached_tensors(maxsize=256)
def _middles(levels: Levels, dtype: torch.dtype, device: torch.device) -> Tensor:
    middles = [(a + b) / 2 for a, b in pairwise(levels)]
    return torch.tensor(middles, dtype=dtype, device=device)


@cached_tensors(maxsize=64)
def _steps(levels: Levels) -> Tensor:
    """The table of `_found`, int32 `[2^15 + 1]`; at most one middle in a cell: they must be 2^-7 of their size apart.

    Cell h < 2^14 holds the floats >= 0 whose upper half is h, k = h 2^16 ...; cell h > 2^14 those < 0, k = ... h 2^16.
    Legend: o increases with the float, o = k or, below 0, k - 2^31.
    """
    middles = _middles(levels, torch.float32, torch.device("cpu")).view(torch.int32).long()
    middles = torch.where(middles < 0, -(middles & 0x7FFFFFFF), middles)  # o
    h = torch.arange((1 << 15) + 1, dtype=torch.int64, device="cpu")
    negative = h > 1 << 14
    first = torch.where(negative, (h << 16) - 0xFFFF - (1 << 31), h << 16)  # o
    below, upto = torch.searchsorted(middles, first), torch.searchsorted(middles, first + 0xFFFF)
    if bool((upto - below > 1).any()):
        raise ValueError("a codebook whose levels are farther apart is required")
    start = torch.where(upto > below, torch.cat((middles, middles[-1:]))[below] + 1, first)
    return ((upto << 16) - start - (negative.long() << 31)).int()


@cached_tensors(maxsize=256)
def _pairs(levels: Levels, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[256]`, the two values of a byte as one number of twice the size: looked up so, they take a quarter of the time.

    Codes beyond the codebook, which nothing writes, mean 0.
    """
    table = list(levels) + [0.0] * (16 - len(levels))
    both = torch.tensor([[table[byte & 15], table[byte >> 4]] for byte in range(256)], dtype=dtype, device=device)
    twice = {2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]
    return both.view(twice).squeeze(-1)
