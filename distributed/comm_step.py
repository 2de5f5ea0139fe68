"""Communication of one step: gradients to the owners of blocks and updates back, as a `CommPlan` says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .comm_plan import Bucket, CommPlan, Transfer
from .rank_group import Work


class CommStep:
    """Messages of one step. Every rank calls `send` for the same things, then `gather` and `deliver` for each block
    group that it owns blocks of, then `close`.

    Updates of a bucket are sent as soon as its last block group is delivered, in the order of the buckets, so that they
    travel while the next bucket is computed.
    """

    def __init__(self, comm_plan: CommPlan) -> None:
        self.comm_plan = comm_plan
        self._arriving: dict[str, list[Work]] = {}
        self._arrived: dict[tuple[str, int], Tensor] = {}
        self._updates: dict[int, Tensor] = {}
        self._returning: list[Work] = []

    def send(self, local: Sequence[Tensor | None], source: str) -> None:
        """Starts to send this rank's shards of tensors, by position of the parameter, to the owners of blocks.

        source: what the tensors are, for `gather` and for errors.
        """
        self._arriving[source] = [self._send_bucket(bucket, local, source) for bucket in self.comm_plan.buckets]

    def carries(self, source: str) -> bool:
        """Whether that was sent; if not, every rank holds all of it."""
        return source in self._arriving

    def _send_bucket(self, bucket: Bucket, local: Sequence[Tensor | None], source: str) -> Work:
        plan, me = self.comm_plan, self.comm_plan.rank_group.rank
        first = plan.block_groups[bucket.groups[0]]
        out = torch.empty(sum(map(_numel, bucket.sent)), dtype=first.gradient_dtype, device=first.device)
        targets, sources = [], []
        for transfer, target in zip(_flat(bucket.sent), _stretches(out, _flat(bucket.sent)), strict=True):
            shard = local[transfer.block.position]
            if shard is not None:
                targets.append(target)
                sources.append(transfer.region.in_shard(shard, plan.layouts[transfer.block.position].boxes[me]))
        _copy(targets, sources)
        sending, receiving = [_numel(own) for own in bucket.sent], [_numel(own) for own in bucket.received]
        return plan.rank_group.all_to_all(out, sending, receiving, self._label(bucket, source))

    def gather(self, group: int, source: str) -> Tensor:
        """The blocks `[n, *block]` of a block group that this rank owns, from the shards that were sent."""
        if (source, group) not in self._arrived:
            index = self.comm_plan.bucket_of[group]
            bucket, data = self.comm_plan.buckets[index], self._arriving[source][index].wait()
            stacks = {own: self.comm_plan.empty(own) for own in bucket.groups}
            transfers = _flat(bucket.received)
            _copy(_block_views(transfers, stacks), list(_stretches(data, transfers)))
            self._arrived.update({(source, own): stack for own, stack in stacks.items()})
        return self._arrived[source, group]

    def deliver(self, group: int, rows: Tensor | None, directions: Tensor) -> None:
        """Takes the directions of some rows of a block group; rows: None for all."""
        if rows is None:
            self._updates[group] = directions
            return
        if group not in self._updates:
            self._updates[group] = self.comm_plan.empty(group)
        self._updates[group].index_copy_(0, rows, directions)

    def send_updates(self, before: int) -> None:
        """Sends the updates of buckets whose block groups all have numbers below `before`: nothing more is delivered
        for these."""
        for bucket in self.comm_plan.buckets[len(self._returning) :]:
            if bucket.groups[-1] >= before:
                break
            self._returning.append(self._return_bucket(bucket))

    def _delivered(self, group: int) -> Tensor:
        """The directions that were delivered; rows without one are left uninitialized, no rank uses them."""
        return self._updates.pop(group) if group in self._updates else self.comm_plan.empty(group)

    def _return_bucket(self, bucket: Bucket) -> Work:
        plan, label = self.comm_plan, self._label(bucket, "updates")
        stacks = {group: self._delivered(group) for group in bucket.groups}
        first = plan.block_groups[bucket.groups[0]]
        if plan.replicated:
            out = torch.empty(self._longest(bucket), dtype=first.update_dtype, device=first.device)
            at = 0
            for stack in stacks.values():
                out[at : at + stack.numel()].view(stack.shape).copy_(stack)
                at += stack.numel()
            return plan.rank_group.all_gather(out, label)
        transfers = _flat(bucket.owned)
        out = torch.empty(_numel(transfers), dtype=first.update_dtype, device=first.device)
        _copy(list(_stretches(out, transfers)), _block_views(transfers, stacks))
        sending, receiving = [_numel(own) for own in bucket.owned], [_numel(own) for own in bucket.held]
        return plan.rank_group.all_to_all(out, sending, receiving, label)

    def _longest(self, bucket: Bucket) -> int:
        """Entries of a bucket that the rank with the most of them owns."""
        loads = [0] * self.comm_plan.rank_group.size
        for group in bucket.groups:
            for block in self.comm_plan.block_groups[group].blocks:
                loads[block.owner] += math.prod(block.grid.tile)
        return max(loads)

    def close(self) -> dict[int, Tensor]:
        """Waits for all messages; returns the updates of this rank's shards, by position of the parameter."""
        self.send_updates(len(self.comm_plan.block_groups))
        for arriving in self._arriving.values():  # taken or not: a message must not outlive its buffers
            for work in arriving:
                work.wait()
        updates: dict[int, Tensor] = {}
        for bucket, work in zip(self.comm_plan.buckets, self._returning, strict=True):
            if self.comm_plan.replicated:
                self._receive_gathered(bucket, work.wait(), updates)
            else:
                self._receive(bucket, work.wait(), updates)
        return updates

    def _receive(self, bucket: Bucket, data: Tensor, updates: dict[int, Tensor]) -> None:
        """Copies the updates of a bucket `[n]` from their owners into the updates of this rank's shards."""
        plan, me = self.comm_plan, self.comm_plan.rank_group.rank
        transfers, targets = _flat(bucket.held), []
        for transfer in transfers:
            position, group = transfer.block.position, plan.block_groups[transfer.group]
            box = plan.layouts[position].boxes[me]
            if position not in updates:
                updates[position] = torch.empty(box.shape, dtype=group.dtype, device=group.device)
            targets.append(transfer.region.in_shard(updates[position], box))
        _copy(targets, list(_stretches(data, transfers)))

    def _receive_gathered(self, bucket: Bucket, data: Tensor, updates: dict[int, Tensor]) -> None:
        """Copies the updates of a bucket `[R, longest]` into the updates of parameters that every rank holds."""
        targets, sources, ends = [], [], [0] * self.comm_plan.rank_group.size
        for group in (self.comm_plan.block_groups[index] for index in bucket.groups):
            for block in sorted(group.blocks, key=lambda one: (one.owner, one.row)):
                grid, at = block.grid, ends[block.owner]
                ends[block.owner] = at + math.prod(grid.tile)
                source = data[block.owner, at : ends[block.owner]].view(grid.tile)
                if grid.is_parameter and data.dtype == group.dtype:
                    updates[block.position] = source
                    continue
                if block.position not in updates:
                    updates[block.position] = torch.empty(grid.merged, dtype=group.dtype, device=group.device)
                targets.append(grid.cut(updates[block.position]).reshape(grid.tile))
                sources.append(source)
        _copy(targets, sources)

    def _label(self, bucket: Bucket, what: str) -> str:
        return f"{what} of {self.comm_plan.describe(bucket)}"


def _flat(transfers: Sequence[Sequence[Transfer]]) -> list[Transfer]:
    return [transfer for own in transfers for transfer in own]


def _numel(transfers: Sequence[Transfer]) -> int:
    return sum(transfer.region.box.numel for transfer in transfers)


def _stretches(data: Tensor, transfers: Sequence[Transfer]) -> Iterator[Tensor]:
    """Views of a message `[n]`, one for each transfer, in order."""
    at = 0
    for transfer in transfers:
        end = at + transfer.region.box.numel
        yield data[at:end].view(transfer.region.box.shape)
        at = end


def _block_views(transfers: Sequence[Transfer], stacks: dict[int, Tensor]) -> list[Tensor]:
    """Views of stacks `[n, *block]`, given by the number of their block group, one for each transfer."""
    return [transfer.region.in_block(stacks[transfer.group][transfer.block.row]) for transfer in transfers]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
