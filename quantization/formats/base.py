"""The two bases of formats: `Format` stores each number separately, `Blockwise` stores blocks that share a scale.

A scale is stored in float32, or is quantized too (double quantization, Dettmers et al. 2023, section 3). A scale of 0
means that all numbers of its block are 0. A scale of NaN means that a number of the block was not finite or beyond
float32.

Legend: B is the number of numbers in a block; b is the number of blocks in a row of n numbers; s are the scales of one
row of a stack.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import may_branch_on_values, per_block
from eigengraft.slots import Encoded, Slot, Uniform

from ..base import Quantizer
from .codebooks import CACHE_ELEMENTS, Codebook, dynamic, scratch

_LEAST_ROW = 16
"""Length in numbers below which rows are joined. A scale has as many bytes as four codes of 8 bits. In short rows, such
as pairs of real and imaginary parts or kernels of convolutions, scales would take more bytes than codes. In rows of 16
numbers they take a quarter of the codes' bytes."""


def joined_axes(shape: Sequence[int], size: int) -> int:
    """Return the number of last axes of a slot that are flattened to one row, in which blocks are then formed.

    A row should have at least 16 numbers, or at least one block if a block has fewer than 16 numbers. The result is the
    least number of axes that gives such a row, at least 1. If the slot has too few numbers, the result is the number of
    its axes.

    shape: shape of the slot.
    size: number of numbers in a block.
    """
    axes, n = 0, 1
    while axes < len(shape) and (axes == 0 or n < min(_LEAST_ROW, size)):
        axes += 1
        n *= shape[-axes]
    return axes


