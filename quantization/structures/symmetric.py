"""One triangle of a symmetric matrix (as the packed factors of Distributed Shampoo, Shi et al. 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.slots import Encoded, Slot, Uniform

from ..base import Quantizer
from .base import at_places, encode_under, square_shape_error, upper_places, without_prefix


class Symmetric(Quantizer):
    """The upper triangle `[N, d (d + 1) / 2]` of a symmetric matrix `[N, d, d]`, row by row: half the bytes.

    The lower triangle is decoded as the mirror image of the upper triangle, and is not stored. Without an inner format
    no number is rounded. An inner format receives the triangle as a single row, so that a block of the inner format may
    have entries of two rows of the matrix.
    """

    roles: ClassVar[tuple[str, ...]] = ("statistic", "root")
    kind: Literal["symmetric"] = "symmetric"
    inner: Quantizer | None = Field(default=None, description="how the triangle is stored; default: unchanged")

    def unsupported(self, slot: Slot) -> str | None:
        problem = square_shape_error(self, slot, "symmetric matrices")
        return problem or (self.inner.unsupported(slot) if self.inner else None)

    @property
    def symmetric(self) -> bool:
        return True

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        return self._stored(at_places(x.flatten(1), upper_places(x.shape[-1], x.device)[0]), before, uniform)

    def encode_hollow(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        """Return the encoding of x with its diagonal replaced by zeros, without a copy of x."""
        d = x.shape[-1]
        there, back = upper_places(d, x.device)
        upper = at_places(x.flatten(1), there).index_fill_(1, back[:: d + 1].long(), 0.0)
        return self._stored(upper, before, uniform)

    def _stored(self, upper: Tensor, before: Encoded | None, uniform: Uniform | None) -> Encoded:
        if self.inner is None:
            return {"upper": upper}
        return encode_under(self.inner.encode, "upper", upper, before, uniform)

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        d = slot.shape[-1]
        if self.inner is None:
            upper = encoded["upper"].to(dtype)
        else:
            upper = self.inner.decode(without_prefix("upper", encoded), replace(slot, shape=(d * (d + 1) // 2,)), dtype)
        return at_places(upper, upper_places(d, upper.device)[1]).reshape(-1, *slot.shape)

    def codebook_id(self) -> str:
        return self.inner.codebook_id() if self.inner else ""
