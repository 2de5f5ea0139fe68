"""Resharding of state between the owners of blocks and checkpoints, which do not depend on owners.

An owner holds full tensors. In a checkpoint, a tensor is a DTensor that is cut along its first axis over all ranks, as
torch.chunk cuts. A tensor without axes is a plain tensor on every rank.

Legend: R is the number of ranks, n the number of rows of a tensor. In a checkpoint, rank r holds at most ceil(n / R)
rows, from row r ceil(n / R) on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from eigengraft.blocking.blocks import Box
from eigengraft.numerics import is_dtensor

from .layouts import Layout, whole_box
from .rank_group import RankGroup, as_bytes


@dataclass(frozen=True)
class Entry:
    """Shape, dtype and owner of one tensor of the state.

    shape: shape of the full tensor.
    dtype: dtype of the tensor.
    owner: rank that holds the full tensor; None: every rank holds the full tensor or a shard of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int | None = None

    def box(self, rank: int, ranks: int) -> Box:
        """Return the index range, along each axis of the full tensor, of a rank's shard in a checkpoint.

        rank: number of the rank whose shard is returned.
        ranks: number of ranks among which the tensor is cut by rows.
        """
        return Layout.by_rows(self.shape, ranks).boxes[rank] if self.shape else whole_box(())

    def nbytes(self, rank: int, ranks: int) -> int:
        """Return the size in bytes of the shard that a rank has in a checkpoint.

        ranks: number of ranks among which the tensor is cut.
        """
        return self.box(rank, ranks).numel * self.dtype.itemsize

    def shard(self, data: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the shard that a rank has in a checkpoint, made from its bytes.

        The bytes are copied, because a view in another dtype must begin at a multiple of that dtype's size.

        data: uint8 `[n]`, the bytes of the shard.
        ranks: number of ranks among which the tensor is cut.
        """
        return data.clone().view(self.dtype).reshape(self.box(rank, ranks).shape)


def spread(
    rank_group: RankGroup, entries: Sequence[Entry], owned: Mapping[int, Tensor], mesh: DeviceMesh, device: torch.device
) -> list[Tensor]:
    """Cut state tensors for a checkpoint, and send the shards from the owners. Return this rank's shards as DTensors.

    rank_group: the ranks that own the tensors, and among which each tensor is cut.
    entries: shape, dtype and owner of each tensor.
    owned: the full tensors that this rank owns, by index in `entries`.
    mesh: device mesh of the ranks, for the DTensors.
    device: device of the messages and of the shards.
    """
    ranks, me = rank_group.size, rank_group.rank
    messages: list[list[Tensor]] = [[] for _ in range(ranks)]
    expected: list[list[int]] = [[] for _ in range(ranks)]
    for index, entry in enumerate(entries):
        assert entry.owner is not None
        expected[entry.owner].append(entry.nbytes(me, ranks))
        if entry.owner == me:
            for rank in range(ranks):
                messages[rank].append(as_bytes(owned[index][entry.box(rank, ranks).within(whole_box(entry.shape))]))
    data = _exchange(rank_group, messages, expected, device, "state on its way to a checkpoint")
    owners = [entry.owner for entry in entries if entry.owner is not None]
    pairs = zip(entries, owners, strict=True)
    return [_as_dtensor(entry, entry.shard(next(data[owner]), me, ranks), mesh) for entry, owner in pairs]


def collect(
    rank_group: RankGroup, entries: Sequence[Entry], saved: Sequence[Tensor], device: torch.device
) -> dict[int, Tensor]:
    """Send the shards of loaded state tensors to the owners. Return the full tensors that this rank owns, by index.

    rank_group: the ranks that own the tensors, and among which DTensors are cut.
    entries: shape, dtype and owner of each tensor.
    saved: the tensors as a checkpoint has them: plain tensors, or DTensors that are cut by rows.
    device: device of the messages.
    """
    ranks, me = rank_group.size, rank_group.rank
    messages: list[list[Tensor]] = [[] for _ in range(ranks)]
    expected: list[list[int]] = [[] for _ in range(ranks)]
    for entry, value in zip(entries, saved, strict=True):
        assert entry.owner is not None
        if is_dtensor(value):
            messages[entry.owner].append(as_bytes(value.to_local()))
            if entry.owner == me:
                for rank in range(ranks):
                    expected[rank].append(entry.nbytes(rank, ranks))
    data = _exchange(rank_group, messages, expected, device, "state on its way from a checkpoint")
    found = {}
    for index, (entry, value) in enumerate(zip(entries, saved, strict=True)):
        if entry.owner == me:
            sharded = is_dtensor(value)
            found[index] = (
                torch.cat([entry.shard(next(own), rank, ranks) for rank, own in enumerate(data)]) if sharded else value
            )
    return found


def gather(
    rank_group: RankGroup, layouts: Sequence[Layout], shards: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """Gather sharded tensors on all ranks, in one collective. Return the full tensors.

    If several ranks hold the same entries, only the rank in the first replica sends them.

    layouts: the layout of each tensor.
    shards: the shards of this rank.
    device: device of the message and of the full tensors.
    """
    pairs = list(zip(layouts, shards, strict=True))
    sizes = [
        [0 if layout.replicas[rank] else layout.boxes[rank].numel * shard.element_size() for layout, shard in pairs]
        for rank in range(rank_group.size)
    ]
    first = [as_bytes(shard).to(device) for layout, shard in pairs if not layout.replicas[rank_group.rank]]
    sent = torch.cat(first) if first else torch.empty(0, dtype=torch.uint8, device=device)
    received = rank_group.all_gather_uneven(sent, [*map(sum, sizes)], "full tensors").wait()
    data = [torch.split(part, own) for part, own in zip(received, sizes, strict=True)]
    found = []
    for index, (layout, shard) in enumerate(pairs):
        full = shard.new_empty(layout.shape, device=device)
        for box, replica, parts in zip(layout.boxes, layout.replicas, data, strict=True):
            if not replica:
                # a view in another dtype must begin at a multiple of that dtype's size
                full[box.within(whole_box(layout.shape))] = parts[index].clone().view(shard.dtype).view(box.shape)
        found.append(full)
    return found


def _exchange(
    rank_group: RankGroup,
    messages: Sequence[Sequence[Tensor]],
    expected: Sequence[Sequence[int]],
    device: torch.device,
    what: str,
) -> list[Iterator[Tensor]]:
    """Send tensors of bytes to all ranks. Return, for each rank, the tensors of bytes that this rank receives from it.

    messages: for each rank, the tensors of bytes that are sent to it.
    expected: for each rank, the number of bytes of each tensor that is received from it.
    what: name of the collective in errors.
    """
    sizes = [sum(message.numel() for message in own) for own in messages]
    flat = [message.to(device) for own in messages for message in own]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    received = rank_group.all_to_all(sent, sizes, [*map(sum, expected)], what).wait()
    parts = torch.split(received, [*map(sum, expected)])
    return [iter(torch.split(part, list(own))) for part, own in zip(parts, expected, strict=True)]


def _as_dtensor(entry: Entry, shard: Tensor, mesh: DeviceMesh) -> Tensor:
    if not entry.shape:
        return shard
    stride = [math.prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape))]
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(
        shard, mesh, [Shard(0)], run_check=False, shape=torch.Size(entry.shape), stride=tuple(stride)
    )
