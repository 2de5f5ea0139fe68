"""From what a user names to a recipe."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from eigengraft.component import RecipeError, checked

from .files import read_yaml, shipped
from .overrides import apply_overrides, json_value
from .recipe import Recipe

Source = str | PathLike[str] | Mapping[str, Any] | Sequence[Any] | Recipe
"""A shipped name, the path of a YAML file, JSON text, a mapping, a list of stages, or a recipe."""


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    return tuple(sorted(shipped()))


def load_recipe(source: Source, overrides: Iterable[str] = (), parse: Callable[[str], Any] = json_value) -> Recipe:
    """The recipe that `source` names, with every `dotted.path=value` applied in order.

    Raises RecipeError with a line for each fault: path, what was required, what was got.
    """
    recipe = source if isinstance(source, Recipe) else checked(Recipe, _raw(source))
    overrides = list(overrides)
    if not overrides:
        return recipe
    return checked(Recipe, apply_overrides(recipe.model_dump(mode="json"), overrides, parse))


def _raw(source: Any) -> Any:
    if isinstance(source, Mapping):
        return {key: value for key, value in source.items() if key != "schema"}
    if isinstance(source, (str, PathLike)):
        return _named(str(source))
    if isinstance(source, Sequence):
        return {"update": source}
    raise RecipeError(
        f"recipe: a name, path, mapping, list of stages or Recipe is required, got {type(source).__name__}"
    )


def _named(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return _raw(json.loads(text))
    if text in shipped():
        return {"name": text, **shipped()[text]}
    if text.endswith((".yaml", ".yml")):
        data = read_yaml(text)
        if not isinstance(data, Mapping):
            raise RecipeError(f"{text}: a mapping with `update` is required, got {type(data).__name__}")
        return {"name": Path(text).stem, **data}
    near = difflib.get_close_matches(text, shipped_recipes(), n=1)
    hint = f", did you mean '{near[0]}'?" if near else ""
    raise RecipeError(
        f"recipe '{text}': a shipped recipe or the path of a .yaml file is required{hint} "
        f"(shipped: {', '.join(shipped_recipes())})"
    )
