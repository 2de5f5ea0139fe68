"""Work in pieces that stay in the cache of a CPU; elsewhere, and where code is traced, all at once."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from eigengraft.numerics import may_branch_on_values

CACHE_ELEMENTS = 1 << 17
"""Numbers at a time: a few float32 copies of them fit into a core's own cache, and calls cost little beside work."""


def scratch(name: str, n: int, dtype: torch.dtype) -> Tensor:
    """Numbers `[n]` of any value, which the next call for the same name in the same thread gives again.

    For what a piece needs while it is worked on: fresh memory would cost as much as the work.
    """
    if n > CACHE_ELEMENTS:
        return torch.empty(n, dtype=dtype, device="cpu")
    buffers: dict[str, Tensor] = _BUFFERS.__dict__
    key = f"{name} {dtype}"
    if key not in buffers:
        with torch.inference_mode(False):  # or it could not be written to outside of that mode
            buffers[key] = torch.empty(CACHE_ELEMENTS, dtype=dtype, device="cpu")
    return buffers[key][:n]


_BUFFERS = threading.local()


def look_up(table: Tensor, codes: Tensor, out: Tensor | None = None) -> Tensor:
    """table `[k]`, codes -> values of their shape, in `out` if it is given, else fresh."""
    if not may_branch_on_values(codes):
        return table.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)
    result = table.new_empty(codes.shape) if out is None else out
    source, target = codes.reshape(-1), result.view(-1)
    for start in range(0, len(source), CACHE_ELEMENTS):
        some = source[start : start + CACHE_ELEMENTS]
        places = scratch("places", len(some), torch.int32).copy_(some)
        torch.index_select(table, 0, places, out=target[start : start + CACHE_ELEMENTS])
    return result
