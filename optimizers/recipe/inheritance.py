"""The raw data of recipes: what a name, a file or a mapping says, completed by the recipe that it is based on.

base: shampoo_4bit                       a shipped name, the path of a YAML file, or a mapping
lr: 0.001                                fields that replace those of the base
set:                                     single values inside the fields of the base, by dotted path
  update.graft.direction.shampoo.refresh.steps: 100
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from eigengraft.chains import ChainOf
from eigengraft.component import Component, checked, plain
from eigengraft.errors import RecipeError
from eigengraft.preconditioners import Stage

from .overrides import apply_overrides
from .recipe import SCHEMA_VERSION, Recipe
from .yaml_files import read_yaml, shipped

RecipeSource = str | PathLike[str] | Mapping[str, Any] | Sequence[Any] | Recipe
"""A shipped name, the path of a YAML file, JSON text, a mapping, a list of stages, or a recipe."""


def raw_recipe(source: Any, folder: Path | None = None, derived: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields that a `RecipeSource` stands for, its base resolved; they are not validated yet.

    folder: what the path of a file is relative to; default: the working directory.
    derived: the names of the recipes that this one is the base of.
    """
    if isinstance(source, Recipe):
        return source.model_dump(mode="json")
    source = plain(source)
    if isinstance(source, Mapping):
        return _inherited(source, folder, derived)
    if isinstance(source, (str, PathLike)):
        return _named(str(source), folder, derived)
    if isinstance(source, Sequence) and not isinstance(source, bytes):
        _require_stages("update", source)
        return {"update": source}
    raise RecipeError(
        f"recipe: a name, path, mapping, list of stages or Recipe is required, got {type(source).__name__}"
    )


def _inherited(source: Mapping[str, Any], folder: Path | None, derived: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a mapping and those of its base that it does not replace."""
    if source.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise RecipeError(f"schema: version {SCHEMA_VERSION} is required, got {source['schema']!r}")
    _require_stages("update", source.get("update"))
    own = {key: value for key, value in source.items() if key not in ("schema", "base", "set")}
    changes = source.get("set", {})
    if not isinstance(changes, Mapping):
        raise RecipeError(f"set: a mapping of dotted paths to values is required, got {changes!r}")
    if "base" not in source:
        if "set" in source:
            raise RecipeError("set: a `base` whose values it changes is required, got none")
        return own
    twice = next((path for path in changes if str(path).partition(".")[0] in own), None)
    if twice is not None:
        raise RecipeError(f"set: paths into fields of the base are required, got {twice}, which is replaced beside it")
    base = _base(source["base"], folder, derived)
    try:
        return {**apply_overrides(base.model_dump(mode="json"), changes), **own}
    except RecipeError as error:
        raise RecipeError(f"set: {error}") from None


def _base(source: RecipeSource, folder: Path | None, derived: tuple[str, ...]) -> Recipe:
    try:
        return checked(Recipe, raw_recipe(source, folder, derived))
    except RecipeError as error:
        raise RecipeError("\n".join(f"base: {line}" for line in str(error).splitlines())) from None


def _named(text: str, folder: Path | None, derived: tuple[str, ...]) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            return raw_recipe(json.loads(text), folder, derived)
        except json.JSONDecodeError as error:
            raise RecipeError(f"recipe: JSON text is required, got something malformed ({error})") from None
    if text in shipped():
        return _inherited({"name": text, **shipped()[text]}, None, _longer(derived, text))
    if text.endswith((".yaml", ".yml")):
        path = Path(text) if folder is None else folder / text
        data = read_yaml(path)
        if isinstance(data, Mapping) and "axes" in data:
            raise RecipeError(f"{path}: a recipe is required, got a study; run it with `eigengraft ablate {path}`")
        if not isinstance(data, Mapping):
            raise RecipeError(f"{path}: a mapping with `update` or `base` is required, got {type(data).__name__}")
        try:
            return _inherited({"name": path.stem, **data}, path.parent, _longer(derived, str(path.resolve())))
        except RecipeError as error:
            raise RecipeError(f"in {path}:\n{error}") from None
    near = difflib.get_close_matches(text.lower(), shipped(), n=5, cutoff=0.5)
    hint = f", did you mean '{near[0]}'?" if near else ""
    listed = ", ".join(near) if near else ", ".join(name for name in sorted(shipped()) if "/" not in name)
    raise RecipeError(
        f"recipe '{text}': a shipped recipe or the path of a .yaml file is required{hint} "
        f"(shipped{' and near it' if near else ''}: {listed}; eigengraft.shipped_recipes() has all)"
    )


def _longer(derived: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The recipes that lead to a base, with its own name; a name that comes back is refused."""
    if name in derived:
        raise RecipeError(f"a recipe that is not based on itself is required, got {' -> '.join([*derived, name])}")
    return (*derived, name)


def _require_stages(path: str, chain: Any) -> None:
    """Raises RecipeError for a recipe's name where a stage is required, which the nearest stage would not explain."""
    for name in _kinds(chain):
        if name in shipped() and name not in Stage.members:
            stages = f"write `base: {name}`, or its stages, which `eigengraft show {name}` prints"
            raise RecipeError(f"{path}.{name}: a stage is required, got the name of a recipe; {stages}")


def _kinds(chain: Any) -> Iterator[str]:
    """The kinds of the stages of a raw chain, and of the chains inside them."""
    for stage in chain if isinstance(chain, (list, tuple)) else (chain,):
        kind = stage.get("kind") if isinstance(stage, Mapping) else stage
        if isinstance(kind, str):
            yield kind
            yield from _inside(Stage.members.get(kind), stage)


def _inside(component: type[Component] | None, raw: Any) -> Iterator[str]:
    """The kinds of the stages in fields that hold chains, or components with chains of their own, as `sum` does."""
    if component is None or not isinstance(raw, Mapping):
        return
    for name, field in component.model_fields.items():
        value = raw.get(field.alias or name)
        if any(isinstance(mark, ChainOf) and mark.family == "stage" for mark in field.metadata):
            yield from _kinds(value)
            continue
        for part in get_args(field.annotation) or (field.annotation,):
            if isinstance(part, type) and issubclass(part, Component) and not part.is_family():
                for one in value if isinstance(value, (list, tuple)) else (value,):
                    yield from _inside(part, one)
