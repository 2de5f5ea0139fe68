"""Floating-point formats of 4, 3 and 2 bytes.

Legend: ulp(h) is the unit of rounding errors: the distance from |h| to the next larger bfloat16, for h in bfloat16.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import may_branch_on_values
from eigengraft.slots import Encoded, Slot, Uniform

from .base import Format

_LARGEST = torch.finfo(torch.bfloat16).max


class Float32(Format):
    """Storage in float32, which is lossless for float32 parameters and the reference for other formats."""

    kind: Literal["float32"] = "float32"

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        return {"values": x.to(torch.float32, copy=True)}

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        return encoded["values"].to(dtype, copy=True)


class BFloat16(Format):
    """Storage in bfloat16: 8 significant bits and the range of float32. Finite numbers stay finite.

    With `rounding: stochastic` a float32 is rounded up with probability (low 16 bits) / 2^16. The rounding is unbiased,
    so that changes below half an ulp are not lost on average.
    """

    kind: Literal["bf16"] = "bf16"
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="How numbers are rounded to 8 significant bits."
    )

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        if self.rounding == "stochastic" and uniform is not None:
            return {"values": _stochastic(_within(x.float()), uniform)}
        return {"values": _nearest(_within(x))}

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        return encoded["values"].to(dtype)


class SplitFloat(Format):
    """x = h + k/127 ulp(h)/2  with h in bfloat16 and k in int8:  3 bytes, a relative error of at most 2^-16

    ulp(h) is the distance from |h| to the next larger bfloat16. Storing the rest x - h in units of half an ulp is the
    method of FlashOptim (2026).
    """

    kind: Literal["split_float"] = "split_float"

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        high = _nearest(_within(x))
        rest = (x - high.to(x.dtype)).div_(_half_ulp(high).to(x.dtype))
        rest = (rest if _plain(x) else torch.where(rest.isfinite(), rest, 0.0)).mul_(127).round_().clamp_(-127, 127)
        return {"values": high, "residuals": rest.to(torch.int8)}

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        high = encoded["values"]
        rest = encoded["residuals"].to(dtype).div_(127).mul_(_half_ulp(high).to(dtype))
        return rest.add_(high.to(dtype))


def _within(x: Tensor) -> Tensor:
    """Return x with finite numbers clamped to the range of bfloat16, because larger numbers would be rounded to inf."""
    return x if _plain(x) else torch.where(x.isfinite(), x.clamp(-_LARGEST, _LARGEST), x)


def _plain(x: Tensor) -> bool:
    """Return True if all numbers of x are finite and in the range of bfloat16.

    Return False without a test if the host cannot read the numbers at once: on a device, or while a graph is traced.
    """
    return may_branch_on_values(x) and bool(x.amax() <= _LARGEST) and bool(x.amin() >= -_LARGEST)


def _nearest(x: Tensor) -> Tensor:
    """Return x rounded to the nearest bfloat16, ties to even.

    In a traced program the rounding is computed with integers, because a compiler would remove a conversion to bfloat16
    and back.
    """
    if not torch.compiler.is_compiling():
        return x.to(torch.bfloat16)
    x = x.float()
    bits = x.view(torch.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)


def _stochastic(x: Tensor, uniform: Uniform) -> Tensor:
    """Return x rounded stochastically to bfloat16.

    A random number below 2^16 is added to the bits of x, and the lower half of the bits is dropped.
    """
    added = uniform(x, "rounding").mul_(65536).int()
    bits = (x.view(torch.int32) + added) & -65536
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)


def _half_ulp(high: Tensor) -> Tensor:
    """Return half the distance from |h| to the next larger bfloat16, in float32: 2^-8 times the largest power of two <=
    |h|.

    For subnormal h, the result is that of the smallest normal number.

    high: h, in bfloat16.
    """
    exponent = high.float().view(torch.int32) & 0x7F800000
    return exponent.clamp_min(1 << 23).view(torch.float32) * 2.0**-8
