"""The exchange of one set of parameters: gradients travel to owners, updates to whoever holds a part.

Legend: a block group is blocks of one shape, dtype, device and update, on any rank; those that are owned here are a
stack. Families travel in buckets, in the same order on every rank, whether or not a rank owns anything of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eigengraft.blocking import BlockGrid

from .layouts import Layout
from .rank_group import RankGroup
from .regions import Region, regions


@dataclass(frozen=True)
class PlacedBlock:
    """One block: the position of its parameter, the block as a box of its own, its owner, its row there."""

    position: int
    grid: BlockGrid
    owner: int
    row: int


@dataclass(frozen=True)
class BlockGroup:
    """path: of the update. dtype: to compute in; travels: of gradients and of updates on the way."""

    path: str
    block: tuple[int, ...]
    dtype: torch.dtype
    travels: tuple[torch.dtype, torch.dtype]
    device: torch.device
    members: tuple[PlacedBlock, ...]

    def owned(self, rank: int) -> list[PlacedBlock]:
        """The blocks of a rank, by row."""
        return [member for member in self.members if member.owner == rank]

    @property
    def nbytes(self) -> int:
        """Of the updates of all blocks."""
        size = self.travels[1].itemsize
        for length in self.block:
            size *= length
        return size * len(self.members)


@dataclass(frozen=True)
class Transfer:
    """One stretch of a message: these entries of a block of a block group."""

    block_group: int
    member: PlacedBlock
    region: Region


@dataclass
class Bucket:
    """Families whose messages travel together, and the transfers between this rank's parts and the blocks of each
    owner.

    ours[r]: between what we hold and blocks that rank r owns; given[r]: those of them that r takes from us. theirs[r]:
    between blocks we own and what rank r holds; due[r]: those of them that we take from r.
    """

    block_groups: list[int]
    ours: list[list[Transfer]]
    given: list[list[Transfer]]
    theirs: list[list[Transfer]]
    due: list[list[Transfer]]


class CommPlan:
    """layouts: of the parameters, by position. limit: bytes of updates in a bucket."""

    def __init__(
        self,
        rank_group: RankGroup,
        layouts: Sequence[Layout],
        block_groups: Sequence[BlockGroup],
        names: Sequence[str],
        limit: int,
    ) -> None:
        self.rank_group, self.layouts, self.block_groups, self.names = rank_group, layouts, block_groups, names
        self.replicated = all(
            layouts[m.position].replicated for block_group in block_groups for m in block_group.members
        )
        self.buckets = [self._bucket(own) for own in packed(block_groups, limit)]

    def describe(self, bucket: Bucket) -> str:
        """The number of a bucket, its first parameter and how many more there are."""
        members = [member for block_group in bucket.block_groups for member in self.block_groups[block_group].members]
        found = list(dict.fromkeys(self.names[member.position] for member in members))
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return f"bucket {self.buckets.index(bucket)} ({found[0]}{more})"

    @cached_property
    def bucket_of(self) -> dict[int, int]:
        """Which bucket a block group travels in."""
        return {block_group: index for index, bucket in enumerate(self.buckets) for block_group in bucket.block_groups}

    def _bucket(self, block_groups: list[int]) -> Bucket:
        ranks, me = range(self.rank_group.size), self.rank_group.rank
        ours: list[list[Transfer]] = [[] for _ in ranks]
        theirs: list[list[Transfer]] = [[] for _ in ranks]
        if self.replicated:
            return Bucket(block_groups, ours, ours, theirs, theirs)
        for block_group in block_groups:
            for member in self.block_groups[block_group].members:
                layout = self.layouts[member.position]
                for region in regions(layout.shape, member.grid, layout.boxes[me]):
                    ours[member.owner].append(Transfer(block_group, member, region))
                if member.owner == me:
                    for rank in ranks:
                        for region in regions(layout.shape, member.grid, layout.boxes[rank]):
                            theirs[rank].append(Transfer(block_group, member, region))
        given = [[transfer for transfer in own if self.supplies(me, rank, transfer)] for rank, own in enumerate(ours)]
        due = [[transfer for transfer in own if self.supplies(rank, me, transfer)] for rank, own in enumerate(theirs)]
        return Bucket(block_groups, ours, given, theirs, due)

    def supplies(self, source: int, owner: int, transfer: Transfer) -> bool:
        """Whether an owner takes those entries from that rank."""
        replicas = self.layouts[transfer.member.position].replicas
        return replicas[source] == replicas[owner]

    def empty(self, block_group: int) -> Tensor:
        """A stack `[n, *block]` for the blocks that are owned here."""
        own = self.block_groups[block_group]
        return torch.empty(len(own.owned(self.rank_group.rank)), *own.block, dtype=own.dtype, device=own.device)


def packed(block_groups: Sequence[BlockGroup], limit: int) -> list[list[int]]:
    """Families in order, as many together as fit; those of other dtypes on the way, or of nothing, apart."""
    buckets: list[list[int]] = []
    size, last = 0, None
    for index, block_group in enumerate(block_groups):
        if not buckets or block_group.travels != last or size + block_group.nbytes > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size, last = size + block_group.nbytes, block_group.travels
    return buckets
