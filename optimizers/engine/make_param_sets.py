"""Parameter sets of a param group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eigengraft.distributed.rank_group import RankGroup

from ..recipe.recipe import Recipe
from ..sharding.assignment import Assignment
from ..sharding.phases import Phases
from .param_set import ParamSet


def make_param_sets(
    parameters: Sequence[Tensor], assignment: Assignment, recipe: Recipe, phases: Phases, chosen: Iterable[int]
) -> list[ParamSet]:
    """Fresh parameter sets for the chosen positions of a param group, one for each device and set of ranks."""
    found: dict[tuple[torch.device, RankGroup | None], list[int]] = {}
    for position in chosen:
        found.setdefault((parameters[position].device, assignment.rank_groups[position]), []).append(position)
    return [
        ParamSet([parameters[p] for p in own], [assignment.specs[p] for p in own], recipe, phases, rank_group)
        for (_, rank_group), own in found.items()
    ]


def inherit_counts(param_sets: Iterable[ParamSet], before: Iterable[ParamSet]) -> None:
    """Adds to new parameter sets what was counted of their parameters in the sets before."""
    counts = {param_set: dict(param_set.skipped) for param_set in before}
    for param_set in param_sets:
        for other, skipped in counts.items():
            if other is not param_set:
                param_set.skipped.update({name: count for name, count in skipped.items() if name in param_set.names})
