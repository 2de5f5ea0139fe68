"""Linear formats, whose codes stand for equally spaced numbers.

Legend: Q is the largest code: 127, 255 or 32767. The codes -128 and -32768 are not used, so that signed codes are
symmetric.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.slots import Encoded, Slot, Uniform

from .base import Blockwise, largest_size


class LinearFormat(Blockwise, ABC):
    """The code of a number is round(z) with z = Q y, where Q is the largest code, and y is the number divided by the
    scale of its block.

    Numbers are rounded to nearest, ties to even, or stochastically without bias.
    """

    rounding: Literal["nearest", "stochastic"] = Field(default="nearest", description="How codes are rounded.")

    @property
    def draws(self) -> bool:
        return self.rounding == "stochastic"

    @property
    @abstractmethod
    def largest_code(self) -> int:
        """The largest code Q."""

    @property
    def span(self) -> float:
        return float(self.largest_code)

    def rounded(self, y: Tensor, uniform: Uniform | None) -> Tensor:
        """Return y rounded to whole numbers, to nearest or stochastically. y may be overwritten.

        uniform: function that draws random numbers in [0, 1); None: numbers are rounded to nearest.
        """
        if self.draws and uniform is not None:
            below = y.floor()  # floor(y + u) would sometimes raise a whole number y, because the sum is rounded
            return below.add_(1 - uniform(y, "rounding") <= y - below).clamp_max_(self.largest_code)
        return y.round_()


class _Signed(LinearFormat, ABC):
    """Signed codes from -Q to Q. The values of two adjacent codes differ by max |x| / Q, called the bucket size.

    With `buckets: column`, as in Distributed Shampoo in JAX (`quantization_utils`), the maximum is over the first axis.
    Each column then has one bucket size, which is stored as its scale.
    """

    buckets: Literal["row", "column"] = Field(
        default="row", description="Numbers that share a scale: `block_size` numbers of a row, or a column."
    )

    @model_validator(mode="after")
    def _columns_have_one_scale(self) -> Self:
        if self.buckets == "column" and self.scale == "double":
            raise ValueError("scale: 'double' cannot be combined with buckets 'column'; remove one of the two")
        if self.buckets == "column" and self.block_size != type(self).model_fields["block_size"].default:
            raise ValueError(
                f"block_size: {self.block_size} cannot be combined with buckets 'column', which have no blocks; remove "
                "one of the two"
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
        rounded = self.rounded(z, uniform)
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
        y = self.rounded(y.nan_to_num_(0.0, math.inf, -math.inf), uniform).clamp_(-self.largest_code, self.largest_code)
        return {"codes": _as_bytes(y.to(self.integer)), "scales": bucket}

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        codes = encoded["codes"].view(self.integer)
        if self.buckets == "row":
            return super().decode({**encoded, "codes": codes}, slot, dtype)
        return codes.to(dtype).mul_(encoded["scales"].to(dtype)[:, None]).reshape(-1, *slot.shape)


def _as_bytes(codes: Tensor) -> Tensor:
    """Return int8 codes unchanged, and int16 codes `[..., n]` as bytes `[..., 2 n]` uint8.

    int16 codes are stored as bytes because gloo and NCCL cannot gather int16 tensors.
    """
    return codes if codes.dtype == torch.int8 else codes.contiguous().view(torch.uint8)


class Int8(_Signed):
    """8 bits for a signed number: code k = -127 ... 127 stands for k max |x| / 127 (as in 8-bit Muon, Gupta et al.
    2025).

    max |x| is the largest size of a number in a block or column. With `buckets: column`, inside `exact_diagonal`, this
    is the storage of momenta in Distributed Shampoo in JAX.
    """

    kind: Literal["int8"] = "int8"

    @property
    def integer(self) -> torch.dtype:
        return torch.int8


class Int16(_Signed):
    """16 bits for a signed number: code k = -32767 ... 32767 stands for k max |x| / 32767.

    max |x| is the largest size of a number in a block or column. Distributed Shampoo in JAX stores statistics and roots
    as `exact_diagonal` with this quantizer inside, and with `buckets: column`.
    """

    kind: Literal["int16"] = "int16"

    @property
    def integer(self) -> torch.dtype:
        return torch.int16
