"""Transfers as stretches of messages and as views of blocks; what has arrived as views of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm_plan import CommPlan, Transfer
from .rank_group import RankGroup
from .work import Work

EntryView = Callable[[Tensor], Tensor]
"""Takes some entries of what this rank holds of a tensor, as a view."""
EntryReader = Callable[[EntryView], Tensor]
"""Reads the entries of a view from one tensor."""
Source = Callable[[int], EntryReader | None]
"""The reader of what this rank holds of a tensor, by position of the parameter; None: there is none."""


@dataclass(frozen=True)
class Arrived:
    """Updates of some entries of a parameter, as their owner has sent them.

    position: position of the parameter.
    dtype: dtype that the updates were computed in.
    values: the updates, views of a message.
    views: the same entries of a tensor that is laid out as what this rank holds of the parameter, as views.
    whole: whether `values` is one tensor of all entries that this rank holds, in their order.
    """

    position: int
    dtype: torch.dtype
    values: Sequence[Tensor]
    views: Callable[[Tensor], Sequence[Tensor]]
    whole: bool


class Assembly:
    """Updates of all entries that this rank holds of parameters, put together from what arrives."""

    def __init__(self) -> None:
        self._begun: dict[int, Tensor] = {}
        self._missing: dict[int, int] = {}

    def add(self, arrived: Sequence[Arrived], parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        """The updates of what this rank holds of parameters, by position, of which these were the last parts."""
        complete, targets, sources = dict[int, Tensor](), list[Tensor](), list[Tensor]()
        for own in arrived:
            at, parameter = own.position, parameters[own.position]
            if own.whole:
                complete[at] = own.values[0].reshape(parameter.shape).to(own.dtype)
                continue
            if at not in self._begun:
                self._begun[at] = torch.empty(parameter.shape, dtype=own.dtype, device=parameter.device)
                self._missing[at] = parameter.numel()
            targets += own.views(self._begun[at])
            sources += own.values
            self._missing[at] -= sum(value.numel() for value in own.values)
        copy_all(targets, sources)
        done = [at for at in self._begun if not self._missing[at]]
        return {**complete, **{at: self._begun.pop(at) for at in done}}


def read(x: Tensor | None) -> EntryReader | None:
    """What reads entries of a tensor as they are; None if there is none."""
    return None if x is None else lambda view: view(x)


def reading(tensors: Sequence[Tensor | None]) -> Source:
    """The source that reads tensors as they are."""
    return lambda position: read(tensors[position])


def flattened(transfers: Sequence[Sequence[Transfer]]) -> list[Transfer]:
    """The transfers with all ranks, in the order of the ranks."""
    return [transfer for own in transfers for transfer in own]


def count(transfers: Sequence[Transfer]) -> int:
    """The number of entries of some transfers."""
    return sum(transfer.region.box.numel for transfer in transfers)


def stretches(data: Tensor, transfers: Sequence[Transfer]) -> Iterator[Tensor]:
    """Views of a message `[n]`, one for each transfer, in order."""
    at = 0
    for transfer in transfers:
        end = at + transfer.region.box.numel
        yield data[at:end].view(transfer.region.box.shape)
        at = end


def stack_views(transfers: Sequence[Transfer], stacks: dict[int, Tensor]) -> list[Tensor]:
    """Views of stacks `[n, *block]`, given by the number of their block group, one for each transfer."""
    return [transfer.region.in_block(stacks[transfer.group][transfer.block.row]) for transfer in transfers]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each of some tensors into its target."""
    if targets:
        torch._foreach_copy_(targets, sources)


def pack_shards(plan: CommPlan, index: int, source: Source) -> Tensor:
    """Copy what this rank holds of the blocks of a round into one message. Return it, `[n]`, by owner.

    Entries of tensors without a reader are zeros.

    index: number of the round.
    """
    entries, first = plan.sent_entries[index], plan.block_groups[plan.rounds[index].groups[0]]
    readers = {position: source(position) for position in dict.fromkeys(one.position for one in entries)}
    sizes = [math.prod(one.shape) for one in entries]
    empty = torch.zeros if None in readers.values() else torch.empty
    out = empty(sum(sizes), dtype=first.gradient_dtype, device=first.device)
    targets, sources = [], []
    for one, target in zip(entries, torch.split(out, sizes), strict=True):
        reader = readers[one.position]
        if reader is not None:
            targets.append(target.view(one.shape))
            sources.append(reader(one.view))
    copy_all(targets, sources)
    return out


def send_shards(
    plan: CommPlan, index: int, name: str, message: Tensor, rank_group: RankGroup | None = None
) -> Work[Tensor]:
    """Start to send the message of a round, as `pack_shards` makes it, to the owners of its blocks.

    index: number of the round. name: what errors call the message. rank_group: the ranks; None: the plan's.
    """
    own = plan.rounds[index]
    sending, receiving = [count(each) for each in own.sent], [count(each) for each in own.received]
    return (rank_group or plan.rank_group).all_to_all(message, sending, receiving, f"{name} of {plan.describe(index)}")
