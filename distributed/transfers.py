"""Transfers as stretches of messages and as views of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .comm_plan import CommPlan, Transfer
from .rank_group import RankGroup
from .work import Work

Source = Callable[[int], Tensor | None]
"""What this rank holds of a tensor, by position of the parameter; None: there is none."""


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


def send_shards(
    plan: CommPlan, index: int, name: str, source: Source, rank_group: RankGroup | None = None
) -> Work[Tensor]:
    """Starts to send what this rank holds of the blocks of a bucket to their owners.

    index: number of the bucket. name: what errors call that which is sent. rank_group: the ranks; default: the plan's.
    """
    bucket, me = plan.buckets[index], plan.rank_group.rank
    first, flat = plan.block_groups[bucket.groups[0]], flattened(bucket.sent)
    local = {position: source(position) for position in dict.fromkeys(t.block.position for t in flat)}
    out = torch.empty(sum(map(count, bucket.sent)), dtype=first.gradient_dtype, device=first.device)
    targets, sources = [], []
    for transfer, target in zip(flat, stretches(out, flat), strict=True):
        shard = local[transfer.block.position]
        if shard is not None:
            targets.append(target)
            sources.append(transfer.region.in_shard(shard, plan.layouts[transfer.block.position].boxes[me]))
    copy_all(targets, sources)
    sending, receiving = [count(own) for own in bucket.sent], [count(own) for own in bucket.received]
    label = f"{name} of {plan.describe(bucket)}"
    return (rank_group or plan.rank_group).all_to_all(out, sending, receiving, label)
