"""Which of the shipped recipes are asked for every option, and which stand for others of the same stages."""

from collections.abc import Iterable
from typing import Any

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


def with_options(usual: Any, *others: Any) -> list[tuple[str, Any]]:
    """Every shipped recipe with the usual option, and one of each combination of stages with the other options."""
    return [(name, usual) for name in SHIPPED] + [(name, option) for option in others for name in COVER]
