"""One step's way of gradients to owners and of updates back, over an `CommPlan`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .comm_plan import Bucket, CommPlan, Transfer
from .rank_group import Work


class CommStep:
    """Of one step. All ranks make the same calls of `send`, then one `stack` for each block group they own, then
    `close`.

    Buckets leave in order: that of updates as soon as its last block group has been delivered, so that it travels
    while the next one is computed.
    """

    def __init__(self, comm_plan: CommPlan) -> None:
        self.comm_plan = comm_plan
        self._arriving: dict[str, list[Work]] = {}
        self._arrived: dict[tuple[str, int], Tensor] = {}
        self._updates: dict[int, Tensor] = {}
        self._returning: list[Work] = []

    def send(self, parts: Sequence[Tensor | None], what: str) -> None:
        """Starts what this rank holds of every parameter, by position, on its way to the owners of its blocks."""
        self._arriving[what] = [self._post(bucket, parts, what) for bucket in self.comm_plan.buckets]

    def carries(self, what: str) -> bool:
        """Whether that was sent; if not, every rank has all of it."""
        return what in self._arriving

    def _post(self, bucket: Bucket, parts: Sequence[Tensor | None], what: str) -> Work:
        comm_plan, me = self.comm_plan, self.comm_plan.rank_group.rank
        transfers = bucket.given
        first = comm_plan.block_groups[bucket.block_groups[0]]
        out = torch.empty(sum(map(_size, transfers)), dtype=first.travels[0], device=first.device)
        targets, sources = [], []
        for transfer, target in zip(_flat(transfers), _cut(out, _flat(transfers)), strict=True):
            part = parts[transfer.member.position]
            if part is not None:
                targets.append(target)
                sources.append(transfer.region.of_part(part, comm_plan.layouts[transfer.member.position].boxes[me]))
        _copy(targets, sources)
        due = [_size(own) for own in bucket.due]
        return comm_plan.rank_group.all_to_all(out, [_size(own) for own in transfers], due, self._label(bucket, what))

    def stack(self, block_group: int, what: str) -> Tensor:
        """`[n, *block]`, the blocks of a block group that are owned here, from the parts that were sent."""
        if (what, block_group) not in self._arrived:
            index = self.comm_plan.bucket_of[block_group]
            bucket, data = self.comm_plan.buckets[index], self._arriving[what][index].wait()
            stacks = {own: self.comm_plan.empty(own) for own in bucket.block_groups}
            transfers = _flat(bucket.due)
            _copy(
                [transfer.region.of_block(stacks[transfer.block_group][transfer.member.row]) for transfer in transfers],
                list(_cut(data, transfers)),
            )
            self._arrived.update({(what, own): stack for own, stack in stacks.items()})
        return self._arrived[what, block_group]

    def deliver(self, block_group: int, rows: Tensor | None, directions: Tensor) -> None:
        """Takes the directions of some rows of a block group, all of them by default."""
        if rows is None:
            self._updates[block_group] = directions
            return
        if block_group not in self._updates:
            self._updates[block_group] = self.comm_plan.empty(block_group)
        self._updates[block_group].index_copy_(0, rows, directions)

    def done(self, before: int) -> None:
        """Says that nothing more will be delivered for the block groups up to that one; complete buckets leave."""
        for bucket in self.comm_plan.buckets[len(self._returning) :]:
            if bucket.block_groups[-1] >= before:
                break
            self._returning.append(self._return(bucket))

    def _stack_of(self, block_group: int) -> Tensor:
        """What was delivered; rows that were not are left as memory is, nobody uses them."""
        return self._updates.pop(block_group) if block_group in self._updates else self.comm_plan.empty(block_group)

    def _return(self, bucket: Bucket) -> Work:
        comm_plan, label = self.comm_plan, self._label(bucket, "updates")
        stacks = {block_group: self._stack_of(block_group) for block_group in bucket.block_groups}
        first = comm_plan.block_groups[bucket.block_groups[0]]
        if comm_plan.replicated:
            out = torch.empty(self._longest(bucket), dtype=first.travels[1], device=first.device)
            at = 0
            for stack in stacks.values():
                out[at : at + stack.numel()].view(stack.shape).copy_(stack)
                at += stack.numel()
            return comm_plan.rank_group.all_gather(out, label)
        transfers = list(_flat(bucket.theirs))
        out = torch.empty(_size(transfers), dtype=first.travels[1], device=first.device)
        _copy(
            list(_cut(out, transfers)),
            [transfer.region.of_block(stacks[transfer.block_group][transfer.member.row]) for transfer in transfers],
        )
        sent, due = [_size(own) for own in bucket.theirs], [_size(own) for own in bucket.ours]
        return comm_plan.rank_group.all_to_all(out, sent, due, label)

    def _longest(self, bucket: Bucket) -> int:
        """Numbers of the rank that owns most of a bucket."""
        loads = [0] * self.comm_plan.rank_group.size
        for block_group in bucket.block_groups:
            for member in self.comm_plan.block_groups[block_group].members:
                loads[member.owner] += math.prod(member.grid.tile)
        return max(loads)

    def close(self) -> dict[int, Tensor]:
        """The updates of what this rank holds of every parameter, by position; waits for all of them."""
        self.done(len(self.comm_plan.block_groups))
        for arriving in self._arriving.values():  # also where nothing was taken: a message must not outlive its buffers
            for pending in arriving:
                pending.wait()
        updates: dict[int, Tensor] = {}
        for bucket, pending in zip(self.comm_plan.buckets, self._returning, strict=True):
            if self.comm_plan.replicated:
                self._spread(bucket, pending.wait(), updates)
            else:
                self._place(bucket, pending.wait(), updates)
        return updates

    def _place(self, bucket: Bucket, data: Tensor, updates: dict[int, Tensor]) -> None:
        comm_plan, me = self.comm_plan, self.comm_plan.rank_group.rank
        transfers = list(_flat(bucket.ours))
        for transfer in transfers:
            position = transfer.member.position
            if position not in updates:
                shape, block_group = (
                    comm_plan.layouts[position].boxes[me].shape,
                    comm_plan.block_groups[transfer.block_group],
                )
                updates[position] = torch.empty(shape, dtype=block_group.dtype, device=block_group.device)
        held = {position: comm_plan.layouts[position].boxes[me] for position in updates}
        targets = [
            transfer.region.of_part(updates[transfer.member.position], held[transfer.member.position])
            for transfer in transfers
        ]
        _copy(targets, list(_cut(data, transfers)))

    def _spread(self, bucket: Bucket, data: Tensor, updates: dict[int, Tensor]) -> None:
        """As `_place`, where everybody holds everything: data `[R, longest]`."""
        targets, sources, ends = [], [], [0] * self.comm_plan.rank_group.size
        for block_group in (self.comm_plan.block_groups[index] for index in bucket.block_groups):
            for member in sorted(block_group.members, key=lambda one: (one.owner, one.row)):
                grid, at = member.grid, ends[member.owner]
                ends[member.owner] = at + math.prod(grid.tile)
                source = data[member.owner, at : ends[member.owner]].view(grid.tile)
                if grid.whole and data.dtype == block_group.dtype:
                    updates[member.position] = source
                    continue
                if member.position not in updates:
                    updates[member.position] = torch.empty(
                        grid.merged, dtype=block_group.dtype, device=block_group.device
                    )
                targets.append(grid.cut(updates[member.position]).reshape(grid.tile))
                sources.append(source)
        _copy(targets, sources)

    def _label(self, bucket: Bucket, what: str) -> str:
        return f"{what} of {self.comm_plan.describe(bucket)}"


def _flat(transfers: Sequence[Sequence[Transfer]]) -> list[Transfer]:
    return [transfer for own in transfers for transfer in own]


def _size(transfers: Sequence[Transfer]) -> int:
    return sum(transfer.region.box.numel for transfer in transfers)


def _cut(data: Tensor, transfers: Sequence[Transfer]) -> Iterator[Tensor]:
    at = 0
    for transfer in transfers:
        end = at + transfer.region.box.numel
        yield data[at:end].view(transfer.region.box.shape)
        at = end


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
