"""The messages for parameters that the same ranks share: entries that ranks send to the owners of blocks, and updates
that owners return.

A block group consists of equal blocks of all ranks. The blocks of a group that one rank owns form a stack on that rank.
Block groups are sent in rounds of messages, in the same order on every rank, even on a rank that owns none of their
blocks. A transfer is a set of entries of one block that are contiguous in a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

import torch
from torch import Tensor

from eigengraft.blocking.blocks import BlockGrid, Box
from eigengraft.blocking.stacks import Assembly
from eigengraft.errors import name_some

from .layouts import Layout, Region, regions
from .rank_group import RankGroup, Work

EntryView = Callable[[Tensor], Tensor]
"""Function that selects entries: it accepts this rank's shard of a tensor and returns a view of some of its entries."""
Source = Callable[[int, EntryView], Tensor | None]
"""Function of the position of a parameter and an `EntryView`. It returns the selected entries of one tensor of the
parameter, such as its gradient, or None if the parameter has no such tensor."""


@dataclass(frozen=True)
class PlacedBlock:
    """One block and the rank that owns it.

    position: position of the block's parameter among the parameters that the ranks share.
    grid: the place of the block in its parameter, as a grid that contains only this block.
    owner: rank that holds the block's state and computes its update.
    row: index of the block in the stack that the owner has for the block's group.
    """

    position: int
    grid: BlockGrid
    owner: int
    row: int


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one shape, of all ranks, that are updated by the same update rule of the recipe.

    path: path of the update rule in the recipe.
    shape: shape of a block.
    dtype: dtype in which updates of the blocks are computed.
    gradient_dtype: dtype in which gradients are sent.
    update_dtype: dtype in which updates are sent.
    device: device of the blocks.
    blocks: the blocks, in the order of their parameters.
    joined: True if the blocks are computed together with the blocks of the previous group; both groups are then sent in
        one round.
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
        """Return the blocks that a rank owns, in the order of their rows in the rank's stack."""
        return [block for block in self.blocks if block.owner == rank]

    @property
    def nbytes(self) -> int:
        """Size of the updates of all blocks, in bytes."""
        return self.update_dtype.itemsize * math.prod(self.shape) * len(self.blocks)


@dataclass(frozen=True)
class Transfer:
    """Entries that a message carries between a block and the shard of one rank. They are contiguous in the message.

    group: index of the block group.
    block: the block.
    region: the entries, as a part of the block and as a part of the parameter.
    held: all entries of the parameter that the rank holds (its shard). The entries of `region` are some of them.
    dtype: dtype in which updates of the block are computed.
    """

    group: int
    block: PlacedBlock
    region: Region
    held: Box
    dtype: torch.dtype

    @property
    def position(self) -> int:
        """Position of the block's parameter among the parameters that the ranks share."""
        return self.block.position

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the entries of this transfer, which are a box in the parameter."""
        return self.region.box.shape

    @cached_property
    def whole(self) -> bool:
        """True if this transfer has all entries of the shard `held`."""
        return self.region.box == self.held

    @cached_property
    def view(self) -> EntryView:
        """A function that accepts this rank's shard of a tensor and returns a view of the entries of this transfer."""
        return (lambda x: x) if self.whole else itemgetter(self.region.box.within(self.held))


