"""Two codes below 16 in a byte, row by row: rows of odd length end in a half-empty byte, so that none share one."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn.functional import pad

from eigengraft.numerics import may_branch_on_values


def pack_nibbles(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """`[..., n] -> [..., ceil(n / 2)]` uint8, in `out` if it is given; even positions in the low half."""
    codes = codes.to(torch.uint8)
    if codes.shape[-1] % 2:
        codes = pad(codes, (0, 1))
    if may_branch_on_values(codes) and sys.byteorder == "little":  # two bytes at once, of which the low one counts
        pairs = codes.contiguous().view(torch.int16)
        pairs = (pairs >> 4).bitwise_or_(pairs)
        return pairs.to(torch.uint8) if out is None else out.copy_(pairs)
    return torch.add(codes[..., 0::2], codes[..., 1::2], alpha=16)


def unpack_nibbles(stored: Tensor, n: int) -> Tensor:
    """Two codes a byte -> one: `[..., ceil(n / 2)] -> [..., n]` uint8."""
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)[..., :n]
