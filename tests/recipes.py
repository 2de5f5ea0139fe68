"""Which of the shipped recipes are asked for every option, and which stand for others of the same stages."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from eigengraft import load_recipe, shipped_recipes
from eigengraft.optimizers.signals import OWN
from eigengraft.preconditioners import walk
from eigengraft.signals import requested

SHIPPED = shipped_recipes()
loaded = cache(load_recipe)
"""A shipped recipe by name."""


def without_routes(declaration: dict[str, Any]) -> dict[str, Any]:
    """The declaration of a recipe of which all parameters take the update, without the storage of its routes."""
    storage = {key: value for key, value in declaration.get("storage", {}).items() if not key.startswith("routes.")}
    return {**declaration, "routes": [], "storage": storage}


def stage_kinds(name: str) -> frozenset[str]:
    """The kinds of all stages of a recipe, those within stages included."""
    return frozenset(str(getattr(stage, "kind")) for _, stage in walk(loaded(name).update))  # noqa: B009


def plain(name: str) -> bool:
    """Whether a recipe is one stage after another: then the laws, which ask each stage for every option, ask it too."""
    return not any(stage.inner(()) for _, stage in walk(loaded(name).update))


def cover(names: Iterable[str]) -> tuple[str, ...]:
    """The first recipe of each combination of stage kinds; of plain ones only those with a kind that is new there."""
    found: dict[frozenset[str], str] = {}
    known: set[str] = set()
    for name in names:
        if not plain(name) or stage_kinds(name) - known:
            found.setdefault(stage_kinds(name), name)
        if plain(name):
            known |= stage_kinds(name)
    return tuple(found.values())


def alone(name: str) -> bool:
    """Whether steps of a recipe take gradients alone, and no signal that a model or a training loop must provide."""
    asked = [own for rule in loaded(name).rules().values() for _, own in rule.listeners("")]
    some = {signal for own in asked for what in ("some", "first") for signal in getattr(own, f"requires_{what}", ())}
    return some.union(*(requested(own) for own in asked)) <= OWN


ALONE = tuple(name for name in SHIPPED if alone(name))
"""Recipes that tests can step with gradients alone; the others have tests of their own."""

COVER = cover(ALONE)
"""Recipes that stand for the others, which differ from them in numbers, statistics or storage, or in the order of
stages."""

TOGETHER = ("ademamix", "anvil", "bimaxwell_muon", "kmaxwell_muon", "kmaxwell_muon_h", "prodigy", "track3")
"""Recipes in which what becomes of a parameter depends on the steps of the run, or on sums over other parameters."""

BROAD = tuple(name for name in ALONE if name in COVER or not plain(name))
"""Recipes that are asked for what an optimizer has to do; a plain one outside of the cover does it by its stages."""


def machinery(name: str) -> frozenset[str]:
    """What a step of a recipe takes beside its stages: code of the engine that runs for some recipes only."""
    recipe = loaded(name)
    stages = [stage for rule in recipe.rules().values() for _, stage in rule.stages()]
    asked = {
        "priming": any(stage.cached_traits().lagged for stage in stages),
        "stacks of whole parameters": any(stage.cached_traits().sums for stage in stages),
        "a rotation that hooks share": any(getattr(stage, "statistic_frame", "fixed") != "fixed" for stage in stages),
        "stages after decay": any(rule.after_decay for rule in recipe.rules().values()),
        "decay in gradients": recipe.decays_in_gradient(),
        f"averaging {getattr(recipe.averaging, 'kind', '')}": recipe.averaging is not None,
    }
    return frozenset(what for what, is_asked in asked.items() if is_asked)


def beyond(names: Iterable[str], cover: Iterable[str]) -> tuple[str, ...]:
    """The recipes that ask for machinery which no recipe of the cover, nor one before them, asks for."""
    seen, found = set().union(*map(machinery, cover)), list[str]()
    for name in names:
        if machinery(name) - seen:
            found.append(name)
            seen |= machinery(name)
    return tuple(found)


BEYOND = beyond(ALONE, COVER)
"""Recipes that are asked for every option beside the cover. Storage, which many of the others differ in, is no reason:
parameters of these tests are too small to be coded, and tests of storage ask every quantizer."""


def kinds(declaration: Any) -> frozenset[str]:
    """The kinds of all components in a declaration: stages, statistics, solvers, formats, averagings and others."""
    if isinstance(declaration, dict):
        own = {declaration["kind"]} if "kind" in declaration else set()
        return frozenset(own.union(*map(kinds, declaration.values())))
    return frozenset().union(*map(kinds, declaration)) if isinstance(declaration, list) else frozenset()


def with_all_kinds(names: Iterable[str], cover: Iterable[str]) -> tuple[str, ...]:
    """The cover, and each recipe that has a component of a kind that none before it has."""
    found, seen = [*cover], set[str]()
    for name in (*cover, *(name for name in names if name not in found)):
        own = kinds(loaded(name).model_dump(mode="json"))
        if name not in found and own - seen:
            found.append(name)
        seen |= own
    return tuple(found)


ALL_KINDS = with_all_kinds(ALONE, (*COVER, *BEYOND))
"""Recipes that have every component that any recipe has: the others run the same code with other numbers."""

EVERY = [pytest.param(name, marks=() if name in COVER else pytest.mark.slow) for name in SHIPPED]
"""Every shipped recipe; those outside of the cover are slow."""

EVERY_BROAD = [pytest.param(name, marks=() if name in COVER else pytest.mark.slow) for name in BROAD]
"""Every broad recipe; those outside of the cover are slow."""


FEW = ("adam", "muoneq", "prodigy", "psgd_kron", "shampoo_4bit", "soap_muon", "splus")
"""Recipes of the cover with moments, polar factors, sums over parameters, learned factors, coded roots, a basis and
averaged iterates."""


def few_quick(names: Iterable[str]) -> list[Any]:
    """Return recipes as parameters of a test. All but those in `FEW` are slow.

    This is for tests about the optimizer around stages, or about declarations. Tests that a new stage may fail stay
    quick for the whole cover.
    """
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in names]


def with_options(usual: Any, *others: Any) -> list[Any]:
    """Every broad recipe with the usual option, and the cover and what lies beyond it with the other options.

    Tests with the usual option of recipes in the cover are quick, the others slow.
    """
    first = [pytest.param(name, usual, marks=() if name in COVER else pytest.mark.slow) for name in BROAD]
    return first + [
        pytest.param(name, option, marks=pytest.mark.slow) for option in others for name in (*COVER, *BEYOND)
    ]
