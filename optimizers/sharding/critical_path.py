"""The critical path of ranks: how long they wait for each other, and how many refreshes at once would end that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from eigengraft.distributed.ownership import Loads
from eigengraft.errors import warn_user

from ..recipe.recipe import Recipe
from .cost_model import common_interval
from .owners import Balance, assign_owners
from .phases import ParamKey, refresh_phases, refresh_units
from .placement import ParamSpec

WORTHWHILE = 0.05
"""Part of an interval that must be saved before fewer, larger waves of refreshes are advised."""
NEARLY = 0.02
"""Part of an interval that is not worth a larger wave."""
WAVES = (1, 2, 3, 5, 7)
"""Numbers of waves that are tried."""


class Advice(NamedTuple):
    """The number of refreshes at once for which ranks wait least.

    fields: paths of the fields `at_once` in the recipe.
    at_once: their value.
    balance: what it gives.
    """

    fields: Sequence[str]
    at_once: int
    balance: Balance


def advise(
    specs: Sequence[ParamSpec], recipe: Recipe, keys: Iterable[ParamKey], ranks: int, now: Balance
) -> Advice | None:
    """The best number of refreshes at once; None if that would save little, or if nothing is spread.

    specs: parameters that the same ranks share; their owners stay. keys: of all parameters of the optimizer. ranks:
    number of ranks that share. now: what the recipe as it is gives.
    """
    fields, known = at_once_fields(recipe, dict.fromkeys(spec.path for spec in specs)), list(keys)
    units = refresh_units(recipe, known)
    if not fields or units < 2:
        return None
    found = []
    for at_once in sorted({min(ranks, int(units)), *(int(units / waves) for waves in WAVES)} - {0, 1}):
        bare = [_without_owners(spec) for spec in specs]
        phases = refresh_phases(recipe, known, at_once)
        balance = assign_owners(bare, recipe, phases, Loads(ranks, common_interval(recipe)))
        found.append(Advice(fields, at_once, balance))
    best = max(advice.balance.efficiency for advice in found)
    if best < now.efficiency + WORTHWHILE:
        return None
    return next(advice for advice in found if advice.balance.efficiency > best - NEARLY)


def at_once_fields(recipe: Recipe, paths: Iterable[str]) -> list[str]:
    """Paths of the fields that say how many refreshes are due at once, in the updates at these paths."""
    stages = [(name, stage.cadence()) for path in paths for name, stage in recipe.updates()[path].stages(path)]
    return [
        f"{name}.refresh.at_once"
        for name, cadence in stages
        if cadence is not None and cadence.period != 1 and cadence.waves(1.0, 2) is not None
    ]


def _without_owners(spec: ParamSpec) -> ParamSpec:
    assert spec.placement is not None
    owners = None if spec.placement.owners is None else dict[int, int]()
    return replace(spec, placement=replace(spec.placement, owners=owners))


LEAST_EFFICIENCY = 0.7
"""Efficiency below which an optimizer says so."""
LEAST_WAITING = 1e10
"""Operations of an interval below which waiting is no matter: about a second of a CPU core for all ranks together."""


def warn_of_waiting(
    specs: Sequence[ParamSpec], recipe: Recipe, keys: Iterable[ParamKey], ranks: int, now: Balance
) -> None:
    """Warns if ranks spend much of an interval waiting for the one that refreshes, and says what would help."""
    waiting = now.critical_path - now.least
    if now.efficiency >= LEAST_EFFICIENCY or (waiting < LEAST_WAITING and not recipe.distribution.work):
        return
    advice = advise(specs, recipe, keys, ranks, now)
    if advice is not None:
        warn_user(
            f"{', '.join(advice.fields)}: {ranks} ranks wait for the one that refreshes, efficiency "
            f"{now.efficiency:.2f} by counted work; with {advice.at_once} it is {advice.balance.efficiency:.2f}, and "
            "the trajectory that of one process with the same value"
        )
