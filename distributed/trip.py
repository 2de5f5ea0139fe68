"""One step's way of gradients to owners and of updates back, over an `Exchange`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .exchange import Bucket, Exchange, Leg
from .peers import Pending


class Trip:
    """Of one step. All ranks make the same calls of `send`, then one `stack` for each family they own, then `close`.

    Buckets leave in order: that of updates as soon as its last family has been delivered, so that it travels while the
    next one is computed.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._arriving: dict[str, list[Pending]] = {}
        self._arrived: dict[tuple[str, int], Tensor] = {}
        self._updates: dict[int, Tensor] = {}
        self._returning: list[Pending] = []

    def send(self, parts: Sequence[Tensor | None], what: str) -> None:
        """Starts what this rank holds of every parameter, by position, on its way to the owners of its blocks."""
        self._arriving[what] = [self._post(bucket, parts, what) for bucket in self.exchange.buckets]

    def carries(self, what: str) -> bool:
        """Whether that was sent; if not, every rank has all of it."""
        return what in self._arriving

    def _post(self, bucket: Bucket, parts: Sequence[Tensor | None], what: str) -> Pending:
        exchange, me = self.exchange, self.exchange.peers.rank
        legs = bucket.given
        first = exchange.families[bucket.families[0]]
        out = torch.empty(sum(map(_size, legs)), dtype=first.travels[0], device=first.device)
        targets, sources = [], []
        for leg, target in zip(_flat(legs), _cut(out, _flat(legs)), strict=True):
            part = parts[leg.member.position]
            if part is not None:
                targets.append(target)
                sources.append(leg.region.of_part(part, exchange.layouts[leg.member.position].boxes[me]))
        _copy(targets, sources)
        due = [_size(own) for own in bucket.due]
        return exchange.peers.swap(out, [_size(own) for own in legs], due, self._label(bucket, what))

    def stack(self, family: int, what: str) -> Tensor:
        """`[n, *block]`, the blocks of a family that are owned here, from the parts that were sent."""
        if (what, family) not in self._arrived:
            index = self.exchange.bucket_of[family]
            bucket, data = self.exchange.buckets[index], self._arriving[what][index].wait()
            stacks = {own: self.exchange.empty(own) for own in bucket.families}
            legs = _flat(bucket.due)
            _copy([leg.region.of_block(stacks[leg.family][leg.member.row]) for leg in legs], list(_cut(data, legs)))
            self._arrived.update({(what, own): stack for own, stack in stacks.items()})
        return self._arrived[what, family]

    def deliver(self, family: int, rows: Tensor | None, directions: Tensor) -> None:
        """Takes the directions of some rows of a family, all of them by default."""
        if rows is None:
            self._updates[family] = directions
            return
        if family not in self._updates:
            self._updates[family] = self.exchange.empty(family)
        self._updates[family].index_copy_(0, rows, directions)

    def done(self, before: int) -> None:
        """Says that nothing more will be delivered for the families up to that one; complete buckets leave."""
        for bucket in self.exchange.buckets[len(self._returning) :]:
            if bucket.families[-1] >= before:
                break
            self._returning.append(self._return(bucket))

    def _stack_of(self, family: int) -> Tensor:
        """What was delivered; rows that were not are left as memory is, nobody uses them."""
        return self._updates.pop(family) if family in self._updates else self.exchange.empty(family)

    def _return(self, bucket: Bucket) -> Pending:
        exchange, label = self.exchange, self._label(bucket, "updates")
        stacks = {family: self._stack_of(family) for family in bucket.families}
        first = exchange.families[bucket.families[0]]
        if exchange.replicated:
            out = torch.empty(self._longest(bucket), dtype=first.travels[1], device=first.device)
            at = 0
            for stack in stacks.values():
                out[at : at + stack.numel()].view(stack.shape).copy_(stack)
                at += stack.numel()
            return exchange.peers.gather(out, label)
        legs = list(_flat(bucket.theirs))
        out = torch.empty(_size(legs), dtype=first.travels[1], device=first.device)
        _copy(list(_cut(out, legs)), [leg.region.of_block(stacks[leg.family][leg.member.row]) for leg in legs])
        sent, due = [_size(own) for own in bucket.theirs], [_size(own) for own in bucket.ours]
        return exchange.peers.swap(out, sent, due, label)

    def _longest(self, bucket: Bucket) -> int:
        """Numbers of the rank that owns most of a bucket."""
        loads = [0] * self.exchange.peers.size
        for family in bucket.families:
            for member in self.exchange.families[family].members:
                loads[member.owner] += math.prod(member.piece.tile)
        return max(loads)

    def close(self) -> dict[int, Tensor]:
        """The updates of what this rank holds of every parameter, by position; waits for all of them."""
        self.done(len(self.exchange.families))
        for arriving in self._arriving.values():  # also where nothing was taken: a message must not outlive its buffers
            for pending in arriving:
                pending.wait()
        updates: dict[int, Tensor] = {}
        for bucket, pending in zip(self.exchange.buckets, self._returning, strict=True):
            if self.exchange.replicated:
                self._spread(bucket, pending.wait(), updates)
            else:
                self._place(bucket, pending.wait(), updates)
        return updates

    def _place(self, bucket: Bucket, data: Tensor, updates: dict[int, Tensor]) -> None:
        exchange, me = self.exchange, self.exchange.peers.rank
        legs = list(_flat(bucket.ours))
        for leg in legs:
            position = leg.member.position
            if position not in updates:
                shape, family = exchange.layouts[position].boxes[me].shape, exchange.families[leg.family]
                updates[position] = torch.empty(shape, dtype=family.dtype, device=family.device)
        held = {position: exchange.layouts[position].boxes[me] for position in updates}
        targets = [leg.region.of_part(updates[leg.member.position], held[leg.member.position]) for leg in legs]
        _copy(targets, list(_cut(data, legs)))

    def _spread(self, bucket: Bucket, data: Tensor, updates: dict[int, Tensor]) -> None:
        """As `_place`, where everybody holds everything: data `[R, longest]`."""
        targets, sources, ends = [], [], [0] * self.exchange.peers.size
        for family in (self.exchange.families[index] for index in bucket.families):
            for member in sorted(family.members, key=lambda one: (one.owner, one.row)):
                piece, at = member.piece, ends[member.owner]
                ends[member.owner] = at + math.prod(piece.tile)
                source = data[member.owner, at : ends[member.owner]].view(piece.tile)
                if piece.whole and data.dtype == family.dtype:
                    updates[member.position] = source
                    continue
                if member.position not in updates:
                    updates[member.position] = torch.empty(piece.merged, dtype=family.dtype, device=family.device)
                targets.append(piece.cut(updates[member.position]).reshape(piece.tile))
                sources.append(source)
        _copy(targets, sources)

    def _label(self, bucket: Bucket, what: str) -> str:
        return f"{what} of {self.exchange.describe(bucket)}"


def _flat(legs: Sequence[Sequence[Leg]]) -> list[Leg]:
    return [leg for own in legs for leg in own]


def _size(legs: Sequence[Leg]) -> int:
    return sum(leg.region.box.numel for leg in legs)


def _cut(data: Tensor, legs: Sequence[Leg]) -> Iterator[Tensor]:
    at = 0
    for leg in legs:
        end = at + leg.region.box.numel
        yield data[at:end].view(leg.region.box.shape)
        at = end


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
