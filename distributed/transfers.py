"""Transfers as stretches of messages and as views of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .comm_plan import Transfer


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