class Message:
    """Entries that this rank sends to all ranks, or receives from all ranks, in the order of the ranks.

    transfers: all entries of the message, in order. Each item is a set of entries of one block.
    lengths: for each rank, the number of entries that are sent to it or received from it.
    """

    def __init__(self, transfers: Sequence[Sequence[Transfer]]) -> None:
        self.transfers = [transfer for own in transfers for transfer in own]
        self._sizes = [[math.prod(transfer.shape) for transfer in own] for own in transfers]
        self.lengths = [sum(sizes) for sizes in self._sizes]

    def split(self, data: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """Split the data of this message. Return a view for each of its `transfers`, in order, with the entries of the
        transfer.

        data: the sent or received entries: one tensor `[n]` for all ranks, or a list with one tensor for each rank.
        """
        parts = torch.split(data, self.lengths) if isinstance(data, Tensor) else data
        pieces = [piece for part, own in zip(parts, self._sizes, strict=True) for piece in torch.split(part, own)]
        return [piece.view(transfer.shape) for transfer, piece in zip(self.transfers, pieces, strict=True)]

    def empty(self, dtype: torch.dtype, device: torch.device, zero: bool = False) -> Tensor:
        """Return a tensor `[n]` for the n entries of this message.

        zero: True: all entries are 0. False: the entries are uninitialized.
        """
        return (torch.zeros if zero else torch.empty)(sum(self.lengths), dtype=dtype, device=device)

    def in_stacks(self, stacks: Mapping[int, Tensor]) -> list[Tensor]:
        """Return a view for each of the message's `transfers`, in order. It has the entries of the transfer in a stack.

        stacks: for each block group, the stack `[n, *block]` of this rank's blocks, by index of the group.
        """
        return [own.region.in_block(stacks[own.group][own.block.row]) for own in self.transfers]


@dataclass
class Round:
    """Messages that are sent together, by one collective in each direction: gradients to the owners of blocks, and
    updates back.

    A transfer is a set of entries that one rank holds and one rank (the owner of their block) updates.

    groups: indices of the block groups whose entries are sent.
    held: entries that this rank holds, in the order of their owners. This rank receives their updates from the owners.
    sent: those entries of `held` whose gradients this rank sends to the owners. With several copies of the model, ranks
        of different copies hold the same entries. An owner receives them only from the rank in its own copy.
    owned: entries of blocks that this rank owns, in the order of the ranks that hold the entries. This rank sends their
        updates to these ranks. If all parameters are replicated, the transfers to all ranks are equal, and only the
        transfers of this rank to itself are listed.
    received: those entries of `owned` whose gradients this rank receives.
    """

    groups: list[int]
    held: Message
    sent: Message
    owned: Message
    received: Message


class CommPlan:
    """All rounds of messages of a parameter set.

    rank_group: the ranks that share the parameters.
    layouts: for each parameter, by position, the entries that each rank holds.
    block_groups: groups of the blocks that ranks exchange, for all parameters.
    names: names of the parameters in errors, by position.
    limit: largest size of a round, in bytes of the updates of all ranks.
    starts: for each block group, the index of the first of the groups that are computed together with this group.
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
        """Return the label of a round for error messages.

        It contains the index of the round, the name of its first parameter and the number of its other parameters.
        """
        blocks = [block for group in self.rounds[index].groups for block in self.block_groups[group].blocks]
        found = list(dict.fromkeys(self.names[block.position] for block in blocks))
        return f"round {index} ({name_some(found, 1)})"

    @cached_property
    def round_of(self) -> dict[int, int]:
        """For each block group, by its index, the index of the round in which the group is sent."""
        return {group: index for index, own in enumerate(self.rounds) for group in own.groups}

    def _round(self, groups: list[int]) -> Round:
        ranks, me = range(self.rank_group.size), self.rank_group.rank
        held: list[list[Transfer]] = [[] for _ in ranks]
        owned: list[list[Transfer]] = [[] for _ in ranks]
        for group, block in ((at, own) for at in groups for own in self.block_groups[at].blocks):
            held[block.owner] += self._transfers(group, block, me)
            for rank in () if block.owner != me else (me,) if self.replicated else ranks:
                owned[rank] += self._transfers(group, block, rank)
        sent = [[transfer for transfer in own if self._sends(me, rank, transfer)] for rank, own in enumerate(held)]
        received = [[transfer for transfer in own if self._sends(rank, me, transfer)] for rank, own in enumerate(owned)]
        return Round(groups, Message(held), Message(sent), Message(owned), Message(received))

    def _transfers(self, group: int, block: PlacedBlock, rank: int) -> list[Transfer]:
        """Return the entries of a block that a rank holds, as transfers: sets of entries that are side by side in a
        message.

        group: index of the block group to which the block belongs.
        block: the block.
        rank: the rank that holds the entries.
        """
        layout = self.layouts[block.position]
        held = layout.boxes[rank]
        dtype = self.block_groups[group].dtype
        return [Transfer(group, block, region, held, dtype) for region in regions(layout.shape, block.grid, held)]

    def _sends(self, rank: int, owner: int, transfer: Transfer) -> bool:
        """Return True if a rank sends the gradients of a transfer to the owner of the block.

        A rank sends gradients only if the rank belongs to the same copy of the model (replica) as the owner.

        rank: the rank that holds the entries.
        owner: the rank that owns the block.
        transfer: the entries, which are of one block.
        """
        replicas = self.layouts[transfer.position].replicas
        return replicas[rank] == replicas[owner]

    def empty(self, group: int) -> Tensor:
        """Return an uninitialized stack `[n, *block]` for this rank's n blocks of a block group.

        group: index of the block group.
        """
        own = self.block_groups[group]
        return torch.empty(len(own.owned(self.rank_group.rank)), *own.shape, dtype=own.dtype, device=own.device)


def pack(block_groups: Sequence[BlockGroup], limit: int) -> list[list[int]]:
    """Divide block groups into rounds, and return the indices of the groups of each round, in order.

    The groups of a round have the same dtypes, and together at most `limit` bytes of updates. A larger group begins a
    round of its own. A group whose field `joined` is True is always in the round of the group before it.

    block_groups: the groups, in the order in which they are sent.
    limit: largest size of a round, in bytes of the updates of all ranks.
    """
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


Arrived = Sequence[tuple[Transfer, Tensor]]
"""Pairs (transfer, received tensor). The tensor has the updates of the transfer's entries, which the owner of the block
has sent."""


def assemble(assembly: Assembly, arrived: Arrived, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Add received updates to the updates that are being assembled. Return the updates that are now complete, by
    position of the parameter.

    An update is complete if it has all entries that this rank holds of the parameter.

    assembly: the updates of which only some entries were received. It is changed.
    arrived: the received entries.
    parameters: this rank's shard of each parameter, by position.
    """
    complete, targets, sources = dict[int, Tensor](), list[Tensor](), list[Tensor]()
    for own, values in arrived:
        at, held = own.position, parameters[own.position]
        if own.whole:
            complete[at] = values.to(own.dtype)
            continue
        targets.append(own.view(assembly.target(at, held.shape, own.dtype, held.device, values.numel())))
        sources.append(values)
    copy_all(targets, sources)
    return {**complete, **assembly.completed(list(assembly.begun))}


def reading(tensors: Sequence[Tensor | None] | Mapping[int, Tensor | None]) -> Source:
    """Return a `Source`, a function that `pack_shards` calls to read entries, for the given tensors.

    tensors: this rank's shard of a tensor for each parameter, such as its gradient, by position. None: the parameter
        has no such tensor.
    """
    return lambda position, view: None if (own := tensors[position]) is None else view(own)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target."""
    if targets:
        torch._foreach_copy_(targets, sources)


def pack_shards(plan: CommPlan, index: int, source: Source) -> Tensor:
    """Return one message `[n]` to the owners of the blocks of a round, in the order of the owners.

    A round is a set of block groups whose messages are sent together. The message has the entries of these blocks that
    this rank holds.

    index: index of the round.
    source: function that reads entries of this rank's shards. For a parameter for which it returns None, the message
        contains zeros.
    """
    own = plan.rounds[index]
    first, found = plan.block_groups[own.groups[0]], [source(x.position, x.view) for x in own.sent.transfers]
    out = own.sent.empty(first.gradient_dtype, first.device, zero=any(x is None for x in found))
    pairs = [(target, x) for target, x in zip(own.sent.split(out), found, strict=True) if x is not None]
    copy_all([target for target, _ in pairs], [x for _, x in pairs])
    return out


def send_shards(
    plan: CommPlan, index: int, name: str, message: Tensor, rank_group: RankGroup | None = None
) -> Work[Tensor]:
    """Start to send entries of this rank's shards to the ranks that own the blocks of a round.

    A round is a set of block groups whose messages are sent by one collective. All ranks call this function, because a
    rank also receives. Return the collective under way. Its result is `[m]`: the entries of all blocks that this rank
    owns, in the order of the ranks that sent them.

    index: index of the round.
    name: name of the message in errors.
    message: this rank's entries for all owners, as `pack_shards` returns them.
    rank_group: another process group of the same ranks. None: the group of the plan.
    """
    own = plan.rounds[index]
    what = f"{name} of {plan.describe(index)}"
    return (rank_group or plan.rank_group).all_to_all(message, own.sent.lengths, own.received.lengths, what)
