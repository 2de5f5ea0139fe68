"""Communication plan of one parameter set: what each rank sends to the owners of blocks, and what comes back.

A block group is the equal blocks of all ranks; the blocks of it that one rank owns are a stack there. Block groups are
sent in rounds of messages, in the same order on every rank, whether or not a rank owns any of their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from eigengraft.blocking.block_grid import BlockGrid
from eigengraft.errors import name_some

from .layouts import Layout
from .rank_group import RankGroup
from .regions import Region, regions


@dataclass(frozen=True)
class PlacedBlock:
    """One block and the rank that owns it.

    position: position of the block's parameter.
    grid: the block, as a grid of its own.
    owner: rank that holds the block's state and computes its update.
    row: row of the block in the owner's stack.
    """

    position: int
    grid: BlockGrid
    owner: int
    row: int


@dataclass(frozen=True)
class BlockGroup:
    """Equal blocks of one update, on whatever ranks.

    path: path of the update in the recipe.
    shape: shape of a block.
    dtype: dtype that the blocks are computed in.
    gradient_dtype: dtype that gradients are sent in.
    update_dtype: dtype that updates are sent in.
    device: device of the blocks.
    blocks: the blocks, in the order of their parameters.
    joined: whether they are computed together with those of the group before, and so are sent in one round with them.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    update_dtype: torch.dtype
    device: torch.device
    blocks: tuple[PlacedBlock, ...]
    joined: bool = False

    def owned(self, rank: int) -> list[PlacedBlock]:
        """The blocks that a rank owns, by row."""
        return [block for block in self.blocks if block.owner == rank]

    @property
    def nbytes(self) -> int:
        """Bytes of the updates of all blocks."""
        return self.update_dtype.itemsize * math.prod(self.shape) * len(self.blocks)


@dataclass(frozen=True)
class Transfer:
    """Entries of one block that are one stretch of a message.

    group: number of the block group.
    block: the block.
    region: the entries, in the block and in the parameter.
    """

    group: int
    block: PlacedBlock
    region: Region


class SentEntries(NamedTuple):
    """Entries that this rank sends to the owner of their block, as one stretch of a message.

    position: position of the parameter.
    shape: shape of the entries.
    view: takes the entries out of what this rank holds of a tensor, as a view.
    """

    position: int
    shape: tuple[int, ...]
    view: Callable[[Tensor], Tensor]


@dataclass
class Round:
    """Block groups whose messages are sent together, by one collective. All but `groups` are lists over ranks r.

    groups: numbers of the block groups.
    held[r]: transfers between this rank's shards and blocks that rank r owns, where updates come back to.
    sent[r]: the subset of held[r] whose gradients this rank sends to r; one replica of each entry sends.
    owned[r]: transfers between blocks that this rank owns and the shards of rank r, where updates go to.
    received[r]: the subset of owned[r] whose gradients this rank receives from r.
    lengths[r]: entries of all blocks that rank r owns.
    """

    groups: list[int]
    held: list[list[Transfer]]
    sent: list[list[Transfer]]
    owned: list[list[Transfer]]
    received: list[list[Transfer]]
    lengths: list[int]


class CommPlan:
    """All rounds of messages of a parameter set.

    rank_group: the ranks that share the parameters.
    layouts: what each rank holds of each parameter, by position.
    block_groups: the blocks of all parameters that are exchanged.
    names: what errors call the parameters, by position.
    limit: bytes of updates of all ranks in a round.
    starts: number of the first block group that each one is computed together with.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        layouts: Sequence[Layout],
        block_groups: Sequence[BlockGroup],
        names: Sequence[str],
        limit: int,
    ) -> None:
        self.rank_group, self.layouts, self.block_groups, self.names = rank_group, layouts, block_groups, names
        self.limit = limit
        self.replicated = all(layouts[block.position].replicated for group in block_groups for block in group.blocks)
        self.starts = list(accumulate((0 if group.joined else at for at, group in enumerate(block_groups)), max))
        self.rounds = [self._round(groups) for groups in pack(block_groups, limit)]

    def describe(self, index: int) -> str:
        """The number of a round, the name of its first parameter, and how many more there are."""
        blocks = [block for group in self.rounds[index].groups for block in self.block_groups[group].blocks]
        found = list(dict.fromkeys(self.names[block.position] for block in blocks))
        return f"round {index} ({name_some(found, 1)})"

    @cached_property
    def round_of(self) -> dict[int, int]:
        """Number of the round that each block group is sent in."""
        return {group: index for index, own in enumerate(self.rounds) for group in own.groups}

    @cached_property
    def sent_entries(self) -> list[list[SentEntries]]:
        """The entries that this rank sends in each round, by owner."""
        return [[self._sent_entries(one) for each in own.sent for one in each] for own in self.rounds]

    def _sent_entries(self, transfer: Transfer) -> SentEntries:
        position, box = transfer.block.position, transfer.region.box
        held = self.layouts[position].boxes[self.rank_group.rank]
        return SentEntries(position, box.shape, _whole if box == held else itemgetter(box.within(held)))

    def _round(self, groups: list[int]) -> Round:
        ranks, me = range(self.rank_group.size), self.rank_group.rank
        lengths = [0 for _ in ranks]
        for block in (block for group in groups for block in self.block_groups[group].blocks):
            lengths[block.owner] += math.prod(block.grid.shape)
        held: list[list[Transfer]] = [[] for _ in ranks]
        owned: list[list[Transfer]] = [[] for _ in ranks]
        if self.replicated:
            return Round(groups, held, held, owned, owned, lengths)
        for group in groups:
            for block in self.block_groups[group].blocks:
                held[block.owner] += self._transfers(group, block, me)
                if block.owner == me:
                    for rank in ranks:
                        owned[rank] += self._transfers(group, block, rank)
        sent = [[transfer for transfer in own if self._sends(me, rank, transfer)] for rank, own in enumerate(held)]
        received = [[transfer for transfer in own if self._sends(rank, me, transfer)] for rank, own in enumerate(owned)]
        return Round(groups, held, sent, owned, received, lengths)

    def _transfers(self, group: int, block: PlacedBlock, rank: int) -> list[Transfer]:
        """What a rank holds of a block."""
        layout = self.layouts[block.position]
        return [Transfer(group, block, region) for region in regions(layout.shape, block.grid, layout.boxes[rank])]

    def _sends(self, rank: int, owner: int, transfer: Transfer) -> bool:
        """Whether a rank sends the gradients of a transfer to the owner of the block: it is of the same replica."""
        replicas = self.layouts[transfer.block.position].replicas
        return replicas[rank] == replicas[owner]

    def empty(self, group: int) -> Tensor:
        """A stack `[n, *block]` for the blocks of a group that this rank owns."""
        own = self.block_groups[group]
        return torch.empty(len(own.owned(self.rank_group.rank)), *own.shape, dtype=own.dtype, device=own.device)


def _whole(x: Tensor) -> Tensor:
    return x


def pack(block_groups: Sequence[BlockGroup], limit: int) -> list[list[int]]:
    """Numbers of block groups in order, in lists of one pair of dtypes and `limit` bytes, or of what is joined."""
    rounds: list[list[int]] = []
    size, last = 0, None
    for index, group in enumerate(block_groups):
        dtypes = group.gradient_dtype, group.update_dtype
        if not group.joined and (not rounds or dtypes != last or size + group.nbytes > limit):
            rounds.append([])
            size = 0
        rounds[-1].append(index)
        size, last = size + group.nbytes, dtypes
    return rounds
