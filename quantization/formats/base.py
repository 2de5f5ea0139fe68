"""Formats: how the numbers of a slot are stored, whatever they mean. Two kinds: number by number, and by blocks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import may_branch_on_values
from eigengraft.slots import Encoded, Slot, Uniform

from ..base import Quantizer
from .chunks import CACHE_ELEMENTS, scratch
from .scale_blocks import block_count, block_maxima, even_width, map_blocks, map_blocks_out, multiply_blocks_
from .scales import decode_scales, encode_scales, encode_scales_twice


class Format(Quantizer, ABC):
    """A quantizer of floating-point numbers, for slots of at least some size."""

    min_elements: int = Field(default=1, ge=1, description="Smallest product of the axes of a slot that is stored so.")

    def unsupported(self, slot: Slot) -> str | None:
        floating = slot.dtype is None or slot.dtype.is_floating_point
        if slot.role in ("count", "failures") or not floating:
            return f"a slot of floating-point numbers is required, got a {slot.role} of dtype {slot.dtype}"
        if math.prod(slot.shape) < self.min_elements:
            return f"at least {self.min_elements} elements (min_elements) are required, got shape {slot.shape}"
        return None


class Blockwise(Format, ABC):
    """y = x / s with s = max |x| over each block of B numbers along the last axis (the last block may be shorter).

    What is rounded to codes is z = x (span / s), in [-span, span] up to rounding. A block of zeros has s = 0 and comes
    back as zeros. A block in which a number is not finite, or is beyond float32, comes back as NaN; no other block sees
    it.
    """

    block_size: int = Field(default=256, ge=1, description="Numbers along the last axis that share a scale, B.")
    min_elements: int = Field(
        default=4096, ge=1, description="Smallest product of the axes of a slot that is stored so; smaller ones stay."
    )
    scale: Literal["float32", "double"] = Field(
        default="float32", description="How scales are stored; double: in 8 bits around their mean."
    )

    @property
    def draws(self) -> bool:
        """Whether random numbers are used, which are drawn for complete rows of the stack."""
        return False

    @property
    def span(self) -> float:
        """What the largest number of a block becomes before it is rounded."""
        return 1.0

    @abstractmethod
    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        """z `[N, ..., n]`, which may be overwritten -> codes, in `out` if it is given."""

    @abstractmethod
    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """codes -> y = z / span `[N, ..., n]`: in `out`, if it is given and can hold them, else in a fresh tensor."""

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        rows = x if x.ndim > 1 else x[:, None]
        found, drawn = block_maxima(rows, self.block_size).float(), uniform if self.draws else None
        at_once = may_branch_on_values(x) and drawn is None
        if at_once and self.scale == "float32" and _ordinary(found):
            return {"codes": self._piece_by_piece(rows.detach(), (self.span / found).to(x.dtype)), "scales": found}
        stored = encode_scales(found) if self.scale == "float32" else encode_scales_twice(found)
        s = decode_scales(stored)
        s = torch.where(s == 0, 1.0, s)
        if at_once and _ordinary(s):
            return {"codes": self._piece_by_piece(rows.detach(), (self.span / s).to(x.dtype)), **stored}
        # Scales of which the reciprocal is not an ordinary float32 are moved by a power of two first.
        move = torch.where(s < 1 / _FAR, _FAR, torch.where(s > _FAR, 1 / _FAR, 1.0))
        factors = self.span / (s * move)
        z = map_blocks(torch.mul, rows, move.to(x.dtype), self.block_size)
        z = multiply_blocks_(z, factors.to(x.dtype), self.block_size)
        z = self._bounded(torch.where(z.isnan(), 0.0, z))
        return {"codes": self.codes(z, drawn), **stored}

    def _piece_by_piece(self, rows: Tensor, factors: Tensor) -> Tensor:
        """The codes of z = rows times factors, piece by piece: each is finished while it lies in the cache."""
        size, n = self.block_size, rows.shape[-1]
        width = even_width(n, size)
        flat = rows.reshape(rows.numel() // width, width)
        factors = factors.reshape(len(flat), block_count(width, size))
        height = max(1, CACHE_ELEMENTS // width)
        codes: Tensor | None = None
        for start in range(0, len(flat), height):
            some, factor = flat[start : start + height], factors[start : start + height]
            z = map_blocks_out(torch.mul, some, factor, size, scratch("z", some.numel(), some.dtype).view(some.shape))
            made = self.codes(self._bounded(z), None, None if codes is None else codes[start : start + height])
            if codes is None and len(made) == len(flat):
                codes = made
            elif codes is None:
                codes = made.new_empty(len(flat), made.shape[-1])
                codes[: len(made)] = made
        assert codes is not None
        return codes.reshape(*rows.shape[:-1], codes.shape[-1] * n // width)

    def _bounded(self, z: Tensor) -> Tensor:
        """z clamped to the span in place, where rounded scales may lie below the largest number."""
        return z.clamp_(-self.span, self.span) if self.scale == "double" else z

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        n, codes = slot.shape[-1] if slot.shape else 1, encoded["codes"]
        s = decode_scales(encoded).to(dtype)
        if not may_branch_on_values(codes):
            return multiply_blocks_(self.values(codes, n, dtype), s, self.block_size).reshape(-1, *slot.shape)
        width = even_width(n, self.block_size)
        rows, height = codes[..., 0].numel() * n // width, max(1, CACHE_ELEMENTS // width)
        codes = codes.reshape(rows, codes.shape[-1] * width // n)
        s = s.reshape(rows, block_count(width, self.block_size))
        result = s.new_empty(rows, width)
        for start in range(0, rows, height):
            some, scale, target = (t[start : start + height] for t in (codes, s, result))
            map_blocks_out(torch.mul, self.values(some, width, dtype, target), scale, self.block_size, target)
        return result.reshape(len(encoded["codes"]), *slot.shape)


_FAR = 2.0**100
"""Reciprocals of scales up to this are ordinary float32, times any span."""


def _ordinary(s: Tensor) -> bool:
    """Whether there are scales, all of them far from where float32 ends."""
    if s.numel() == 0:
        return False
    low, high = torch.aminmax(s)
    return float(low) >= 1 / _FAR and float(high) <= _FAR
