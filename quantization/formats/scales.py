"""The scales of blocks: in float32, or quantized once more (double quantization, Dettmers et al. 2023, section 3).

A scale 0 says that its block is 0; a scale NaN, that something in the block was not finite or beyond float32.
Legend: s the scales of one row of a stack; 8-bit dynamic codebook: see `codebooks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eigengraft.numerics import per_block
from eigengraft.slots import Encoded

from .codebooks import Codebook, dynamic
from .scale_blocks import block_maxima, map_blocks, multiply_blocks_

BLOCK = 256
_ZERO, _BROKEN = 0, 1
_CODEBOOK = Codebook(dynamic(8)[2:])
"""The dynamic codebook without its two lowest values, whose codes stand for 0 and for NaN."""


def encode_scales(found: Tensor) -> dict[str, Tensor]:
    """max |x| of each block -> the scales in float32."""
    found = found.float()
    return {"scales": torch.where(found.isfinite(), found, torch.nan)}


def encode_scales_twice(found: Tensor) -> dict[str, Tensor]:
    """(s - mean(s)) in 8 bits with one float32 scale for each 256, and mean(s): 1 + 4/256 bytes per scale."""
    s = encode_scales(found)["scales"].flatten(1)
    known = s.isfinite()
    filled = torch.where(known, s, 0.0)
    mean = filled.div(s.shape[1]).sum(1)
    rest = filled - mean[:, None]
    seconds = block_maxima(rest, BLOCK)
    codes = _CODEBOOK.nearest(map_blocks(torch.div, rest, torch.where(seconds > 0, seconds, 1.0), BLOCK)).int() + 2
    codes = torch.where(known, torch.where(s == 0, _ZERO, codes), _BROKEN).to(torch.uint8)
    return {"scales": codes.reshape(found.shape), "second_scales": seconds, "offsets": mean}


def decode_scales(encoded: Encoded) -> Tensor:
    """The tensors of `encode_scales` or `encode_scales_twice` -> float32 scales >= 0."""
    stored = encoded["scales"]
    if stored.dtype != torch.uint8:
        return stored
    codes = stored.flatten(1)
    rest = multiply_blocks_(
        _CODEBOOK.values((codes.int() - 2).clamp_min(0), torch.float32), encoded["second_scales"], BLOCK
    )
    s = (rest + per_block(encoded["offsets"], rest)).clamp_min(0)
    s = torch.where(codes == _ZERO, 0.0, torch.where(codes == _BROKEN, torch.nan, s))
    return s.reshape(stored.shape)
