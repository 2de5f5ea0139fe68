"""Formats: how the numbers of a slot are stored, whatever they mean. Two kinds: number by number, and by blocks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.slots import Parts, Slot, Uniform

from .base import Quantizer
from .blocks import by_block, count, even_width, largest, over, times_
from .chunks import CACHED, looks, scratch
from .scales import double, scales, single


class Format(Quantizer, ABC):
    """What all formats have: they store floating-point slots of at least some size."""

    min_elements: int = Field(default=1, ge=1, description="Smallest product of the axes of a slot that is stored so.")

    def refuses(self, slot: Slot) -> str | None:
        floating = slot.dtype is None or slot.dtype.is_floating_point
        if slot.role == "count" or not floating:
            return f"a slot of floating-point numbers is required, got a {slot.role} of dtype {slot.dtype}"
        if math.prod(slot.shape) < self.min_elements:
            return f"at least {self.min_elements} elements (min_elements) are required, got shape {slot.shape}"
        return None


class Blockwise(Format, ABC):
    """y = x / s with s = max |x| over each block of B numbers along the last axis (the last block may be shorter).

    y in [-1, 1] is stored as codes; a block of zeros has s = 0 and comes back as zeros. A block in which a number is
    not finite, or is beyond float32, comes back as NaN; no other block sees it.
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
        """Whether random numbers are used, which belong to a whole row of the stack."""
        return False

    @abstractmethod
    def codes(self, y: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        """y `[N, ..., n]`, which may be overwritten -> codes, in `out` if it is given; -1 <= y <= 1 up to rounding."""

    @abstractmethod
    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """And back: in `out`, if it is given and can hold them, else in a fresh tensor."""

    def encode(self, x: Tensor, before: Parts | None = None, uniform: Uniform | None = None) -> Parts:
        rows = x if x.ndim > 1 else x[:, None]
        drawn = uniform if self.draws else None
        if looks(x) and drawn is None:
            return self._piece_by_piece(rows)
        found = largest(rows, self.block_size)
        kept = single(found) if self.scale == "float32" else double(found)
        s = scales(kept)
        y = self._bounded(over(rows, torch.where(s == 0, 1.0, s).to(x.dtype), self.block_size))
        return {"codes": self.codes(torch.where(y.isnan(), 0.0, y), drawn), **kept}

    def _piece_by_piece(self, rows: Tensor) -> Parts:
        """Each piece through all of it before the next, with every intermediate in the cache."""
        size, n = self.block_size, rows.shape[-1]
        width = even_width(n, size)
        flat = rows.detach().reshape(rows.numel() // width, width)
        kept = double(largest(rows, size)) if self.scale == "double" else {}
        known = scales(kept).reshape(len(flat), count(width, size)) if kept else None
        height = max(1, CACHED // width)
        codes, found = None, []
        for here in (slice(i, i + height) for i in range(0, max(1, len(flat)), height)):
            some = flat[here]
            s = largest(some, size).float() if known is None else known[here]
            y = scratch("y", some.numel(), some.dtype).view(some.shape)
            found.append(self._divided(some, s, y))
            made = self.codes(y, None, None if codes is None else codes[here])
            if codes is None:
                codes = made.new_empty(len(flat), made.shape[-1])
                codes[here] = made
        assert codes is not None
        lead = rows.shape[:-1]
        kept = kept or {"scales": torch.cat(found).reshape(*lead, count(n, size))}
        return {"codes": codes.reshape(*lead, codes.shape[-1] * n // width), **kept}

    def _divided(self, x: Tensor, s: Tensor, out: Tensor) -> Tensor:
        """y into `out`; the scales as they are kept. Where all are ordinary, what protects the others is left out."""
        ordinary = s.numel() > 0 and float(s.amin()) > 0 and float(s.amax()) < math.inf
        s = s if ordinary else single(s)["scales"]
        divisor = s if ordinary else torch.where(s == 0, 1.0, s)
        self._bounded(by_block(torch.div, x, divisor.to(x.dtype), self.block_size, out))
        if not ordinary:
            out.masked_fill_(out.isnan(), 0.0)
        return s

    def _bounded(self, y: Tensor) -> Tensor:
        """In place: scales that were rounded may be below the largest number."""
        return y.clamp_(-1, 1) if self.scale == "double" else y

    def decode(self, parts: Parts, slot: Slot, dtype: torch.dtype) -> Tensor:
        n, codes = slot.shape[-1] if slot.shape else 1, parts["codes"]
        s = scales(parts).to(dtype)
        if not looks(codes):
            return times_(self.values(codes, n, dtype), s, self.block_size).reshape(-1, *slot.shape)
        width = even_width(n, self.block_size)
        rows, height = codes[..., 0].numel() * n // width, max(1, CACHED // width)
        codes, s = codes.reshape(rows, codes.shape[-1] * width // n), s.reshape(rows, count(width, self.block_size))
        result = s.new_empty(rows, width)
        for some, scale, target in zip(*(torch.split(t, height) for t in (codes, s, result)), strict=True):
            by_block(torch.mul, self.values(some, width, dtype, target), scale, self.block_size, target)
        return result.reshape(len(parts["codes"]), *slot.shape)
