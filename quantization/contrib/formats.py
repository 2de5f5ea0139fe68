"""Three formats: integers of 3 bits, unsigned integers of 8 bits, and floating-point numbers of 8 bits."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from eigengraft.slots import Slot, Uniform

from ..formats import codebooks
from ..formats.base import Blockwise
from ..formats.codebook_formats import Nibbles
from ..formats.codebooks import look_up
from ..formats.integers import LinearFormat


class Int3(Nibbles):
    """A code of 3 bits for a number, stored in 4 bits: the nearest of 8 levels, times the scale of the block (Wang et
    al. 2024).
    """

    kind: Literal["int3"] = "int3"
    codebook: Literal["linear_square", "dynamic"] = Field(
        default="linear_square", description="The levels; see `codebooks`."
    )

    @property
    def levels(self) -> codebooks.Levels:
        return _THREE_BITS[self.codebook]


_THREE_BITS = {"linear_square": codebooks.linear_square(3), "dynamic": codebooks.dynamic(3)}


class UInt8(LinearFormat):
    """8 bits for a number >= 0: code k stands for k max x / 255 or, with compand sqrt, for k^2 max x / 255^2.

    max x is the largest number of a block. FlashOptim (2026) stores second moments in this way. Numbers above 0 have a
    code of at least 1, because a second moment that is rounded to 0 would no longer damp its update.
    """

    kind: Literal["uint8"] = "uint8"
    compand: Literal["none", "sqrt"] = Field(
        default="none", description="Map before rounding; sqrt: finer codes near 0."
    )

    @property
    def largest_code(self) -> int:
        return 255

    def unsupported(self, slot: Slot) -> str | None:
        if slot.role != "second_moment":
            return f"a format without negative values can store only second moments, got a {slot.role}"
        return super().unsupported(slot)

    @property
    def span(self) -> float:
        return 255.0 if self.compand == "none" else 1.0

    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        positive = z.clamp_min_(0).clamp_max(1).ceil_()
        z = z.sqrt_().mul_(255) if self.compand == "sqrt" else z
        found = torch.maximum(self.rounded(z, uniform), positive, out=positive if out is not None else None)
        return found.to(torch.uint8) if out is None else out.copy_(found)

    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        y = (codes.to(dtype) if out is None else out.copy_(codes)).mul_(1 / 255)
        return y.square_() if self.compand == "sqrt" else y


class FP8(Blockwise):
    """8-bit floats with a scale for each block. max |x| of a block is stored as the largest number of the format.

    e4m3: 4 significant bits, positive numbers from 2^-9 to 448.
    e5m2: 3 significant bits, positive numbers from 2^-16 to 57344.
    """

    kind: Literal["fp8"] = "fp8"
    digits: Literal["e4m3", "e5m2"] = Field(default="e4m3", description="Bits of exponent and of mantissa.")

    @field_validator("digits")
    @classmethod
    def _is_there(cls, digits: str) -> str:
        if not hasattr(torch, _FP8[digits]):
            raise ValueError(
                f"'{digits}' needs a PyTorch with torch.{_FP8[digits]}; update PyTorch or choose another format"
            )
        return digits

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, _FP8[self.digits])
        return dtype

    @property
    def span(self) -> float:
        return torch.finfo(self._dtype).max

    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        z.clamp_(-self.span, self.span)  # rounding may raise z beyond the largest number of the format
        if out is None:
            return z.to(self._dtype).view(torch.uint8)
        out.view(self._dtype).copy_(z)
        return out

    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        every = torch.arange(256, dtype=torch.uint8, device=codes.device).view(self._dtype)
        return look_up(every.to(dtype).div_(torch.finfo(self._dtype).max), codes, out)


_FP8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
