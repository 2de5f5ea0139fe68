"""Blocks with the entries of an axis in another order."""

from __future__ import annotations

import torch
from torch import Tensor


def reordered(x: Tensor, axis: int, order: Tensor) -> Tensor:
    """x `[N, *block]`, its entries along an axis of the block in the order `[N, d]`, d or fewer places.

    On a CPU large blocks are taken one by one: `gather` takes up to eight times as long.
    """
    if x.device.type == "cpu" and x.shape[1:].numel() >= _ONE_BY_ONE:
        out = x.new_empty(*x.shape[: axis + 1], order.shape[1], *x.shape[axis + 2 :])
        for target, source, places in zip(out.unbind(0), x.unbind(0), order.unbind(0), strict=True):
            torch.index_select(source, axis, places, out=target)
        return out
    index = order.reshape(-1, *(order.shape[1] if place == axis else 1 for place in range(x.ndim - 1)))
    return x.gather(axis + 1, index.expand(*x.shape[: axis + 1], -1, *x.shape[axis + 2 :]))


_ONE_BY_ONE = 1 << 12
"""Entries from which on a block is worth a kernel of its own (measured)."""
