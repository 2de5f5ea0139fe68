"""Loading of recipes, from whatever a user may name one by."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

from eigengraft.component import checked
from eigengraft.errors import RecipeError

from .inheritance import RecipeSource as RecipeSource
from .inheritance import raw_recipe
from .overrides import Overrides, assign_paths, json_value, override_pairs
from .recipe import Recipe
from .yaml_files import shipped


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    return tuple(sorted(shipped()))


def load_recipe(source: RecipeSource, overrides: Overrides = (), parse: Callable[[str], Any] = json_value) -> Recipe:
    """The recipe that `source` names, with every override applied in order.

    overrides: a mapping {dotted path: value}, or strings "dotted.path=value" whose values `parse` reads.

    Raises RecipeError with a line for each fault: path, what was required, what was got.
    """
    recipe = source if isinstance(source, Recipe) else _checked(source)
    changes = override_pairs(overrides, parse)
    return checked(Recipe, assign_paths(recipe.model_dump(mode="json"), changes)) if changes else recipe


def _checked(source: Any) -> Recipe:
    raw = raw_recipe(source)
    if not (isinstance(source, (str, PathLike)) and str(source).endswith((".yaml", ".yml"))):
        return checked(Recipe, raw)
    try:
        return checked(Recipe, raw)
    except RecipeError as error:
        raise RecipeError(f"in {source}:\n{error}") from None