def block_count(n: int, size: int) -> int:
    """Return ceil(n / B), the number of blocks of B numbers in a row of n numbers. The last block may be shorter.

    size: B.
    """
    return -(-n // size)


def block_views(x: Tensor, size: int) -> list[Tensor]:
    """Return views `[..., k, width]` of x `[..., n]`: one view of all full blocks, and one view of the last block if it
    is shorter.

    size: number of numbers in a full block.
    """
    n = x.shape[-1]
    if n <= size:
        return [x.unsqueeze(-2)]
    full = n - n % size
    views = [x[..., :full].reshape(*x.shape[:-1], -1, size)]
    return views if full == n else [*views, x[..., full:].unsqueeze(-2)]


def block_maxima(x: Tensor, size: int) -> Tensor:
    """Return max |x| of each of the b blocks in a row, `[..., n] -> [..., b]`; NaN if a block contains NaN.

    size: number of numbers in a block.
    """
    found = [largest_size(piece, -1) for piece in block_views(x, size)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def largest_size(x: Tensor, dim: int) -> Tensor:
    """Return max |x| along the axis `dim`.

    The result is computed by two reductions, which take a fifth of the time of torch's maximum norm.
    """
    return torch.maximum(x.amax(dim), -x.amin(dim)).abs()


def multiply_blocks_(x: Tensor, scales: Tensor, size: int) -> Tensor:
    """Multiply each block of x `[..., n]` by its scale, in place, and return x.

    scales: `[..., b]`, one for each block.
    size: number of numbers in a block.
    """
    return map_blocks_(Tensor.mul_, x, scales, size)


def multiplied_blocks(x: Tensor, scales: Tensor, size: int) -> Tensor:
    """Return x `[..., n]` with each block multiplied by its scale, as a new contiguous tensor.

    scales: `[..., b]`, one for each block.
    size: number of numbers in a block.
    """
    views = block_views(x, size)
    if len(views) == 1:
        return views[0].mul(scales[..., None]).flatten(-2)
    return multiply_blocks_(x.clone(memory_format=torch.contiguous_format), scales, size)


def map_blocks_(work: Callable[[Tensor, Tensor], object], x: Tensor, scales: Tensor, size: int) -> Tensor:
    """Apply a function to each block of x `[..., n]` and the scale of the block, in place, and return x.

    work: function that changes blocks `[..., k, width]` in place. Its second argument are their scales `[..., k, 1]`.
    scales: `[..., b]`, one for each block.
    size: number of numbers in a block.
    """
    start = 0
    for piece in block_views(x, size):
        stop = start + piece.shape[-2]
        work(piece, scales[..., start:stop, None])
        start = stop
    return x


def even_width(n: int, size: int) -> int:
    """Return the width of the parts into which rows of n numbers can be cut, such that a format can encode and decode
    each part without the rest of its row.

    A row consists of blocks of `size` numbers; the last block may be shorter. If no block is shorter and `size` is
    even, each block can be a part, and the result is `size`. Two codes that share a byte are then codes of the same
    block. In all other cases a row cannot be cut, and the result is n.
    """
    return size if n % size == 0 and size % 2 == 0 else n


def map_blocks_out(work: Callable[..., Tensor], x: Tensor, scales: Tensor, size: int, out: Tensor) -> Tensor:
    """Apply a function to each block of x `[..., n]` and the scale of the block. Write the results to `out`, and return
    it.

    A traced program cannot use this function, because it writes to views.

    work: function of blocks `[..., k, width]` and their scales `[..., k, 1]`, with a parameter `out` for the tensor
        that the results are written to.
    scales: `[..., b]`, one for each block.
    size: number of numbers in a block.
    """
    if x.shape[-1] <= size:
        return work(x, scales, out=out)
    start = 0
    for source, target in zip(block_views(x, size), block_views(out, size), strict=True):
        stop = start + source.shape[-2]
        work(source, scales[..., start:stop, None], out=target)
        start = stop
    return out


SECOND_BLOCK = 256
"""Number of scales that share a second scale: 256, as in the paper on double quantization."""
_ZERO, _BROKEN = 0, 1
"""Codes that stand for a scale of 0 and for a scale that is not finite."""
_CODEBOOK = Codebook(dynamic(8)[2:])
"""The dynamic codebook without its two lowest levels, so that two codes are free for 0 and NaN."""


def encode_scales(found: Tensor) -> dict[str, Tensor]:
    """Return {"scales": the scales of blocks as float32}, with NaN in place of scales that are not finite.

    found: max |x| of each block, `[N, ..., b]`.
    """
    found = found.float()
    return {"scales": torch.where(found.isfinite(), found, torch.nan)}


def encode_scales_twice(found: Tensor) -> dict[str, Tensor]:
    """Return the scales s quantized to 8 bits, as three tensors by name.

    scales: codes of s - mean(s), with the mean over all scales of a row of the stack.
    second_scales: a float32 scale for each 256 codes.
    offsets: mean(s), `[N]`.

    A scale is stored in 1 + 4/256 bytes.

    found: max |x| of each block, `[N, ..., b]`.
    """
    s = encode_scales(found)["scales"].flatten(1)
    known = s.isfinite()
    filled = torch.where(known, s, 0.0)
    mean = filled.div(s.shape[1]).sum(1)
    rest = filled - mean[:, None]
    seconds = block_maxima(rest, SECOND_BLOCK)
    rest = map_blocks_(Tensor.div_, rest, torch.where(seconds > 0, seconds, 1.0), SECOND_BLOCK)
    codes = _CODEBOOK.nearest(rest).int() + 2
    codes = torch.where(known, torch.where(s == 0, _ZERO, codes), _BROKEN).to(torch.uint8)
    return {"scales": codes.reshape(found.shape), "second_scales": seconds, "offsets": mean}


def decode_scales(encoded: Encoded) -> Tensor:
    """Return the float32 scales >= 0 that `encode_scales` or `encode_scales_twice` stored."""
    stored = encoded["scales"]
    if stored.dtype != torch.uint8:
        return stored
    codes = stored.flatten(1)
    rest = multiply_blocks_(
        _CODEBOOK.values((codes.int() - 2).clamp_min(0), torch.float32), encoded["second_scales"], SECOND_BLOCK
    )
    s = (rest + per_block(encoded["offsets"], rest)).clamp_min(0)
    s = torch.where(codes == _ZERO, 0.0, torch.where(codes == _BROKEN, torch.nan, s))
    return s.reshape(stored.shape)


class Format(Quantizer, ABC):
    """A quantizer of floating-point numbers, for slots with at least `min_elements` entries."""

    min_elements: int = Field(default=1, ge=1, description="Smallest number of entries of a slot that is quantized.")

    def unsupported(self, slot: Slot) -> str | None:
        floating = slot.dtype is None or slot.dtype.is_floating_point
        if slot.role in ("count", "failures", "pending") or not floating:
            return f"only slots of floating-point numbers can be quantized, got a {slot.role} of dtype {slot.dtype}"
        if math.prod(slot.shape) < self.min_elements:
            least = f"at least {self.min_elements} elements (min_elements)"
            return f"only slots with {least} are quantized, got shape {slot.shape}"
        return None


class Blockwise(Format, ABC):
    """y = x / s  with  s = max |x| over each block of B numbers along the last axis (the last block may be shorter).

    If the last axis has fewer than 16 numbers (pairs of real and imaginary parts, kernels of convolutions), blocks are
    along the last two or more axes together, flattened to rows of at least 16 numbers.
    x are the numbers of a block, and s is the scale of the block. Codes are computed by rounding z = x (span / s),
    where `span` depends on the format; z is in [-span, span] up to rounding errors. A block of zeros has s = 0 and is
    decoded as zeros. A block with a number that is not finite, or is beyond float32, is decoded as NaN; other blocks
    are not affected.
    """

    block_size: int = Field(default=256, ge=1, description="Numbers along the last axis that share a scale, B.")
    min_elements: int = Field(
        default=4096,
        ge=1,
        description="Smallest number of entries of a slot that is quantized; smaller slots are stored unchanged.",
    )
    scale: Literal["float32", "double"] = Field(
        default="float32", description="How scales are stored; double: in 8 bits, as differences from their mean."
    )

    @property
    def draws(self) -> bool:
        """True if the format rounds stochastically. A stack is then encoded in one piece, because its random numbers
        are drawn at once.
        """
        return False

    @property
    def span(self) -> float:
        """Absolute value to which the largest number of a block is scaled before rounding."""
        return 1.0

    @abstractmethod
    def codes(self, z: Tensor, uniform: Uniform | None, out: Tensor | None = None) -> Tensor:
        """Return the codes of z `[N, ..., n]`, numbers that are scaled to [-span, span]. The call may overwrite z.

        uniform: function that draws random numbers in [0, 1); None: values are rounded to nearest.
        out: tensor in the shape of the result that the codes may be written to; None for a new tensor. Use the returned
            tensor, because a format may return a new one.
        """

    @abstractmethod
    def values(self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the values `[N, ..., n]` in [-1, 1] that codes stand for. The caller multiplies these values by the
        scales of their blocks.

        n: length of a row of values.
        out: tensor in the shape of the result that the values may be written to; None for a new tensor. Use the
            returned tensor, because a format with two codes in a byte returns a new one if n is odd.
        """

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        axes = joined_axes(x.shape[1:], self.block_size)
        rows = x.flatten(-axes) if axes else x[:, None]
        found, drawn = block_maxima(rows, self.block_size).float(), uniform if self.draws else None
        at_once = may_branch_on_values(x) and drawn is None
        if at_once and self.scale == "float32" and _ordinary(found):
            return {"codes": self._piece_by_piece(rows.detach(), (self.span / found).to(x.dtype)), "scales": found}
        stored = encode_scales(found) if self.scale == "float32" else encode_scales_twice(found)
        s = decode_scales(stored)
        s = torch.where(s == 0, 1.0, s)
        if at_once and _ordinary(s):
            return {"codes": self._piece_by_piece(rows.detach(), (self.span / s).to(x.dtype)), **stored}
        # where 1 / scale would over- or underflow, numbers and scale are first multiplied by a power of two, `move`
        move = torch.where(s < 1 / _FAR, _FAR, torch.where(s > _FAR, 1 / _FAR, 1.0))
        factors = self.span / (s * move)
        z = multiplied_blocks(rows, move.to(x.dtype), self.block_size)
        z = multiply_blocks_(z, factors.to(x.dtype), self.block_size)
        z = self._bounded(z.nan_to_num_(0.0, math.inf, -math.inf))
        return {"codes": self.codes(z, drawn), **stored}

    def _piece_by_piece(self, rows: Tensor, factors: Tensor) -> Tensor:
        """Return the codes of `rows` `[..., n]`, after each block was multiplied by its factor.

        A few rows are processed at a time, so that the products stay in a CPU's cache until they are encoded.

        factors: `[..., b]`, for each of the b blocks of a row the factor that scales its numbers to [-span, span].
        """
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
        """Clamp scaled numbers in place to [-span, span], the range of the codes, and return them.

        Numbers exceed the range only if scales are themselves rounded (`scale: double`), because a rounded scale may be
        too small.
        """
        return z.clamp_(-self.span, self.span) if self.scale == "double" else z

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        axes, codes = joined_axes(slot.shape, self.block_size), encoded["codes"]
        n = math.prod(slot.shape[len(slot.shape) - axes :])
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
"""Scales in [1 / _FAR, _FAR] are ordinary: their reciprocals, times any span, neither over- nor underflow in float32.
"""


def _ordinary(s: Tensor) -> bool:
    """Return True if there are scales, and all of them are in [1 / _FAR, _FAR], so that 1 / s neither over- nor
    underflows.

    s: scales of blocks, of any shape.
    """
    if s.numel() == 0:
        return False
    low, high = torch.aminmax(s)
    return float(low) >= 1 / _FAR and float(high) <= _FAR
