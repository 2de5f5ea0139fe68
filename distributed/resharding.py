"""State on its way between owners and even shares, so that checkpoints know of no rank.

An owner has whole tensors. In a checkpoint a tensor is a DTensor, cut along its first axis over all ranks, as
torch.chunk cuts; one without axes is a plain tensor that every rank has.
Legend: R ranks; n rows of a tensor, of which rank r has those from r ceil(n / R) on, at most ceil(n / R).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .rank_group import RankGroup, as_bytes


@dataclass(frozen=True)
class Entry:
    """One tensor of the state. owner: a rank; None: nobody's, every rank has it or its part of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int | None = None

    def rows(self, rank: int, ranks: int) -> tuple[int, int]:
        """(first, end) of a rank's share."""
        n = self.shape[0]
        size = -(-n // ranks)
        return min(rank * size, n), min((rank + 1) * size, n)

    def share(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The shape of a rank's share."""
        if not self.shape:
            return ()
        first, end = self.rows(rank, ranks)
        return (end - first, *self.shape[1:])


def spread(
    rank_group: RankGroup, entries: Sequence[Entry], owned: Mapping[int, Tensor], mesh: DeviceMesh, device: torch.device
) -> list[Tensor]:
    """What owners have -> every entry as it stands in a checkpoint. owned: this rank's, by index of the entry."""
    ranks, me = rank_group.size, rank_group.rank
    messages: list[list[Tensor]] = [[] for _ in range(ranks)]
    expected = [0] * ranks
    for index, entry in enumerate(entries):
        assert entry.owner is not None
        expected[entry.owner] += math.prod(entry.share(me, ranks)) * entry.dtype.itemsize
        if entry.owner == me:
            for rank in range(ranks):
                value = owned[index]
                messages[rank].append(as_bytes(value[slice(*entry.rows(rank, ranks))] if entry.shape else value))
    data = _swapped(rank_group, messages, expected, device, "state on its way to a checkpoint")
    at = [sum(expected[:rank]) for rank in range(ranks)]
    found = []
    for entry in entries:
        assert entry.owner is not None
        found.append(_shared(entry, _taken(data, at, entry.owner, entry.share(me, ranks), entry.dtype), mesh))
    return found


def collect(
    rank_group: RankGroup, entries: Sequence[Entry], shared: Sequence[Tensor], device: torch.device
) -> dict[int, Tensor]:
    """And back: the entries that this rank owns, whole, by index. shared: plain tensors or DTensors cut as above."""
    ranks, me = rank_group.size, rank_group.rank
    messages: list[list[Tensor]] = [[] for _ in range(ranks)]
    expected = [0] * ranks
    for entry, value in zip(entries, shared, strict=True):
        assert entry.owner is not None
        if isinstance(value, DTensor):
            messages[entry.owner].append(as_bytes(value.to_local()))
            if entry.owner == me:
                for rank in range(ranks):
                    expected[rank] += math.prod(entry.share(rank, ranks)) * entry.dtype.itemsize
    data = _swapped(rank_group, messages, expected, device, "state on its way from a checkpoint")
    at = [sum(expected[:rank]) for rank in range(ranks)]
    found = {}
    for index, (entry, value) in enumerate(zip(entries, shared, strict=True)):
        if entry.owner != me:
            continue
        if isinstance(value, DTensor):
            parts = [_taken(data, at, rank, entry.share(rank, ranks), entry.dtype) for rank in range(ranks)]
            found[index] = torch.cat(parts)
        else:
            found[index] = value
    return found


def _swapped(
    rank_group: RankGroup, messages: Sequence[Sequence[Tensor]], expected: list[int], device: torch.device, what: str
) -> Tensor:
    sizes = [sum(part.numel() for part in own) for own in messages]
    flat = [part.to(device) for own in messages for part in own]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    return rank_group.all_to_all(sent, sizes, expected, what).wait()


def _taken(data: Tensor, at: list[int], rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The next tensor of a rank's message; a copy, because a view in another dtype must begin at a multiple of it."""
    size = math.prod(shape) * dtype.itemsize
    start = at[rank]
    at[rank] += size
    return data[start : start + size].clone().view(dtype).reshape(shape)


def _shared(entry: Entry, part: Tensor, mesh: DeviceMesh) -> Tensor:
    if not entry.shape:
        return part
    stride = [math.prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape))]
    return DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=torch.Size(entry.shape), stride=tuple(stride)
    )
