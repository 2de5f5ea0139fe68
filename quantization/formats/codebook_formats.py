"""Formats with a code book: 3 and 4 bits, two codes a byte, and 8 bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.slots import Slot, Uniform

from . import codebooks as code_books
from .base import Blockwise
from .codebooks import Book
from .packing import packed


class _Coded(Blockwise, ABC):
    """q = argmin_k |y - R_k| for the values R of a book."""

    @property
    @abstractmethod
    def entries(self) -> code_books.Values:
        """R, ascending."""

    def meaning(self) -> str:
        return repr(self.entries)

    def refuses(self, slot: Slot) -> str | None:
        if self.entries[0] >= 0 and slot.role != "second_moment":
            return f"a second moment is required by a book without negative values, got a {slot.role}"
        return super().refuses(slot)


class _Nibbles(_Coded, ABC):
    """Rows of ceil(n / 2) bytes."""

    block_size: int = Field(default=64, ge=1, description="Numbers along the last axis that share a scale, B.")

    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        return packed(Book(self.entries).nearest(z), out)

    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return Book(self.entries).pairs(codes, dtype, out if n % 2 == 0 else None)[..., :n]


class Int4(_Nibbles):
    """4 bits a number: the nearest of 15 or 16 values times the scale of the block (Wang et al. 2024).

    unsigned has no zero, so that a second moment stays positive wherever its block has a positive one; dynamic has no
    -1, so that a largest number that is negative is stored as .8875 of itself.
    """

    kind: Literal["int4"] = "int4"
    book: Literal["linear_square", "dynamic", "nf4", "symmetric_integer", "unsigned"] = Field(
        default="linear_square", description="The values; see `code_books`."
    )

    @property
    def entries(self) -> code_books.Values:
        return _FOUR_BITS[self.book]


class Int3(_Nibbles):
    """3 bits a number, stored in 4: the nearest of 8 values times the scale of the block (Wang et al. 2024)."""

    kind: Literal["int3"] = "int3"
    book: Literal["linear_square", "dynamic"] = Field(
        default="linear_square", description="The values; see `code_books`."
    )

    @property
    def entries(self) -> code_books.Values:
        return _THREE_BITS[self.book]


class Book8(_Coded):
    """8 bits a number: the nearest of 256 values times the scale of the block (Dettmers et al. 2022, section 2).

    dynamic: seven powers of ten, for first moments; dynamic_unsigned: for second moments.
    """

    kind: Literal["book8"] = "book8"
    book: Literal["dynamic", "dynamic_unsigned", "linear_square"] = Field(
        default="dynamic", description="The values; see `code_books`."
    )

    @property
    def entries(self) -> code_books.Values:
        return _EIGHT_BITS[self.book]

    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        return Book(self.entries).nearest(z, out)

    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return Book(self.entries).values(codes, dtype, out)


_THREE_BITS = {"linear_square": code_books.linear_square(3), "dynamic": code_books.dynamic(3)}
_FOUR_BITS = {
    "linear_square": code_books.linear_square(4),
    "dynamic": code_books.dynamic(4),
    "nf4": code_books.NF4,
    "symmetric_integer": code_books.SYMMETRIC_INTEGER,
    "unsigned": code_books.UNSIGNED,
}
_EIGHT_BITS = {
    "dynamic": code_books.dynamic(8),
    "dynamic_unsigned": code_books.dynamic(8, signed=False),
    "linear_square": code_books.linear_square(8),
}
