"""Messages of one step of a divided optimizer, by what is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eigengraft.distributed.comm_plan import BlockGroup, pack
from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.param_gather import Rows, pack_rows
from eigengraft.distributed.rank_group import DIGEST
from eigengraft.signals import asking, entries

from ..recipe.recipe import Recipe
from ..stacks.block_groups import round_bytes
from ..stacks.placement import ParamSpec
from ..stacks.rank_checks import numbers_sent
from ..step.exchange import decay_source
from .traffic import Traffic, all_reduced, repeated, together, wire


def step_traffic(
    recipe: Recipe,
    specs: Sequence[ParamSpec],
    block_groups: Sequence[BlockGroup],
    layouts: Sequence[Layout],
    plain: bool,
    groups: int = 1,
) -> dict[str, Traffic]:
    """Return the messages of a step: "gradients" to owners, "updates" back, the "agreement" on gradients, and on gloo
    the "synchronization" before it.

    Sent like gradients: parameters, if weight decay is added to directions; signals with entries. plain: whether
    parameters are plain tensors, whose gradients ranks compare by norms. groups: number of groups of ranks, each of
    which computes all updates.
    """
    used, ranks = [recipe.updates()[path] for path in dict.fromkeys(s.path for s in specs)], len(layouts[0].boxes)
    replicated = all(layouts[block.position].replicated for group in block_groups for block in group.blocks)
    asked = asking(pair for rule in used for pair in rule.stages())
    decays = any(decay_source(recipe, path) == "parameters" for path in dict.fromkeys(s.path for s in specs))
    norms = "parameter_rms" in asked and not replicated
    rounds = pack(block_groups, round_bytes(specs, recipe, ranks)) if ranks > 1 else []
    begun = 2 * len(rounds) if recipe.distribution.overlap_backward and not replicated else 0
    there, back = wire(block_groups, rounds, layouts, 1 + decays + entries(asked))
    rows = gathered_parts(specs, ranks, recipe.distribution.message)
    return {
        "gradients": repeated(there, groups),
        "updates": repeated(together(back, rows), groups),
        "agreement": all_reduced([numbers_sent(len(specs), plain) + begun, *[len(specs)] * norms], groups * ranks),
        "synchronization": _synchronization(groups * ranks),
    }


def gathered_parts(specs: Sequence[ParamSpec], ranks: int, limit: int) -> Traffic:
    """Parts that each rank has updated of what several ranks hold, sent to the others that hold the same."""
    found, dtypes = Traffic(ranks), {position: spec.dtype for position, spec in enumerate(specs)}
    placed = [(position, spec.placement) for position, spec in enumerate(specs) if spec.placement is not None]
    own = {position: placement.layout for position, placement in placed if placement.parts is not None}
    whole = {position: layout for position, layout in own.items() if layout.replicated}
    for message in pack_rows(whole, dtypes, limit):
        entries = sum((rows.stop - rows.start) * math.prod(whole[rows.position].shape[1:]) for rows in message)
        found.add_all_gather(entries * dtypes[message[0].position].itemsize)
    for message in pack_rows({position: own[position] for position in own if position not in whole}, dtypes, limit):
        _add_parts(found, [(rows, own[rows.position]) for rows in message], dtypes[message[0].position].itemsize)
    return found


def _add_parts(found: Traffic, message: Sequence[tuple[Rows, Layout]], width: int) -> None:
    """Adds an all-to-all of rows of the parts of shards, of entries with that many bytes."""
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
    """The digest of what comes next that every rank sends every other."""
    found = Traffic(ranks)
    each = np.full(ranks, DIGEST, dtype=np.int64)
    found.add_all_to_all(ranks * each, ranks * each, each, np.full(ranks, ranks - 1))
    return found if ranks > 1 else Traffic(ranks)
