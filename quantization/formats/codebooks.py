"""Codebooks: ascending levels in [-1, 1] to which numbers, divided by the scale of their block, are rounded.

linear_square: the squares of equally spaced numbers (4-bit Shampoo, Wang et al. 2024, appendix C).
dynamic: dynamic tree quantization (Dettmers 2016), also in 4-bit Shampoo.
nf4: quantiles of the normal distribution (Dettmers et al. 2023, appendix E).
unsigned: the zero-free linear codebook for second moments (Li, Chen & Zhu 2023, section 4).
symmetric_integer: k / 7 for k = -7 ... 7.

On a CPU numbers are encoded and decoded in pieces that stay in the cache. On a device, and in a traced program, all
numbers are processed at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from eigengraft.numerics import cached_tensors, may_branch_on_values

CACHE_ELEMENTS = 1 << 17
"""Number of entries that are processed at once on a CPU. A few float32 copies of that many entries fit into a core's
cache, and the overhead of calls is small in comparison with the work.
"""


def scratch(name: str, n: int, dtype: torch.dtype) -> Tensor:
    """Return a buffer `[n]` with arbitrary values, for intermediate results.

    If n is at most `CACHE_ELEMENTS`, the next call with the same name and dtype in the same thread returns the same
    memory, because allocating new memory would take as long as the work.
    """
    if n > CACHE_ELEMENTS:
        return torch.empty(n, dtype=dtype, device="cpu")
    buffers: dict[str, Tensor] = _BUFFERS.__dict__
    key = f"{name} {dtype}"
    if key not in buffers:
        with torch.inference_mode(False):  # a tensor of inference mode cannot be written to outside of that mode
            buffers[key] = torch.empty(CACHE_ELEMENTS, dtype=dtype, device="cpu")
    return buffers[key][:n]


_BUFFERS = threading.local()


def look_up(table: Tensor, codes: Tensor, out: Tensor | None = None) -> Tensor:
    """Return table[codes] for a table `[k]`, in the shape of the codes.

    out: tensor to which the values are written; None for a new tensor.
    """
    if not may_branch_on_values(codes):
        return table.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)
    result = table.new_empty(codes.shape) if out is None else out
    source, target = codes.reshape(-1), result.view(-1)
    for start in range(0, len(source), CACHE_ELEMENTS):
        some = source[start : start + CACHE_ELEMENTS]
        places = scratch("places", len(some), torch.int32).copy_(some)
        torch.index_select(table, 0, places, out=target[start : start + CACHE_ELEMENTS])
    return result


def pack_nibbles(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """Return codes `[..., n]` packed as uint8 `[..., ceil(n / 2)]`, two codes in a byte.

    Codes at even positions are in the low half of a byte.

    out: tensor that the bytes may be written to; None for a new tensor. Use the returned tensor, because only some
        cases write to `out`.
    """
    codes = codes.to(torch.uint8)
    if codes.shape[-1] % 2:
        codes = pad(codes, (0, 1))
    # An int16 contains two codes, the first one in its low byte. Shifted right by 4 bits, the second code is the upper
    # half of the low byte. The conversion to uint8 keeps the low byte.
    if may_branch_on_values(codes) and sys.byteorder == "little":
        pairs = codes.contiguous().view(torch.int16)
        pairs = (pairs >> 4).bitwise_or_(pairs)
        return pairs.to(torch.uint8) if out is None else out.copy_(pairs)
    return torch.add(codes[..., 0::2], codes[..., 1::2], alpha=16)


Levels = tuple[float, ...]


def linear_square(bits: int) -> Levels:
    """Return the levels sign(t_j) t_j^2 with t_j = -1 + 2 j / (2^bits - 1) for j = 0 ... 2^bits - 1.

    The negative t_j closest to 0 is replaced by 0.
    """
    codes = 1 << bits
    t = [-1 + 2 * j / (codes - 1) for j in range(codes)]
    t[codes // 2 - 1] = 0.0
    return tuple(x * abs(x) for x in t)


def dynamic(bits: int, signed: bool = True) -> Levels:
    """Return the levels of dynamic tree quantization.

    The levels are 0, 1 and, for each i = 0 ... e - 1 with e = bits - 1, 2^i positive levels and their negatives. The
    2^i positive levels are the midpoints of 2^i equal parts of [.1, 1], multiplied by 10^(i-e+1).

    signed: False for levels >= 0 only, with 2^(i+1) parts for each i.
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
"""The 16 levels of NF4 (Dettmers et al. 2023, arXiv:2305.14314): quantiles of a normal distribution, and an exact 0."""
SYMMETRIC_INTEGER: Levels = tuple(k / 7 for k in range(-7, 8))
"""The 15 levels k / 7 with k = -7 to 7, which are symmetric about 0."""
UNSIGNED: Levels = tuple((j + 1) / 16 for j in range(16))
"""The 16 levels (j + 1) / 16 for numbers above 0, without a level 0."""


