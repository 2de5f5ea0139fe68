"""Resharding of state between the owners of blocks and checkpoints, which do not depend on owners.

An owner holds full tensors. In a checkpoint, a tensor is a DTensor that is cut along its first axis over all ranks, as
torch.chunk cuts. A tensor without axes is a plain tensor on every rank.

Legend: R is the number of ranks, n the number of rows of a tensor. In a checkpoint, rank r holds at most ceil(n / R)
rows, from row r ceil(n / R) on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from eigengraft.numerics import is_dtensor

from .layouts import chunk_length
from .rank_group import RankGroup, as_bytes


@dataclass(frozen=True)
class Entry:
    """One tensor of the state.

    shape: shape of the full tensor.
    dtype: dtype of the tensor.
    owner: rank that holds the full tensor; None: every rank holds the full tensor or a shard of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int | None = None

    def rows(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return (first, end) of the rows that a rank has in a checkpoint."""
        n = self.shape[0]
        size = chunk_length(n, ranks)
        return min(rank * size, n), min((rank + 1) * size, n)

    def shard_shape(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the shape of the shard that a rank has in a checkpoint."""
        if not self.shape:
            return ()
        first, end = self.rows(rank, ranks)
        return (end - first, *self.shape[1:])


def spread(
    rank_group: RankGroup, entries: Sequence[Entry], owned: Mapping[int, Tensor], mesh: DeviceMesh, device: torch.device
) -> list[Tensor]:
    """Send entries from their owners to the shards of a checkpoint. Return the shards of this rank as DTensors.

    owned: full tensors of this rank, by index of the entry.
    """
    ranks, me = rank_group.size, rank_group.rank
    messages: list[list[Tensor]] = [[] for _ in range(ranks)]
    expected = [0] * ranks
    for index, entry in enumerate(entries):
        assert entry.owner is not None
        expected[entry.owner] += math.prod(entry.shard_shape(me, ranks)) * entry.dtype.itemsize
        if entry.owner == me:
            for rank in range(ranks):
                value = owned[index]
                messages[rank].append(as_bytes(value[slice(*entry.rows(rank, ranks))] if entry.shape else value))
    data = _exchange(rank_group, messages, expected, device, "state on its way to a checkpoint")
    at = [sum(expected[:rank]) for rank in range(ranks)]
    found = []
    for entry in entries:
        assert entry.owner is not None
        found.append(
            _as_dtensor(entry, _next_tensor(data, at, entry.owner, entry.shard_shape(me, ranks), entry.dtype), mesh)
        )
    return found


def collect(
    rank_group: RankGroup, entries: Sequence[Entry], saved: Sequence[Tensor], device: torch.device
) -> dict[int, Tensor]:
    """Send the shards of a checkpoint to owners. Return the full tensors of this rank's entries, by index.

    saved: plain tensors, or DTensors that are cut by rows.
    """
    ranks, me = rank_group.size, rank_group.rank
    messages: list[list[Tensor]] = [[] for _ in range(ranks)]
    expected = [0] * ranks
    for entry, value in zip(entries, saved, strict=True):
        assert entry.owner is not None
        if is_dtensor(value):
            messages[entry.owner].append(as_bytes(value.to_local()))
            if entry.owner == me:
                for rank in range(ranks):
                    expected[rank] += math.prod(entry.shard_shape(rank, ranks)) * entry.dtype.itemsize
    data = _exchange(rank_group, messages, expected, device, "state on its way from a checkpoint")
    at = [sum(expected[:rank]) for rank in range(ranks)]
    found = {}
    for index, (entry, value) in enumerate(zip(entries, saved, strict=True)):
        if entry.owner != me:
            continue
        if is_dtensor(value):
            shards = [
                _next_tensor(data, at, rank, entry.shard_shape(rank, ranks), entry.dtype) for rank in range(ranks)
            ]
            found[index] = torch.cat(shards)
        else:
            found[index] = value
    return found


def _exchange(
    rank_group: RankGroup, messages: Sequence[Sequence[Tensor]], expected: list[int], device: torch.device, what: str
) -> Tensor:
    """Exchange bytes between all ranks. Return the bytes that this rank receives.

    messages: bytes for each rank.
    expected: number of bytes from each rank.
    """
    sizes = [sum(message.numel() for message in own) for own in messages]
    flat = [message.to(device) for own in messages for message in own]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    return rank_group.all_to_all(sent, sizes, expected, what).wait()


def _next_tensor(data: Tensor, at: list[int], rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a copy of the next tensor of a rank's message.

    It is copied because a view in another dtype must begin at a multiple of that dtype's size.

    at: for each rank, the index of the first byte that was not read yet; updated.
    """
    size = math.prod(shape) * dtype.itemsize
    start = at[rank]
    at[rank] += size
    return data[start : start + size].clone().view(dtype).reshape(shape)


def _as_dtensor(entry: Entry, shard: Tensor, mesh: DeviceMesh) -> Tensor:
    if not entry.shape:
        return shard
    stride = [math.prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape))]
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(
        shard, mesh, [Shard(0)], run_check=False, shape=torch.Size(entry.shape), stride=tuple(stride)
    )
