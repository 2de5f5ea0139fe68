"""Messages of one step of a divided optimizer, by what is sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eigengraft.chains import asking, entries
from eigengraft.distributed.comm_plan import BlockGroup, pack
from eigengraft.distributed.layouts import Layout
from eigengraft.distributed.rank_group import MEETING

from ..engine.block_groups import round_bytes
from ..recipe.recipe import Recipe
from ..sharding import fingerprint
from ..sharding.placement import ParamSpec
from .traffic import Traffic, all_reduced, gathered_rows, together, wire


def step_traffic(
    recipe: Recipe,
    specs: Sequence[ParamSpec],
    block_groups: Sequence[BlockGroup],
    layouts: Sequence[Layout],
    plain: bool,
) -> dict[str, Traffic]:
    """The "gradients" to owners, "updates" back, the "agreement" on gradients, and the "meeting" before it on gloo.

    Sent like gradients: parameters, if a stage acts after weight decay; signals with entries. plain: whether parameters
    are plain tensors, whose gradients ranks compare by norms.
    """
    used, ranks = [recipe.updates()[path] for path in dict.fromkeys(s.path for s in specs)], len(layouts[0].boxes)
    replicated = all(layouts[block.position].replicated for group in block_groups for block in group.blocks)
    asked = asking(pair for rule in used for pair in rule.stages())
    norms = "parameter_rms" in asked and not replicated
    rounds = pack(block_groups, round_bytes(specs, recipe, ranks)) if ranks > 1 else []
    begun = 2 * len(rounds) if recipe.distribution.overlap_backward and not replicated else 0
    told = (5 if plain else 3) * len(specs) + fingerprint.LENGTH + begun
    there, back = wire(block_groups, rounds, layouts, 1 + any(rule.after_decay for rule in used) + entries(asked))
    rows = gathered_rows(specs, ranks, recipe.distribution.message)
    return {
        "gradients": there,
        "updates": together(back, rows),
        "agreement": all_reduced([told, *[len(specs)] * norms], ranks),
        "meeting": _meeting(ranks),
    }


def _meeting(ranks: int) -> Traffic:
    """What every rank tells every other of what it comes to."""
    found = Traffic(ranks)
    each = np.full(ranks, MEETING, dtype=np.int64)
    found.add_all_to_all(ranks * each, ranks * each, each, np.full(ranks, ranks - 1))
    return found if ranks > 1 else Traffic(ranks)
