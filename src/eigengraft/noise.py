"""Random numbers of a block, computed from (seed, step, stream, index in the block) and from nothing else.

A number therefore does not depend on the order of blocks, on the stack, or on the rank and device of a block. The
generator is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") and uses SplitMix64
(Steele, Lea & Flood 2014, section 4). It has no state.

Legend: N blocks; n numbers in a block. Hashes are computed in int64, whose products and sums wrap around modulo 2^64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """Return the int64 that has the same 64 bits as an unsigned word."""
    return word - (1 << 64) if word >> 63 else word


_STRIDE = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd: its multiples run through all words
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def uniform(seeds: Tensor, step: Tensor, shape: tuple[int, ...], dtype: torch.dtype, stream: int = 0) -> Tensor:
    """Return numbers `[N, *shape]`, uniform in [0, 1).

    Every multiple of 2^-p in [0, 1) is equally likely, with p the precision of `dtype` in bits.

    seeds, step: seed and step of each block, int64 `[N]`.
    stream: number that stands for the purpose of the random numbers. Numbers of different streams are independent.
    """
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    drawn = _shifted(words(seeds, step, math.prod(shape), stream), 64 - digits)
    return drawn.to(dtype).mul_(2.0**-digits).reshape(-1, *shape)


def normal(seeds: Tensor, step: Tensor, shape: tuple[int, ...], dtype: torch.dtype, stream: int = 0) -> Tensor:
    """Return standard normal numbers `[N, *shape]` by sqrt(-2 log u) cos(2 pi w) (Box & Muller 1958), at most 6.7 in
    size.

    u and w are the two halves of a random word, scaled to (0, 1]. The words are the same on every device; log and cos
    may differ between devices in the last digit of float64.

    seeds, step, stream: see `uniform`.
    """
    drawn = words(seeds, step, math.prod(shape), stream)
    u = _shifted(drawn, 32).double().add_(1).mul_(2.0**-32)  # in (0, 1]
    w = (drawn & 0xFFFFFFFF).double().mul_(2 * math.pi * 2.0**-32)
    return u.log_().mul_(-2).sqrt_().mul_(w.cos_()).to(dtype).reshape(-1, *shape)


def words(seeds: Tensor, step: Tensor, count: int, stream: int = 0) -> Tensor:
    """Return random words, int64 `[N, count]`. Every bit is 0 or 1 with equal probability.

    seeds, step, stream: see `uniform`.
    count: number of words for each block.
    """
    key = _mixed(_mixed(_mixed(seeds) + step) + stream)
    places = torch.arange(1, count + 1, dtype=torch.int64, device=seeds.device) * _STRIDE
    return _mixed(key[:, None] + places)


def _mixed(x: Tensor) -> Tensor:
    """Return x after the finalizer of SplitMix64, a bijection of 64-bit words.

    If one bit of x changes, each bit of the result changes in half of all cases.
    """
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return x >> bits with zeros shifted in from the left. The operator itself would repeat the sign bit of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
