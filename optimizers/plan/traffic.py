"""Bytes and messages of one step of a sharded optimizer, computed for all ranks without running the step.

R is the number of ranks. The indices o and r of arrays are ranks; o is the owner of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from eigengraft.blocking.blocks import Piece
from eigengraft.distributed.comm_plan import BlockGroup, pack
from eigengraft.distributed.layouts import Counts, Layout, holding
from eigengraft.distributed.param_gather import Rows, pack_rows
from eigengraft.distributed.rank_group import DIGEST, pads
from eigengraft.signals import asking, entries

from ..recipe.recipe import Recipe
from ..stacks.placement import ParamSpec
from ..stacks.rank_checks import numbers_sent
from ..stacks.stack import round_bytes
from ..step.exchange import decay_source

AxisNumbers = tuple[int, ...]
Place = tuple[AxisNumbers, AxisNumbers, tuple[Piece, ...]]
"""Shape of a parameter, its shape after small axes were merged, and the pieces (ranges of axes) of a block. Blocks for
which these are equal have equal numbers of entries on each rank."""


@dataclass
class Traffic:
    """Messages of a set of collectives. All fields except `ranks` are arrays of shape `[R]`, one number for each rank.

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

    def add_all_to_all(self, out: Counts, into: Counts, itself: Counts, receivers: Counts) -> None:
        """Add an all-to-all.

        out: bytes that each rank sends, including bytes to itself.
        into: bytes that each rank receives, including bytes from itself.
        itself: bytes that each rank sends to itself.
        receivers: number of other ranks that each rank sends to.
        """
        self.sent += out - itself
        self.received += into - itself
        self.messages += receivers
        self.buffers += out + into

    def add_all_gather(self, each: int) -> None:
        """Add an all-gather of `each` bytes from every rank."""
        others = self.ranks - 1
        self.sent += others * each
        self.received += others * each
        self.messages += others if each else 0
        self.buffers += (1 + self.ranks) * each

    def add_all_gather_uneven(self, lengths: Counts) -> None:
        """Add an all-gather of `lengths[r]` bytes from each rank r: one padded all-gather, or a broadcast by each rank.

        The function `pads` chooses between the two, as in a step.
        """
        if pads(lengths.tolist()):
            self.add_all_gather(int(lengths.max()))
            return
        self.sent += (self.ranks - 1) * lengths
        self.received += lengths.sum() - lengths
        self.messages += (self.ranks - 1) * (lengths > 0)
        self.buffers += lengths + lengths.sum()


def repeated(one: Traffic, times: int) -> Traffic:
    """Return the messages of `times` groups of ranks, each with the messages `one`."""
    found = Traffic(one.ranks * times)
    for name in ("sent", "received", "messages", "buffers"):
        setattr(found, name, np.tile(getattr(one, name), times))
    return found


