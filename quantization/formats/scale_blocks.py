"""Blocks of numbers along the last axis that share one scale. The last block of a row may be shorter; no padding.

Legend: n the last axis; B the block size; b = ceil(n / B) blocks in a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def block_count(n: int, size: int) -> int:
    """ceil(n / B), the number of blocks in a row of n."""
    return -(-n // size)


def block_views(x: Tensor, size: int) -> list[Tensor]:
    """Views `[..., k, width]` of `[..., n]`: the full blocks, then the short one, as far as there are any."""
    n = x.shape[-1]
    if n <= size:
        return [x.unsqueeze(-2)]
    full = n - n % size
    views = [x[..., :full].reshape(*x.shape[:-1], -1, size)]
    return views if full == n else [*views, x[..., full:].unsqueeze(-2)]


def block_maxima(x: Tensor, size: int) -> Tensor:
    """max |x| of each block, `[..., n] -> [..., b]`; NaN where a block has one."""
    found = [largest_size(piece, -1) for piece in block_views(x, size)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def largest_size(x: Tensor, dim: int) -> Tensor:
    """max |x| along an axis; two passes that write little take a fifth of the time of the norm."""
    return torch.maximum(x.amax(dim), -x.amin(dim)).abs()


def multiply_blocks_(x: Tensor, scales: Tensor, size: int) -> Tensor:
    """x `[..., n]` times the scale `[..., b]` of each block, in place."""
    start = 0
    for piece in block_views(x, size):
        stop = start + piece.shape[-2]
        piece.mul_(scales[..., start:stop, None])
        start = stop
    return x


def map_blocks(work: Callable[[Tensor, Tensor], Tensor], x: Tensor, scales: Tensor, size: int) -> Tensor:
    """work(x, s) of x `[..., n]` and the scale s `[..., b]` of each block; a fresh, dense tensor."""
    views = block_views(x, size)
    if len(views) == 1:
        return work(views[0], scales[..., None]).flatten(-2)
    result, start = torch.empty_like(x, memory_format=torch.contiguous_format), 0
    for source, target in zip(views, block_views(result, size), strict=True):
        stop = start + source.shape[-2]
        target.copy_(work(source, scales[..., start:stop, None]))
        start = stop
    return result


def even_width(n: int, size: int) -> int:
    """B where a row of n is full blocks of an even B, which can then be worked on as rows of their own; else n."""
    return size if n % size == 0 and size % 2 == 0 else n


def map_blocks_out(work: Callable[..., Tensor], x: Tensor, scales: Tensor, size: int, out: Tensor) -> Tensor:
    """work(x, s, out=...) of x `[..., n]` and the scale s `[..., b]` of each block, in `out`; not to be traced."""
    if x.shape[-1] <= size:
        return work(x, scales, out=out)
    start = 0
    for source, target in zip(block_views(x, size), block_views(out, size), strict=True):
        stop = start + source.shape[-2]
        work(source, scales[..., start:stop, None], out=target)
        start = stop
    return out
