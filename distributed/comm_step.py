"""Communication of one step: gradients to the owners of blocks and updates back, as a `CommPlan` says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from .comm_plan import Bucket, CommPlan
from .transfers import Source, copy_all, count, flattened, send_shards, stack_views, stretches
from .work import Work

IN_FLIGHT = 2
"""Buckets that are on their way at once: of gradients, one that is computed next and one more; of gathered updates."""


class CommStep:
    """Messages of one step. Every rank calls `gather` and `deliver` for the block groups that it owns blocks of, in
    order, and then `close`.

    Legend: G_k, gradients (and what else is sent to owners) of bucket k; U_k, updates of bucket k.
    Every rank starts the collectives in one order, G_0 G_1 U_0 G_2 U_1 G_3 ..., and U_k as soon as its own blocks of
    bucket k are computed and U_(k-1) has arrived. So buckets travel while others are computed, and memory is needed for
    a few of them only. Replicated parameters need no G: there a rank computes on while IN_FLIGHT buckets of updates are
    under way, until more than IN_FLIGHT block groups and buckets of its own are waiting.

    sources: what is sent to owners, by name; nothing if every rank holds all of it.
    begun: messages to owners that are under way already, by name and number of the bucket.
    """

    def __init__(
        self,
        comm_plan: CommPlan,
        sources: Mapping[str, Source],
        begun: Mapping[tuple[str, int], Work[Tensor]] = MappingProxyType({}),
    ) -> None:
        self.comm_plan = comm_plan
        self.sources: Mapping[str, Source] = {} if comm_plan.replicated else sources
        self._arriving = dict(begun)
        self._arrived: dict[tuple[str, int], Tensor] = {}
        self._delivered: dict[int, Tensor] = {}
        self._sent = 0
        self._returning: deque[tuple[int, Work[Tensor] | Work[list[Tensor]]]] = deque()
        self._updates: dict[int, Tensor] = {}
        self._complete: dict[int, Tensor] = {}
        for index in range(IN_FLIGHT):
            self._send(index)

    def carries(self, source: str) -> bool:
        """Whether that is sent; if not, every rank holds all of it."""
        return source in self.sources

    def _send(self, index: int) -> None:
        """Starts to send this rank's shards of a bucket to the owners of blocks, if that has not begun."""
        for name, source in self.sources.items() if index < len(self.comm_plan.buckets) else ():
            if (name, index) not in self._arriving:
                self._arriving[name, index] = send_shards(self.comm_plan, index, name, source)

    def gather(self, group: int, source: str) -> Tensor:
        """The blocks `[n, *block]` of a block group that this rank owns, from the shards that were sent."""
        if (source, group) not in self._arrived:
            index = self.comm_plan.bucket_of[group]
            bucket, data = self.comm_plan.buckets[index], self._arriving.pop((source, index)).wait()
            stacks = {own: self.comm_plan.empty(own) for own in bucket.groups}
            transfers = flattened(bucket.received)
            copy_all(stack_views(transfers, stacks), list(stretches(data, transfers)))
            self._arrived.update({(source, own): stack for own, stack in stacks.items()})
        return self._arrived[source, group]

    def deliver(self, group: int, rows: Tensor | None, directions: Tensor) -> None:
        """Takes the directions of some rows of a block group; rows: None for all."""
        if rows is None:
            self._delivered[group] = directions
            return
        if group not in self._delivered:
            self._delivered[group] = self.comm_plan.empty(group)
        self._delivered[group].index_copy_(0, rows, directions)

    def advance(self, before: int) -> None:
        """Sends what can be sent and receives what has arrived, as block groups below `before` are delivered."""
        self._advance(before, self._must_wait())

    def _must_wait(self) -> bool:
        """Whether earlier buckets are waited for before a later one is computed."""
        plan, waiting = self.comm_plan, list(self._delivered.values())
        much = sum(x.numel() * x.element_size() for x in waiting) > IN_FLIGHT * plan.limit
        return not plan.replicated or (much and len(waiting) > IN_FLIGHT)

    def take(self) -> dict[int, Tensor]:
        """The updates of this rank's shards that are complete, by position of the parameter, each of them once."""
        complete, self._complete = self._complete, {}
        return complete

    def close(self) -> dict[int, Tensor]:
        """Waits for all messages; returns the updates that `take` has not returned."""
        self._advance(len(self.comm_plan.block_groups), wait=True)
        while self._returning:
            self._receive()
        return self.take()

    def _advance(self, before: int, wait: bool) -> None:
        """Sends and receives; wait: whether to wait for earlier buckets where as many as allowed are under way."""
        allowed = IN_FLIGHT if self.comm_plan.replicated else 1
        for key in [key for key in self._arrived if key[1] < before]:
            del self._arrived[key]
        for index in range(self._sent, len(self.comm_plan.buckets)):
            if self.comm_plan.buckets[index].groups[-1] >= before:
                break
            if len(self._returning) == allowed:
                if not wait and not self._returning[0][1].done():
                    break
                self._receive()
            self._return(index)
        while self._returning and self._returning[0][1].done():
            self._receive()

    def _return(self, index: int) -> None:
        """Starts to send the updates of a bucket, and the gradients of the next bucket but one."""
        for name in self.sources:  # taken or not: a message must not outlive its buffers
            if (name, index) in self._arriving:
                self._arriving.pop((name, index)).wait()
        self._returning.append((index, self._return_bucket(self.comm_plan.buckets[index])))
        self._sent = index + 1
        self._send(index + IN_FLIGHT)

    def _return_bucket(self, bucket: Bucket) -> Work[Tensor] | Work[list[Tensor]]:
        plan, label = self.comm_plan, f"updates of {self.comm_plan.describe(bucket)}"
        # rows without a direction are left uninitialized: no rank uses them
        stacks = {g: self._delivered.pop(g) if g in self._delivered else plan.empty(g) for g in bucket.groups}
        first = plan.block_groups[bucket.groups[0]]
        if plan.replicated:
            flat = [stack.reshape(-1).to(first.update_dtype) for stack in stacks.values()]
            return plan.rank_group.all_gather_uneven(
                torch.cat(flat) if len(flat) > 1 else flat[0], bucket.lengths, label
            )
        transfers = flattened(bucket.owned)
        out = torch.empty(count(transfers), dtype=first.update_dtype, device=first.device)
        copy_all(list(stretches(out, transfers)), stack_views(transfers, stacks))
        sending, receiving = [count(own) for own in bucket.owned], [count(own) for own in bucket.held]
        return plan.rank_group.all_to_all(out, sending, receiving, label)

    def _receive(self) -> None:
        """Waits for the updates of the bucket that was sent first, and copies them to where they belong."""
        index, work = self._returning.popleft()
        bucket, data = self.comm_plan.buckets[index], work.wait()
        if isinstance(data, Tensor):
            self._receive_shards(bucket, data)
        else:
            self._receive_blocks(bucket, data)
        positions = [position for position in self.comm_plan.completed_by[index] if position in self._updates]
        self._complete.update({position: self._updates.pop(position) for position in positions})

    def _receive_shards(self, bucket: Bucket, data: Tensor) -> None:
        """Copies the updates of a bucket `[n]` from their owners into the updates of this rank's shards."""
        plan, me = self.comm_plan, self.comm_plan.rank_group.rank
        transfers, targets = flattened(bucket.held), []
        for transfer in transfers:
            position, group = transfer.block.position, plan.block_groups[transfer.group]
            box = plan.layouts[position].boxes[me]
            if position not in self._updates:
                self._updates[position] = torch.empty(box.shape, dtype=group.dtype, device=group.device)
            targets.append(transfer.region.in_shard(self._updates[position], box))
        copy_all(targets, list(stretches(data, transfers)))

    def _receive_blocks(self, bucket: Bucket, data: Sequence[Tensor]) -> None:
        """Copies the blocks `[lengths[r]]` of all ranks r into the updates of parameters that every rank holds."""
        targets, sources, ends = [], [], [0] * self.comm_plan.rank_group.size
        for group in (self.comm_plan.block_groups[index] for index in bucket.groups):
            for block in sorted(group.blocks, key=lambda one: (one.owner, one.row)):
                grid, at = block.grid, ends[block.owner]
                ends[block.owner] = at + math.prod(grid.shape)
                source = data[block.owner][at : ends[block.owner]].view(grid.shape)
                if grid.is_parameter and source.dtype == group.dtype:
                    self._updates[block.position] = source
                    continue
                if block.position not in self._updates:
                    empty = torch.empty(grid.merged, dtype=group.dtype, device=group.device)
                    self._updates[block.position] = empty
                targets += grid.in_parameter(self._updates[block.position])
                sources += grid.in_blocks(source.unsqueeze(0))
        copy_all(targets, sources)
