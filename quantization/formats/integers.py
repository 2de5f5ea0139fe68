"""Linear formats: codes are equally spaced.

Legend: Q the largest code, 127, 255 or 32767; -128 and -32768 are not used, so that the codes are symmetric.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.slots import Encoded, Slot, Uniform

from .base import Blockwise
from .scale_blocks import largest_size


class _Linear(Blockwise, ABC):
    """round(z) with z = Q y, half to even or, stochastically, up with the probability that makes it unbiased."""

    rounding: Literal["nearest", "stochastic"] = Field(default="nearest", description="How codes are rounded.")

    @property
    def draws(self) -> bool:
        return self.rounding == "stochastic"

    @property
    @abstractmethod
    def largest_code(self) -> int:
        """Q."""

    @property
    def span(self) -> float:
        return float(self.largest_code)

    def _rounded(self, y: Tensor, uniform: Uniform | None) -> Tensor:
        if self.draws and uniform is not None:
            below = y.floor()  # y + u would carry whole numbers up now and then, where the sum is rounded
            return below.add_(1 - uniform(y, "rounding") <= y - below).clamp_max_(self.largest_code)
        return y.round_()


class _Signed(_Linear, ABC):
    """bucket = max |x| / Q; buckets "column" is the scheme of JAX's Distributed Shampoo (`quantization_utils`).

    There the maximum is over the first axis, one bucket for each column, and what is stored is the bucket itself.
    """

    buckets: Literal["row", "column"] = Field(
        default="row", description="What shares a scale: `block_size` numbers of a row, or a column."
    )

    @model_validator(mode="after")
    def _columns_have_one_scale(self) -> Self:
        if self.buckets == "column" and self.scale == "double":
            raise ValueError("scale: 'float32' is required with buckets 'column', got 'double'")
        if self.buckets == "column" and self.block_size != type(self).model_fields["block_size"].default:
            raise ValueError(
                f"block_size: `buckets: row` is required, got buckets 'column', block_size {self.block_size}"
            )
        return self

    @property
    @abstractmethod
    def integer(self) -> torch.dtype:
        """The dtype of the codes."""

    @property
    def largest_code(self) -> int:
        return torch.iinfo(self.integer).max

    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        rounded = self._rounded(z, uniform)
        return rounded.to(self.integer) if out is None else out.copy_(rounded)

    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return (codes.to(dtype) if out is None else out.copy_(codes)).mul_(1 / self.largest_code)

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        if self.buckets == "row":
            encoded = super().encode(x, before, uniform)
            return {**encoded, "codes": _as_bytes(encoded["codes"])}
        rows = x if x.ndim > 1 else x[:, None]
        found = largest_size(rows, 1).float() / self.largest_code
        bucket = torch.where(found.isfinite(), found, torch.nan)
        y = rows / torch.where(bucket == 0, 1.0, bucket).to(x.dtype)[:, None]
        y = self._rounded(torch.where(y.isnan(), 0.0, y), uniform).clamp_(-self.largest_code, self.largest_code)
        return {"codes": _as_bytes(y.to(self.integer)), "scales": bucket}

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        codes = encoded["codes"].view(self.integer)
        if self.buckets == "row":
            return super().decode({**encoded, "codes": codes}, slot, dtype)
        return codes.to(dtype).mul_(encoded["scales"].to(dtype)[:, None]).reshape(-1, *slot.shape)


def _as_bytes(codes: Tensor) -> Tensor:
    """`[..., n]` -> `[..., 2 n]` uint8 if they have two: gloo and NCCL gather no tensors of int16."""
    return codes if codes.dtype == torch.int8 else codes.contiguous().view(torch.uint8)


class Int8(_Signed):
    """8 bits a number and sign: k max |x| / 127, k = -127 ... 127 (as 8-bit Muon, Gupta et al. 2025).

    With buckets "column" and exact diagonals this is how JAX's Distributed Shampoo keeps momenta.
    """

    kind: Literal["int8"] = "int8"

    @property
    def integer(self) -> torch.dtype:
        return torch.int8


class Int16(_Signed):
    """16 bits a number and sign: k max |x| / 32767, k = -32767 ... 32767.

    With buckets "column" and exact diagonals this is how JAX's Distributed Shampoo keeps statistics and roots.
    """

    kind: Literal["int16"] = "int16"

    @property
    def integer(self) -> torch.dtype:
        return torch.int16


class UInt8(_Linear):
    """8 bits a number >= 0: k max x / 255 or, with compand sqrt, k^2 max x / 255^2 (FlashOptim, 2026, its v).

    What is above 0 keeps a code of at least 1: a second moment that is rounded to 0 would not damp its update any more.
    """

    kind: Literal["uint8"] = "uint8"
    compand: Literal["none", "sqrt"] = Field(default="none", description="Map before rounding; sqrt: finer near 0.")

    @property
    def largest_code(self) -> int:
        return 255

    def unsupported(self, slot: Slot) -> str | None:
        if slot.role != "second_moment":
            return f"a second moment is required by a format without negative values, got a {slot.role}"
        return super().unsupported(slot)

    @property
    def span(self) -> float:
        return 255.0 if self.compand == "none" else 1.0

    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        positive = z.clamp_min_(0).clamp_max(1).ceil_()
        z = z.sqrt_().mul_(255) if self.compand == "sqrt" else z
        found = torch.maximum(self._rounded(z, uniform), positive, out=positive if out is not None else None)
        return found.to(torch.uint8) if out is None else out.copy_(found)

    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        y = (codes.to(dtype) if out is None else out.copy_(codes)).mul_(1 / 255)
        return y.square_() if self.compand == "sqrt" else y
