"""The scales of blocks: in float32, or quantized once more (double quantization, Dettmers et al. 2023, section 3).

A scale 0 says that its block is 0; a scale NaN, that something in the block was not finite or beyond float32.
Legend: s the scales of one row of a stack; 8-bit dynamic book: see `code_books`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eigengraft.numerics import per_block
from eigengraft.slots import Parts

from .codebooks import Book, dynamic
from .scale_blocks import count, largest, times_, with_scales

BLOCK = 256
_ZERO, _BROKEN = 0, 1
_BOOK = Book(dynamic(8)[2:])
"""Without its two lowest values, whose codes stand for 0 and for NaN."""


def single(found: Tensor) -> dict[str, Tensor]:
    """max |x| of each block -> what is kept of it."""
    found = found.float()
    return {"scales": torch.where(found.isfinite(), found, torch.nan)}


def double(found: Tensor) -> dict[str, Tensor]:
    """(s - mean(s)) in 8 bits with one float32 scale for each 256, and mean(s): 1 + 4/256 bytes a scale."""
    s = single(found)["scales"].flatten(1)
    known = s.isfinite()
    filled = torch.where(known, s, 0.0)
    mean = filled.div(s.shape[1]).sum(1)
    rest = filled - mean[:, None]
    seconds = largest(rest, BLOCK)
    codes = _BOOK.nearest(with_scales(torch.div, rest, torch.where(seconds > 0, seconds, 1.0), BLOCK)).int() + 2
    codes = torch.where(known, torch.where(s == 0, _ZERO, codes), _BROKEN).to(torch.uint8)
    return {"scales": codes.reshape(found.shape), "second_scales": seconds, "offsets": mean}


def scales(parts: Parts) -> Tensor:
    """What `single` or `double` kept -> float32 scales >= 0."""
    kept = parts["scales"]
    if kept.dtype != torch.uint8:
        return kept
    codes = kept.flatten(1)
    rest = times_(_BOOK.values((codes.int() - 2).clamp_min(0), torch.float32), parts["second_scales"], BLOCK)
    s = (rest + per_block(parts["offsets"], rest)).clamp_min(0)
    s = torch.where(codes == _ZERO, 0.0, torch.where(codes == _BROKEN, torch.nan, s))
    return s.reshape(kept.shape)


def double_bytes(blocks: int) -> int:
    """Bytes of the scales of one row of a stack, coded twice."""
    return blocks + 4 * count(blocks, BLOCK) + 4
