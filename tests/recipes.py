"""Which of the shipped recipes are asked for every option, and which stand for others of the same stages."""

from collections.abc import Iterable
from typing import Any

import pytest

from eigengraft import load_recipe, shipped_recipes
from eigengraft.preconditioners import walk

SHIPPED = shipped_recipes()


def stage_kinds(name: str) -> frozenset[str]:
    """The kinds of all stages of a recipe, those within stages included."""
    return frozenset(str(getattr(stage, "kind")) for _, stage in walk(load_recipe(name).update))  # noqa: B009


def cover(names: Iterable[str]) -> tuple[str, ...]:
    """The first recipe of each combination of stage kinds."""
    found: dict[frozenset[str], str] = {}
    for name in names:
        found.setdefault(stage_kinds(name), name)
    return tuple(found.values())


COVER = cover(SHIPPED)
"""One recipe of each combination of stage kinds: the others differ from it in numbers, statistics or storage."""

EVERY = [pytest.param(name, marks=() if name in COVER else pytest.mark.slow) for name in SHIPPED]
"""Every shipped recipe; those outside of the cover are slow."""


def with_options(usual: Any, *others: Any) -> list[Any]:
    """Every shipped recipe with the usual option, and one of each combination of stages with the other options.

    Tests with the usual option of recipes in the cover are quick, the others slow.
    """
    first = [pytest.param(name, usual, marks=() if name in COVER else pytest.mark.slow) for name in SHIPPED]
    return first + [pytest.param(name, option, marks=pytest.mark.slow) for option in others for name in COVER]
