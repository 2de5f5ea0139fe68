"""Communication of one step by a `CommPlan`: gradients are sent to the owners of blocks, and updates are returned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from .comm_plan import Arrived, CommPlan, Source, copy_all, pack_shards, send_shards
from .rank_group import Work

IN_FLIGHT = 2
"""Largest number of rounds of messages under way in each direction: rounds of gradients, and rounds of gathered
updates."""


class CommStep:
    """Messages of one step. Every rank calls `gather` and `deliver` for its block groups, in order, and then `close`.

    Legend: a round is a set of block groups whose messages are sent together (`comm_plan.Round`). G_k is the message of
        round k to owners of blocks, with gradients and other tensors. U_k is the message of round k with the updates
        that owners return.

    All ranks start the collectives in one order, G_0 G_1 U_0 G_2 U_1 G_3 ... Messages are communicated while blocks are
    computed. Only a few rounds need memory at a time.

    If parameters are sharded, a rank starts U_k when it has computed its own blocks of round k and has received
    U_(k-1).

    If all parameters are replicated, there are no messages G, because every rank has all gradients. Up to IN_FLIGHT
    messages U are under way, and a rank computes the next blocks in the meantime. It waits for a message only if its
    updates that are not yet sent belong to more than IN_FLIGHT block groups, and have more bytes than IN_FLIGHT rounds
    of the largest size.

    sources: functions that read the entries to send to owners, by name of the message. One of them reads gradients, for
        example. {} if all parameters are replicated, because every rank then holds the full tensors.
    on_updates: function that is called with the updates of a round when these have arrived. It must not keep tensors.
    begun: messages to owners that are already under way, by (name of the message, index of the round).
    """

    def __init__(
        self,
        comm_plan: CommPlan,
        sources: Mapping[str, Source],
        on_updates: Callable[[Arrived], None],
        begun: Mapping[tuple[str, int], Work[Tensor]] = MappingProxyType({}),
    ) -> None:
        self.comm_plan, self._on_updates = comm_plan, on_updates
        self.sources: Mapping[str, Source] = {} if comm_plan.replicated else sources
        self._arriving = dict(begun)
        self._arrived: dict[tuple[str, int], Tensor] = {}
        self._delivered: dict[int, Tensor] = {}
        self._sent = 0
        self._returning: deque[tuple[int, Work[Tensor] | Work[list[Tensor]]]] = deque()
        for index in range(IN_FLIGHT):
            self._send(index)

    def _send(self, index: int) -> None:
        """Start to send this rank's shards of a round to the owners of blocks, unless they are already under way.

        index: index of the round. Nothing is sent if there is no such round.
        """
        for name, source in self.sources.items() if index < len(self.comm_plan.rounds) else ():
            if (name, index) not in self._arriving:
                message = pack_shards(self.comm_plan, index, source)
                self._arriving[name, index] = send_shards(self.comm_plan, index, name, message)

    def gather(self, group: int, source: str) -> Tensor:
        """Return this rank's blocks of a block group, `[n, *block]`, assembled from the shards of all ranks.

        The host waits until the message with these entries has arrived.

        group: index of the block group.
        source: name of the tensors in `sources`, such as the gradients.
        """
        if (source, group) not in self._arrived:
            index = self.comm_plan.round_of[group]
            own, data = self.comm_plan.rounds[index], self._arriving.pop((source, index)).wait()
            stacks = {group: self.comm_plan.empty(group) for group in own.groups}
            copy_all(own.received.in_stacks(stacks), own.received.split(data))
            self._arrived.update({(source, group): stack for group, stack in stacks.items()})
        return self._arrived[source, group]

    def deliver(self, group: int, rows: Tensor | None, directions: Tensor) -> None:
        """Accept the computed directions of some of this rank's blocks of a block group. `advance` sends them with
        their round.

        group: index of the block group.
        rows: indices of these blocks among this rank's blocks of the group; None: all of this rank's blocks.
        directions: `[n, *block]`, the directions of these n blocks.
        """
        if rows is None:
            self._delivered[group] = directions
            return
        if group not in self._delivered:
            self._delivered[group] = self.comm_plan.empty(group)
        self._delivered[group].index_copy_(0, rows, directions)

    def advance(self, before: int, wait: bool = False) -> None:
        """Send each message (`Round`) whose directions are complete, and receive updates that have arrived.

        A rank waits for earlier messages if parameters are sharded, or if too many computed block groups are unsent.

        before: index of a block group; the directions of all groups with a smaller index have been delivered.
        wait: True to wait for earlier rounds in any case.
        """
        plan, unsent = self.comm_plan, list(self._delivered.values())
        much = sum(x.numel() * x.element_size() for x in unsent) > IN_FLIGHT * plan.limit
        wait = wait or not plan.replicated or (much and len(unsent) > IN_FLIGHT)
        allowed = IN_FLIGHT if plan.replicated else 1
        for key in [key for key in self._arrived if key[1] < before]:
            del self._arrived[key]
        for index in range(self._sent, len(plan.rounds)):
            if plan.rounds[index].groups[-1] >= before:
                break
            if len(self._returning) == allowed:
                if not wait and not self._returning[0][1].done():
                    break
                self._finish_oldest()
            self._return(index)
        while self._returning and self._returning[0][1].done():
            self._finish_oldest()

    def close(self) -> None:
        """Send the messages that are left, and wait until all messages have been sent and received."""
        self.advance(len(self.comm_plan.block_groups), wait=True)
        while self._returning:
            self._finish_oldest()

    def _return(self, index: int) -> None:
        """Start to return the updates of a round from the owners of blocks (U_k). Then start to send the gradients of
        round k + IN_FLIGHT to owners (G_(k + IN_FLIGHT)), unless they are already under way.

        index: the index k of the round.
        """
        for name in self.sources:  # `gather` may not have waited for all messages, which must end before they are freed
            if (name, index) in self._arriving:
                self._arriving.pop((name, index)).wait()
        self._returning.append((index, self._return_round(index)))
        self._sent = index + 1
        self._send(index + IN_FLIGHT)

    def _return_round(self, index: int) -> Work[Tensor] | Work[list[Tensor]]:
        plan, own = self.comm_plan, self.comm_plan.rounds[index]
        label, first = f"updates of {plan.describe(index)}", plan.block_groups[own.groups[0]]
        # a stack may have blocks without a direction in this step; no rank uses their rows, so they stay uninitialized
        stacks = {g: self._delivered.pop(g) if g in self._delivered else plan.empty(g) for g in own.groups}
        out = own.owned.empty(first.update_dtype, first.device)
        copy_all(own.owned.split(out), own.owned.in_stacks(stacks))
        stacks.clear()
        if plan.replicated:
            return plan.rank_group.all_gather_uneven(out, own.held.lengths, label)
        return plan.rank_group.all_to_all(out, own.owned.lengths, own.held.lengths, label)

    def _finish_oldest(self) -> None:
        """Wait for the oldest message of updates under way. Pass its updates to `on_updates`."""
        index, work = self._returning.popleft()
        held = self.comm_plan.rounds[index].held
        self._on_updates(list(zip(held.transfers, held.split(work.wait()), strict=True)))
