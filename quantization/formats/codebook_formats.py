"""Formats with a codebook: 4 bits for a number, with two codes in a byte, and 8 bits for a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.slots import Slot, Uniform

from . import codebooks
from .base import Blockwise
from .codebooks import Codebook, pack_nibbles


class _CodebookFormat(Blockwise, ABC):
    """A format in which the code of a scaled number y is argmin_k |y - R_k|, for the levels R of a codebook."""

    @property
    @abstractmethod
    def levels(self) -> codebooks.Levels:
        """The levels R, ascending."""

    def codebook_id(self) -> str:
        return repr(self.levels)

    def unsupported(self, slot: Slot) -> str | None:
        if self.levels[0] >= 0 and slot.role != "second_moment":
            return f"a codebook without negative values can store only second moments, got a {slot.role}"
        return super().unsupported(slot)


class Nibbles(_CodebookFormat, ABC):
    """A format with codes below 16, stored two in each byte: a row of n numbers has ceil(n / 2) bytes."""

    block_size: int = Field(default=64, ge=1, description="Numbers along the last axis that share a scale, B.")

    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        return pack_nibbles(Codebook(self.levels).nearest(z), out)

    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return Codebook(self.levels).pairs(codes, dtype, out if n % 2 == 0 else None)[..., :n]


class Int4(Nibbles):
    """4 bits for a number: the nearest of 15 or 16 levels, times the scale of the block (Wang et al. 2024).

    The codebook `unsigned` has no level 0, so that a second moment stays positive if any number of its block is
    positive. The codebook `dynamic` has no level -1: if the number of largest size in a block is negative, it is stored
    as 0.8875 times its value.
    """

    kind: Literal["int4"] = "int4"
    codebook: Literal["linear_square", "dynamic", "nf4", "symmetric_integer", "unsigned"] = Field(
        default="linear_square", description="The levels; see `codebooks`."
    )

    @property
    def levels(self) -> codebooks.Levels:
        return _FOUR_BITS[self.codebook]


class Codebook8(_CodebookFormat):
    """8 bits for a number: the nearest of 256 levels, times the scale of the block (Dettmers et al. 2022, section 2).

    The codebook `dynamic` has levels over seven powers of ten, for first moments. `dynamic_unsigned` has levels >= 0,
    for second moments.
    """

    kind: Literal["codebook8"] = "codebook8"
    codebook: Literal["dynamic", "dynamic_unsigned", "linear_square"] = Field(
        default="dynamic", description="The levels; see `codebooks`."
    )

    @property
    def levels(self) -> codebooks.Levels:
        return _EIGHT_BITS[self.codebook]

    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        return Codebook(self.levels).nearest(z, out)

    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return Codebook(self.levels).values(codes, dtype, out)


_FOUR_BITS = {
    "linear_square": codebooks.linear_square(4),
    "dynamic": codebooks.dynamic(4),
    "nf4": codebooks.NORMAL_FLOAT,
    "symmetric_integer": codebooks.SYMMETRIC_INTEGER,
    "unsigned": codebooks.UNSIGNED,
}
_EIGHT_BITS = {
    "dynamic": codebooks.dynamic(8),
    "dynamic_unsigned": codebooks.dynamic(8, signed=False),
    "linear_square": codebooks.linear_square(8),
}