def all_reduced(vectors: Sequence[int], ranks: int) -> Traffic:
    """Return the messages of ring all-reduces of float64 vectors. A rank sends 2 (R - 1) / R of each vector.

    vectors: length of each vector.
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
    """Return (messages to owners, messages from owners) of one step.

    block_groups: the blocks that are exchanged.
    rounds: for each round, the indices of the block groups that are sent together.
    layouts: layout of each parameter, by position, all over the same ranks.
    times: number of tensors that are sent to owners for each block: its gradient, and its parameter if stages read it.
    """
    ranks = len(layouts[0].boxes)
    there, back = Traffic(ranks), Traffic(ranks)
    holdings: dict[Place, Counts] = {}
    for groups in rounds:
        own = [block_groups[index] for index in groups]
        if layouts[0].replicated:
            sizes = [one.nbytes // max(len(one.blocks), 1) * count_owned(one, ranks) for one in own]
            back.add_all_gather_uneven(np.sum(sizes, axis=0))
        else:
            _exchange(own, layouts, holdings, (there, back), times)
    return there, back


def count_owned(block_group: BlockGroup, ranks: int) -> Counts:
    """Return `[R]`, the number of blocks of a block group that each rank owns."""
    return np.bincount([block.owner for block in block_group.blocks], minlength=ranks).astype(np.int64)


def _exchange(
    block_groups: Sequence[BlockGroup],
    layouts: Sequence[Layout],
    holdings: dict[Place, Counts],
    traffic: tuple[Traffic, Traffic],
    times: int,
) -> None:
    """Add the messages of one round to `traffic`.

    The owner of a block belongs to one replica, a set of ranks that together hold every entry exactly once. The owner
    receives the gradient from the ranks of this replica, and sends the update to all ranks that hold entries of the
    block.

    holdings: cache of the number of a block's entries that each rank holds, `[R]`.
    traffic: (messages to owners, messages from owners).
    times: number of tensors that are sent to owners for each block.
    """
    ranks, replicas = len(layouts[0].boxes), np.array(layouts[0].replicas)
    there, back = traffic
    meets = np.zeros((ranks, ranks), dtype=np.bool_)  # [o, r]: rank r holds entries of a block that rank o owns
    sums = np.zeros((5, ranks), dtype=np.int64)
    for block_group in block_groups:
        itemsize = block_group.gradient_dtype.itemsize, block_group.update_dtype.itemsize
        for held, owned in _alike(block_group, layouts, holdings):
            in_replica = np.bincount(replicas, weights=owned).astype(np.int64)[replicas]
            meets[np.flatnonzero(owned)] |= held > 0
            numel = block_group.nbytes // (len(block_group.blocks) * itemsize[1])
            sums[:2] += itemsize[0] * np.stack([held * in_replica, numel * owned])
            sums[2:4] += itemsize[1] * np.stack([held.sum() * owned, held * owned.sum()])
            sums[4] += held * owned
    np.fill_diagonal(meets, False)
    widths = block_groups[0].gradient_dtype.itemsize, block_groups[0].update_dtype.itemsize
    same = replicas[:, None] == replicas
    for _ in range(times):
        there.add_all_to_all(sums[0], sums[1], sums[4] * widths[0], (meets & same).sum(0))
    back.add_all_to_all(sums[2], sums[3], sums[4] * widths[1], meets.sum(1))


def _alike(
    block_group: BlockGroup, layouts: Sequence[Layout], holdings: dict[Place, Counts]
) -> Iterator[tuple[Counts, Counts]]:
    """Yield (c, n), both `[R]`, for each set of blocks with the same place in parameters of the same shape.

    c[r] is the number of a block's entries that rank r holds, equal for all blocks of the set. n[r] is the number of
    these blocks that rank r owns.

    holdings: cache of c.
    """
    owners: dict[Place, list[int]] = {}
    for block in block_group.blocks:
        grid, shape = block.grid, layouts[block.position].shape
        place = (shape, grid.merged, grid.pieces)
        if place not in holdings:
            holdings[place] = holding(layouts[block.position], grid)
        owners.setdefault(place, []).append(block.owner)
    for where, own in owners.items():
        yield holdings[where], np.bincount(own, minlength=len(holdings[where])).astype(np.int64)


def step_traffic(
    recipe: Recipe,
    specs: Sequence[ParamSpec],
    block_groups: Sequence[BlockGroup],
    layouts: Sequence[Layout],
    plain: bool,
    groups: int = 1,
) -> dict[str, Traffic]:
    """Return the messages of a step by purpose: "gradients", "updates", "agreement" and "synchronization".

    "gradients" has all messages to owners: gradients, parameters if weight decay is added to directions, and signals
    with one value for each entry. "updates" has the messages from owners. "agreement" has the all-reduce by which ranks
    check that they make the same step. "synchronization" has the all-to-all in which ranks compare digests of their
    next collective. It precedes that all-reduce, and only gloo needs it.

    plain: True if parameters are plain tensors. Ranks then compare norms of gradients.
    groups: number of groups of ranks. Each group computes all updates.
    """
    used, ranks = [recipe.rules()[path] for path in dict.fromkeys(s.path for s in specs)], len(layouts[0].boxes)
    replicated = all(layouts[block.position].replicated for group in block_groups for block in group.blocks)
    asked = asking(pair for rule in used for pair in rule.stages())
    decays = any(decay_source(recipe, path) == "parameters" for path in dict.fromkeys(s.path for s in specs))
    norms = "parameter_rms" in asked and not replicated
    rounds = pack(block_groups, round_bytes(specs, recipe, ranks)) if ranks > 1 else []
    begun = 2 * len(rounds) if recipe.distribution.overlap_backward and not replicated else 0
    there, back = wire(block_groups, rounds, layouts, 1 + decays + entries(asked))
    add_gathered_parts(back, specs, recipe.distribution.message)
    return {
        "gradients": repeated(there, groups),
        "updates": repeated(back, groups),
        "agreement": all_reduced([numbers_sent(len(specs), plain) + begun, *[len(specs)] * norms], groups * ranks),
        "synchronization": _synchronization(groups * ranks),
    }


def add_gathered_parts(found: Traffic, specs: Sequence[ParamSpec], limit: int) -> None:
    """Add the messages of shards that several ranks hold and update entry by entry.

    Each of these ranks updates a part of the shard, and sends the part to the others.
    """
    dtypes = {position: spec.dtype for position, spec in enumerate(specs)}
    placed = [(position, spec.placement) for position, spec in enumerate(specs) if spec.placement is not None]
    own = {position: placement.layout for position, placement in placed if placement.parts is not None}
    whole = {position: layout for position, layout in own.items() if layout.replicated}
    for message in pack_rows(whole, dtypes, limit):
        entries = sum((rows.stop - rows.start) * math.prod(whole[rows.position].shape[1:]) for rows in message)
        found.add_all_gather(entries * dtypes[message[0].position].itemsize)
    for message in pack_rows({position: own[position] for position in own if position not in whole}, dtypes, limit):
        _add_parts(found, [(rows, own[rows.position]) for rows in message], dtypes[message[0].position].itemsize)


def _add_parts(found: Traffic, message: Sequence[tuple[Rows, Layout]], width: int) -> None:
    """Add an all-to-all in which ranks that hold the same shard send each other the rows that they updated.

    message: the rows that are sent, as pairs (rows of a parameter, layout of the parameter).
    width: bytes of an entry.
    """
    out, into = np.zeros((2, found.ranks), dtype=np.int64)
    others: list[set[int]] = [set() for _ in range(found.ranks)]
    for rows, layout in message:
        assert layout.parts is not None
        sizes = np.array([width * rows.numel(box.shape) for box in layout.parts.boxes], dtype=np.int64)
        for same in set(layout.holders):
            here = list(same)
            out[here] += (len(here) - 1) * sizes[here]
            into[here] += sizes[here].sum() - sizes[here]
            for rank in here:
                others[rank].update(here if sizes[rank] else ())
    receivers = np.array([len(own - {rank}) for rank, own in enumerate(others)])
    found.add_all_to_all(out, into, np.zeros(found.ranks, dtype=np.int64), receivers)


def _synchronization(ranks: int) -> Traffic:
    """Return the all-to-all in which every rank sends a digest of its next collective to every other rank."""
    found = Traffic(ranks)
    each = np.full(ranks, DIGEST, dtype=np.int64)
    found.add_all_to_all(ranks * each, ranks * each, each, np.full(ranks, ranks - 1))
    return found if ranks > 1 else Traffic(ranks)
