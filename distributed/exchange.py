"""The exchange of one set of parameters: gradients travel to owners, updates to whoever holds a part.

Legend: a family is blocks of one shape, dtype, device and update, on any rank; those that are owned here are a stack.
Families travel in buckets, in the same order on every rank, whether or not a rank owns anything of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .blocks import Piece
from .layouts import Layout
from .peers import Peers
from .regions import Region, regions


@dataclass(frozen=True)
class Member:
    """One block: the position of its parameter, the block as a box of its own, its owner, its row there."""

    position: int
    piece: Piece
    owner: int
    row: int


@dataclass(frozen=True)
class Family:
    """path: of the update. dtype: to compute in; travels: of gradients and of updates on the way."""

    path: str
    block: tuple[int, ...]
    dtype: torch.dtype
    travels: tuple[torch.dtype, torch.dtype]
    device: torch.device
    members: tuple[Member, ...]

    def owned(self, rank: int) -> list[Member]:
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
class Leg:
    """One stretch of a message: these entries of a block of a family."""

    family: int
    member: Member
    region: Region


@dataclass
class Bucket:
    """Families whose messages travel together, and the legs between this rank's parts and the blocks of each owner.

    ours[r]: between what we hold and blocks that rank r owns; given[r]: those of them that r takes from us. theirs[r]:
    between blocks we own and what rank r holds; due[r]: those of them that we take from r.
    """

    families: list[int]
    ours: list[list[Leg]]
    given: list[list[Leg]]
    theirs: list[list[Leg]]
    due: list[list[Leg]]


class Exchange:
    """layouts: of the parameters, by position. limit: bytes of updates in a bucket."""

    def __init__(
        self, peers: Peers, layouts: Sequence[Layout], families: Sequence[Family], names: Sequence[str], limit: int
    ) -> None:
        self.peers, self.layouts, self.families, self.names = peers, layouts, families, names
        self.replicated = all(layouts[m.position].replicated for family in families for m in family.members)
        self.buckets = [self._bucket(own) for own in packed(families, limit)]

    def describe(self, bucket: Bucket) -> str:
        """The number of a bucket, its first parameter and how many more there are."""
        members = [member for family in bucket.families for member in self.families[family].members]
        found = list(dict.fromkeys(self.names[member.position] for member in members))
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return f"bucket {self.buckets.index(bucket)} ({found[0]}{more})"

    @cached_property
    def bucket_of(self) -> dict[int, int]:
        """Which bucket a family travels in."""
        return {family: index for index, bucket in enumerate(self.buckets) for family in bucket.families}

    def _bucket(self, families: list[int]) -> Bucket:
        ranks, me = range(self.peers.size), self.peers.rank
        ours: list[list[Leg]] = [[] for _ in ranks]
        theirs: list[list[Leg]] = [[] for _ in ranks]
        if self.replicated:
            return Bucket(families, ours, ours, theirs, theirs)
        for family in families:
            for member in self.families[family].members:
                layout = self.layouts[member.position]
                for region in regions(layout.shape, member.piece, layout.boxes[me]):
                    ours[member.owner].append(Leg(family, member, region))
                if member.owner == me:
                    for rank in ranks:
                        for region in regions(layout.shape, member.piece, layout.boxes[rank]):
                            theirs[rank].append(Leg(family, member, region))
        given = [[leg for leg in own if self.supplies(me, rank, leg)] for rank, own in enumerate(ours)]
        due = [[leg for leg in own if self.supplies(rank, me, leg)] for rank, own in enumerate(theirs)]
        return Bucket(families, ours, given, theirs, due)

    def supplies(self, source: int, owner: int, leg: Leg) -> bool:
        """Whether an owner takes those entries from that rank."""
        replicas = self.layouts[leg.member.position].replicas
        return replicas[source] == replicas[owner]

    def empty(self, family: int) -> Tensor:
        """A stack `[n, *block]` for the blocks that are owned here."""
        own = self.families[family]
        return torch.empty(len(own.owned(self.peers.rank)), *own.block, dtype=own.dtype, device=own.device)


def packed(families: Sequence[Family], limit: int) -> list[list[int]]:
    """Families in order, as many together as fit; those of other dtypes on the way, or of nothing, apart."""
    buckets: list[list[int]] = []
    size, last = 0, None
    for index, family in enumerate(families):
        if not buckets or family.travels != last or size + family.nbytes > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size, last = size + family.nbytes, family.travels
    return buckets
