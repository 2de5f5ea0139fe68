"""From what a user names to a recipe."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from eigengraft.component import RecipeError, checked

from .overrides import Overrides, assign_paths, json_value, override_pairs
from .recipe import SCHEMA_VERSION, Recipe
from .yaml_files import read_yaml, shipped

Source = str | PathLike[str] | Mapping[str, Any] | Sequence[Any] | Recipe
"""A shipped name, the path of a YAML file, JSON text, a mapping, a list of stages, or a recipe."""


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    return tuple(sorted(shipped()))


def load_recipe(source: Source, overrides: Overrides = (), parse: Callable[[str], Any] = json_value) -> Recipe:
    """The recipe that `source` names, with every override applied in order.

    overrides: a mapping {dotted path: value}, or strings "dotted.path=value" whose values `parse` reads.

    Raises RecipeError with a line for each fault: path, what was required, what was got.
    """
    recipe = source if isinstance(source, Recipe) else _checked(source)
    changes = override_pairs(overrides, parse)
    return checked(Recipe, assign_paths(recipe.model_dump(mode="json"), changes)) if changes else recipe


def _checked(source: Any) -> Recipe:
    raw = _raw(source)
    if not (isinstance(source, (str, PathLike)) and str(source).endswith((".yaml", ".yml"))):
        return checked(Recipe, raw)
    try:
        return checked(Recipe, raw)
    except RecipeError as error:
        raise RecipeError(f"in {source}:\n{error}") from None


def _raw(source: Any) -> Any:
    if isinstance(source, Mapping):
        if source.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise RecipeError(f"schema: version {SCHEMA_VERSION} is required, got {source['schema']!r}")
        return {key: value for key, value in source.items() if key != "schema"}
    if isinstance(source, (str, PathLike)):
        return _named(str(source))
    if isinstance(source, Sequence) and not isinstance(source, bytes):
        return {"update": source}
    raise RecipeError(
        f"recipe: a name, path, mapping, list of stages or Recipe is required, got {type(source).__name__}"
    )


def _named(text: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return _raw(json.loads(text))
        except json.JSONDecodeError as error:
            raise RecipeError(f"recipe: JSON text is required, got something malformed ({error})") from None
    if text in shipped():
        return {"name": text, **shipped()[text]}
    if text.endswith((".yaml", ".yml")):
        data = read_yaml(text)
        if not isinstance(data, Mapping):
            raise RecipeError(f"{text}: a mapping with `update` is required, got {type(data).__name__}")
        return {"name": Path(text).stem, **data}
    near = difflib.get_close_matches(text, shipped_recipes(), n=5, cutoff=0.5)
    hint = f", did you mean '{near[0]}'?" if near else ""
    listed = ", ".join(near) if near else ", ".join(name for name in shipped_recipes() if "/" not in name)
    raise RecipeError(
        f"recipe '{text}': a shipped recipe or the path of a .yaml file is required{hint} "
        f"(shipped{' and near it' if near else ''}: {listed}; eigengraft.shipped_recipes() has all)"
    )