@dataclass(frozen=True)
class Codebook:
    """A codebook: ascending levels. A code is the index of a level."""

    levels: Levels

    def nearest(self, y: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the codes, uint8, of the levels nearest to y, which must not be NaN.

        The code of y is computed as the number of midpoints below y, with a midpoint between each two adjacent levels.

        out: tensor to which the codes are written; None for a new tensor.
        """
        if y.dtype == torch.float32 and may_branch_on_values(y):
            found = _found(y, _steps(self.levels))
        else:
            found = torch.bucketize(y, _middles(self.levels, y.dtype, y.device), out_int32=True)
        return found.to(torch.uint8) if out is None else out.copy_(found)

    def values(self, codes: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the levels of integer codes, in the shape of the codes.

        out: tensor to which the levels are written; None for a new tensor.
        """
        return look_up(_tensor(self.levels, dtype, codes.device), codes, out)

    def pairs(self, codes: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the levels `[..., 2 n]` of bytes `[..., n]` with two codes each, the first code in the low half.

        out: tensor to which the levels are written; None for a new tensor.
        """
        table = _pairs(self.levels, dtype, codes.device)
        both = None if out is None else out.view(table.dtype)
        return look_up(table, codes, both).view(dtype)


def _found(y: Tensor, steps: Tensor) -> Tensor:
    """Return the codes of the float32 numbers y as int32, in a buffer that the next call overwrites.

    steps: the table that `_steps` returns for the levels. The docstring of `_steps` explains how a code is found.
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
    """Return a table, int32 `[2^15 + 1]`, from which `_found` computes the codes of float32 numbers x in (-2, 2).

    The code of x is the number of midpoints between levels that are below x. It is computed without a search:

        bits = the 32 bits of x as a signed integer,  k = |bits|,  h = |bits >> 16|,  code = (k + table[h]) >> 16

    h is k / 2^16, rounded down for x >= 0 and up for x < 0. So all x with the same h are neighbors, and share an entry
    of the table. If midpoints differ by at least 2^-7 of their size, at most one midpoint is among these x, and they
    have at most two codes, c - 1 and c. Let s be the smallest k whose code is c. The entry is 2^16 c - s. Then k +
    table[h] = 2^16 c + (k - s), whose upper 16 bits are c for k >= s, and c - 1 for k < s.

    Numbers x >= 0 have h < 2^14, and k = h 2^16, ..., h 2^16 + 65535. Numbers x < 0 have h > 2^14, and k = h 2^16 -
    65535, ..., h 2^16.
    """
    # The search below needs a whole number for each float x that rises with x. For x >= 0 it is k. For x < 0 it is k -
    # 2^31, which is minus the bits of |x|: k itself, the absolute value of the bits of x, is larger for all x < 0 than
    # for all x >= 0.
    middles = _middles(levels, torch.float32, torch.device("cpu")).view(torch.int32).long()
    middles = torch.where(middles < 0, -(middles & 0x7FFFFFFF), middles)
    h = torch.arange((1 << 15) + 1, dtype=torch.int64, device="cpu")
    negative = h > 1 << 14
    first = torch.where(negative, (h << 16) - 0xFFFF - (1 << 31), h << 16)
    below, upto = torch.searchsorted(middles, first), torch.searchsorted(middles, first + 0xFFFF)
    if bool((upto - below > 1).any()):
        raise ValueError("codebook: two midpoints of levels share the upper 16 bits; use levels that are farther apart")
    start = torch.where(upto > below, torch.cat((middles, middles[-1:]))[below] + 1, first)
    return ((upto << 16) - start - (negative.long() << 31)).int()


@cached_tensors(maxsize=256)
def _pairs(levels: Levels, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table `[256]`. For each byte with two codes, it has the two levels as one number of twice the size of a
    level.

    One look-up of a pair takes a quarter of the time of two look-ups. Entries of codes that the codebook does not have
    are 0, and are never read.
    """
    table = list(levels) + [0.0] * (16 - len(levels))
    both = torch.tensor([[table[byte & 15], table[byte >> 4]] for byte in range(256)], dtype=dtype, device=device)
    twice = {2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]
    return both.view(twice).squeeze(-1)
