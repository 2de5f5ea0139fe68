"""Bytes and messages of one step of a sharded optimizer, computed for all ranks without running the step.

R is the number of ranks. The indices o and r of arrays are ranks; o is the owner of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eigengraft.distributed.comm_plan import BlockGroup, pack
from eigengraft.distributed.layouts import Counts, Layout, holding
from eigengraft.distributed.param_gather import pack_rows
from eigengraft.distributed.rank_group import DIGEST, pads
from eigengraft.signals import asking, entries

from ..recipe.recipe import Recipe
from ..stacks.placement import ParamSpec
from ..stacks.rank_checks import numbers_sent
from ..stacks.stack import round_bytes
from ..step.exchange import gathers_decaying


@dataclass
class Traffic:
    """The traffic of a set of collectives. All fields except `ranks` are arrays `[R]`, one number for each rank.

    ranks: number of ranks.
    sent: bytes sent to other ranks.
    received: bytes received from other ranks.
    messages: number of other ranks that a rank sends to, summed over collectives.
    buffers: bytes that collectives read and write, including messages of a rank to itself.
    """

    ranks: int
    sent: Counts = field(init=False)
    received: Counts = field(init=False)
    messages: Counts = field(init=False)
    buffers: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.sent, self.received, self.messages, self.buffers = np.zeros((4, self.ranks), dtype=np.int64)

    def add_all_to_all(self, sent: Counts) -> None:
        """Add an all-to-all.

        sent: `[R, R]`, bytes that the rank of the row sends to the rank of the column.
        """
        others = sent - np.diag(sent.diagonal())
        self.sent += others.sum(1)
        self.received += others.sum(0)
        self.messages += (others > 0).sum(1)
        self.buffers += sent.sum(1) + sent.sum(0)

    def add_all_gather(self, lengths: Counts) -> None:
        """Add an all-gather of `lengths[r]` bytes from each rank r: one padded all-gather, or a broadcast by each rank.

        The function `pads` chooses between the two. Steps of an optimizer use the same function.
        """
        lengths = np.full_like(lengths, lengths.max()) if pads(lengths.tolist()) else lengths
        self.sent += (self.ranks - 1) * lengths
        self.received += lengths.sum() - lengths
        self.messages += (self.ranks - 1) * (lengths > 0)
        self.buffers += lengths + lengths.sum()


def repeated(one: Traffic, times: int) -> Traffic:
    """Return the traffic of `times` groups of ranks, each with the traffic `one`."""
    found = Traffic(one.ranks * times)
    for name in ("sent", "received", "messages", "buffers"):
        setattr(found, name, np.tile(getattr(one, name), times))
    return found


def all_reduced(vectors: Sequence[int], ranks: int) -> Traffic:
    """Return the traffic of all-reduces of float64 vectors over R ranks, one for each vector.

    In a ring, each rank sends and receives 2 (R - 1) / R times the bytes of the vector.

    vectors: length of each vector.
    ranks: R.
    """
    found = Traffic(ranks)
    for numbers in vectors if ranks > 1 else ():
        each = -(-2 * (ranks - 1) * 8 * numbers // ranks)
        found.sent += each
        found.received += each
        found.messages += 1
        found.buffers += 8 * numbers
    return found


def wire(
    block_groups: Sequence[BlockGroup], rounds: Sequence[Sequence[int]], layouts: Sequence[Layout], times: int
) -> tuple[Traffic, Traffic]:
    """Return the traffic of one step to the owners of blocks, and the traffic from the owners.

    block_groups: the blocks that are exchanged.
    rounds: for each round, the indices of the block groups that are sent together.
    layouts: layout of each parameter, by position. All layouts have the same ranks.
    times: number of tensors that are sent to the owner of each block. All have the shape of the block: its gradient,
        and possibly its parameter and signals.
    """
    ranks, replicas = len(layouts[0].boxes), np.array(layouts[0].replicas)
    there, back = Traffic(ranks), Traffic(ranks)
    # The values are `[R]`, the number of entries of a block that each rank holds. The keys are all facts on which the
    # number depends: the shapes of the parameter, and the ranges of indices (`pieces`) that form the block.
    holdings = dict[tuple[object, ...], Counts]()
    for groups in rounds:
        own = [block_groups[index] for index in groups]
        if layouts[0].replicated:
            sizes = [one.nbytes // max(len(one.blocks), 1) * count_owned(one, ranks) for one in own]
            back.add_all_gather(np.sum(sizes, axis=0))
            continue
        entries = np.zeros((ranks, ranks), dtype=np.int64)  # [o, r]: entries of the blocks of owner o that rank r holds
        for block in (block for group in own for block in group.blocks):
            place = (layouts[block.position].shape, block.grid.merged, block.grid.pieces)
            if place not in holdings:
                holdings[place] = holding(layouts[block.position], block.grid)
            entries[block.owner] += holdings[place]
        # A replica is a set of ranks that together hold every entry once. An owner receives gradients from the ranks of
        # its own replica alone, and sends updates to the ranks of all replicas that hold entries of the block.
        for _ in range(times):
            there.add_all_to_all(own[0].gradient_dtype.itemsize * entries.T * (replicas[:, None] == replicas))
        back.add_all_to_all(own[0].update_dtype.itemsize * entries)
    return there, back


def count_owned(block_group: BlockGroup, ranks: int) -> Counts:
    """Return `[R]`, the number of blocks of a block group that each of R ranks owns."""
    return np.bincount([block.owner for block in block_group.blocks], minlength=ranks).astype(np.int64)


def step_traffic(
    recipe: Recipe,
    specs: Sequence[ParamSpec],
    block_groups: Sequence[BlockGroup],
    layouts: Sequence[Layout],
    plain: bool,
    groups: int,
) -> dict[str, Traffic]:
    """Return the traffic of a step by purpose.

    "gradients": bytes sent to the owners of blocks: gradients, parameters if weight decay is added to directions, and
        signals with one value for each entry.
    "updates": bytes sent by the owners of blocks.
    "agreement": an all-reduce, by which ranks check that they make the same step. If stages need the root mean squares
        of sharded parameters, a second all-reduce adds up their squares.
    "synchronization": an all-to-all before that all-reduce, in which ranks compare hashes of their next collective.
        Only gloo needs it.

    plain: True if parameters are plain tensors. Ranks then compare norms of gradients too.
    groups: number of groups of ranks. Each group computes the updates of all parameters.
    """
    used, ranks = [recipe.rules()[path] for path in dict.fromkeys(s.path for s in specs)], len(layouts[0].boxes)
    replicated = all(layouts[block.position].replicated for group in block_groups for block in group.blocks)
    asked = asking(pair for rule in used for pair in rule.stages())
    decays = any(gathers_decaying(recipe, path) for path in dict.fromkeys(s.path for s in specs))
    norms = "parameter_rms" in asked and not replicated
    rounds = pack(block_groups, round_bytes(specs, recipe, ranks)) if ranks > 1 else []
    begun = 2 * len(rounds) if recipe.distribution.overlap_backward and not replicated else 0
    there, back = wire(block_groups, rounds, layouts, 1 + decays + entries(asked))
    add_gathered_parts(back, specs, recipe.distribution.message)
    synchronization = Traffic(groups * ranks)
    if groups * ranks > 1:
        synchronization.add_all_to_all(np.full((groups * ranks, groups * ranks), DIGEST))
    return {
        "gradients": repeated(there, groups),
        "updates": repeated(back, groups),
        "agreement": all_reduced([numbers_sent(len(specs), plain) + begun, *[len(specs)] * norms], groups * ranks),
        "synchronization": synchronization,
    }


def add_gathered_parts(found: Traffic, specs: Sequence[ParamSpec], limit: int) -> None:
    """Add the messages about shards that several ranks hold and whose update is entry-wise.

    Each rank that holds such a shard updates a part of it, and sends this part to the other ranks that hold the shard.

    found: the traffic to which the messages are added.
    limit: most bytes that all ranks with the same shards send together in one round of messages.
    """
    dtypes = {position: spec.dtype for position, spec in enumerate(specs)}
    own = {position: spec.placed.layout for position, spec in enumerate(specs) if spec.placed.parts is not None}
    whole = {position: layout for position, layout in own.items() if layout.replicated}
    for message in pack_rows(whole, dtypes, limit):
        entries = sum((rows.stop - rows.start) * math.prod(whole[rows.position].shape[1:]) for rows in message)
        found.add_all_gather(np.full(found.ranks, entries * dtypes[message[0].position].itemsize))
    for message in pack_rows({position: own[position] for position in own if position not in whole}, dtypes, limit):
        sent = np.zeros((found.ranks, found.ranks), dtype=np.int64)
        for rows in message:
            layout, width = own[rows.position], dtypes[rows.position].itemsize
            assert layout.parts is not None
            for rank, (box, same) in enumerate(zip(layout.parts.boxes, layout.holders, strict=True)):
                sent[rank, list(same)] += width * rows.numel(box.shape)
        np.fill_diagonal(sent, 0)
        found.add_all_to_all(sent)
