"""Loading of recipes from names, files, mappings and lists of stages, completed by the recipe in `base`.

base: shampoo_4bit                       a shipped name, the path of a YAML file, or a mapping
lr: 0.001                                a field that replaces the field of the base
set:                                     values inside fields of the base, by dotted path
  update.graft.direction.shampoo.refresh.steps: 100

User files are YAML 1.2. Shipped recipes are read from JSON, so that the core needs no YAML library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, lru_cache
from importlib import resources
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from eigengraft.component import Component, as_declared, plain, short, stage_name, validated
from eigengraft.errors import RecipeError, did_you_mean, near_names, near_path
from eigengraft.preconditioners import Stage
from eigengraft.slots import dotted

from .overrides import Overrides, apply_overrides, assign_paths, json_value, override_pairs
from .recipe import SCHEMA_VERSION, Recipe, adam_route

YAML_SUFFIXES = (".yaml", ".yml")
"""Suffixes of the names of YAML files."""

RecipeSource = str | PathLike[str] | Mapping[str, Any] | Sequence[Any] | Recipe
"""A shipped name, the path of a YAML file, JSON text, a mapping, a list of stages, or a recipe."""


def shipped_recipes() -> tuple[str, ...]:
    """Return the names of the recipes that come with the package."""
    return tuple(sorted(shipped()))


def load_recipe(source: RecipeSource, overrides: Overrides = (), parse: Callable[[str], Any] = json_value) -> Recipe:
    """Load a recipe and apply overrides to it in order.

    Args:
        source: name of a shipped recipe, path of a YAML file, JSON text, mapping, list of stages, or `Recipe`.
        overrides: a mapping {dotted path: value}, or strings "dotted.path=value".
        parse: function that converts the value of a string override.

    Raises:
        RecipeError: the recipe is invalid. The message has a line for each fault, with its path.
    """
    recipe = source if isinstance(source, Recipe) else _validated(source)
    changes = override_pairs(overrides, parse) if overrides is not None and overrides != () else []
    return validated(Recipe, assign_paths(recipe.model_dump(mode="json"), changes)) if changes else recipe


@cache
def _shipped(name: str) -> Recipe:
    """Return the shipped recipe of a name, which is validated once in a process. Callers must not change it."""
    return validated(Recipe, raw_recipe(name))


def _validated(source: Any) -> Recipe:
    if isinstance(source, str) and source in shipped():
        recipe = _shipped(source).model_copy()
        # A caller may change these two mappings, unlike components. Copies keep the cached recipe unchanged.
        vars(recipe).update(storage={**recipe.storage}, expect={**recipe.expect})
        return recipe
    raw = raw_recipe(source)
    if not (isinstance(source, (str, PathLike)) and str(source).endswith(YAML_SUFFIXES)):
        return validated(Recipe, raw)
    try:
        return validated(Recipe, raw)
    except RecipeError as error:
        raise RecipeError(f"in {source}:\n{error}") from None


def raw_recipe(source: Any, folder: Path | None = None, derived: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of a recipe with its base resolved. The fields are not validated.

    source: the recipe in any form that `load_recipe` accepts.
    folder: folder to which the path of a file is relative; None means the working directory.
    derived: names of the recipes whose `base` leads to this one, in order, to detect cycles.

    Raises RecipeError if the source has another form, a name or file is unknown, or bases form a cycle.
    """
    if isinstance(source, Recipe):
        return source.model_dump(mode="json")
    source = plain(source)
    if isinstance(source, Mapping):
        return _inherited(source, folder, derived)
    if isinstance(source, (str, PathLike)):
        return _named(str(source), folder, derived)
    if isinstance(source, Sequence) and not isinstance(source, bytes):
        return {"update": source}
    raise RecipeError(f"recipe: it must be a name, path, mapping, list of stages or Recipe, got {_described(source)}")


def _described(source: object) -> str:
    """Return a text with the type of an object that is no recipe.

    For classes, models and optimizers of torch, and for learning rates, the text also has advice.
    """
    kind, what = (source, "class ") if isinstance(source, type) else (type(source), "")
    if issubclass(kind, torch.optim.Optimizer):
        name = kind.__name__.lower()
        remedy = f'"{name}", as in compose("{name}", model)' if name in shipped_recipes() else "a recipe"
        return (
            f"the torch optimizer {what}{kind.__name__}; give {remedy} (eigengraft.shipped_recipes() returns all names)"
        )
    if isinstance(source, torch.nn.Module):
        return f"{kind.__name__}; give the recipe first, then the model, as in compose(recipe, model)"
    rate = isinstance(source, (int, float)) and not isinstance(source, bool)
    if isinstance(source, (int, float, torch.Tensor)) and (rate or getattr(source, "ndim", 1) == 0):
        return f"{kind.__name__}; give a learning rate by its name, as in lr={float(source):g}"
    return f"the class {kind.__name__}; write {kind.__name__}()" if what else kind.__name__


def _inherited(source: Mapping[str, Any], folder: Path | None, derived: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a recipe that is given as a mapping, completed by the recipe in its field `base`.

    The values in the field `set` replace values of the base. The mapping's own fields replace entire fields of the
    base. Without a `base` the result has only the mapping's own fields.

    source: the mapping.
    folder, derived: as in `raw_recipe`.
    """
    if source.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise RecipeError(
            f"schema: this version of eigengraft reads schema {SCHEMA_VERSION}, got {source['schema']!r}; use the "
            "version that wrote the recipe, or remove `schema` and correct the fields that are refused"
        )
    own = {key: value for key, value in source.items() if key not in ("schema", "base", "set")}
    changes = source.get("set", {})
    if not isinstance(changes, Mapping):
        raise RecipeError(f"set: it must be a mapping of dotted paths to values, got {changes!r}")
    if "base" not in source:
        if "set" in source:
            raise RecipeError(
                "set: changes values of the `base`, but this recipe has no `base`; add `base`, or remove set"
            )
        return own
    twice = next((path for path in changes if str(path).partition(".")[0] in own), None)
    if twice is not None:
        raise RecipeError(
            f"set: {twice} cannot be set, because this recipe also has the field `{str(twice).partition('.')[0]}`, "
            "which replaces the one of its base; remove one of the two"
        )
    base = _base(source["base"], folder, derived)
    try:
        return {**apply_overrides(base.model_dump(mode="json"), changes), **own}
    except RecipeError as error:
        raise RecipeError(f"set: {error}") from None


def _base(source: RecipeSource, folder: Path | None, derived: tuple[str, ...]) -> Recipe:
    if isinstance(source, str) and source in shipped():
        return _shipped(source)
    try:
        return validated(Recipe, raw_recipe(source, folder, derived))
    except RecipeError as error:
        raise RecipeError("\n".join(f"base: {line}" for line in str(error).splitlines())) from None


def short_form(recipe: Recipe, base: str | None = None) -> dict[str, Any]:
    """Return the shortest declaration of a recipe: the fields that differ from a base, or from the defaults.

    base: name of a shipped recipe. None means the shipped recipe with the name of `recipe`; if there is no such recipe,
        the result has no base.
    """
    base = recipe.name if base is None and recipe.name in shipped() else base
    if base is None:
        own, inner = recipe.declaration(short=True), {}
    else:
        old = load_recipe(base)
        changes = dict(_changes(old, recipe, old.model_dump(mode="json"), recipe.model_dump(mode="json")))
        own = {path: value for path, value in changes.items() if "." not in path}
        inner = {path: value for path, value in changes.items() if "." in path}
    if "routes" in own:
        own["routes"] = ["default" if r == adam_route() else own["routes"][k] for k, r in enumerate(recipe.routes)]
    first = {"base": base, "name": own.get("name"), "about": own.get("about")}
    return {**{key: v for key, v in first.items() if v is not None}, **own, **({"set": inner} if inner else {})}


def _changes(before: Any, after: Any, old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of the fields that must be set to turn `before` into `after`.

    If the stages of a chain, or the kind of a component, differ between `before` and `after`, the value is the entire
    chain or component of `after`.

    before, after: two components, or two values of one field.
    old, new: `before` and `after` as plain data.
    path: dotted path of the two values; "" for whole recipes.
    """
    if old == new:
        return
    names = [stage_name(one) for one in new] if isinstance(new, list) else []
    if isinstance(after, Component) and type(before) is type(after) and old.keys() == new.keys():
        for name, field in type(after).model_fields.items():
            key = field.alias or name
            if key in new:
                here = dotted(path, key)
                yield from _changes(getattr(before, name), getattr(after, name), old[key], new[key], here)
    elif isinstance(old, list) and all(names) and names == [stage_name(one) for one in old] and path:
        for place, stage in enumerate(names):
            yield from _changes(before[place], after[place], old[place], new[place], f"{path}.{stage}")
    else:
        yield path, as_declared(after, new, short=True)


def _named(text: str, folder: Path | None, derived: tuple[str, ...]) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            return raw_recipe(json.loads(text), folder, derived)
        except json.JSONDecodeError as error:
            raise RecipeError(f"recipe: malformed JSON text ({error})") from None
    if text in shipped():
        return _inherited({"name": text, **shipped()[text]}, None, _longer(derived, text))
    if text.endswith(YAML_SUFFIXES):
        path = Path(text) if folder is None else folder / text
        data = read_yaml(path)
        if isinstance(data, Mapping) and "axes" in data:
            raise RecipeError(f"{path}: this is a study, not a recipe; run it with `eigengraft ablate {path}`")
        if not isinstance(data, Mapping):
            raise RecipeError(f"{path}: it must be a mapping with `update` or `base`, got {type(data).__name__}")
        try:
            return _inherited({"name": path.stem, **data}, path.parent, _longer(derived, str(path.resolve())))
        except RecipeError as error:
            raise RecipeError(f"in {path}:\n{error}") from None
    near = near_names(text.lower(), shipped(), 0.5)[:5]
    listed = f"similar shipped recipes: {', '.join(near)}; " if near else ""
    raise RecipeError(
        f"recipe '{text}': there is no shipped recipe of that name, and it is not the path of a .yaml file"
        f"{did_you_mean(text, near, first=near)} "
        f"({listed}`eigengraft list recipes` prints all, and eigengraft.shipped_recipes() returns their names)"
    )


def _longer(derived: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the list `derived` with `name` appended.

    derived: names of recipes, each of which has the next one as its base.

    Raises:
        RecipeError: `derived` contains `name` already, so that the recipe would be its own base.
    """
    if name in derived:
        raise RecipeError(f"the recipe is based on itself: {' -> '.join([*derived, name])}")
    return (*derived, name)


def _recipe_advice(kind: str) -> str:
    """Return the end of the error message for an unknown kind of stage if it is the name of a recipe; else ""."""
    stages = f"write `base: {kind}`, or its stages, which `eigengraft show {kind}` prints"
    return f", which is the name of a recipe; {stages}" if kind in shipped() else ""


Stage.kind_advice.append(_recipe_advice)


def read_yaml(path: str | Path) -> Any:
    """Return the plain data of a YAML 1.2 file.

    Raises:
        RecipeError: the file does not exist, cannot be read, is Python code, or is malformed. The message has line and
            column.
    """
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"{path}: there is no such file{near_path(path, (path.suffix, *YAML_SUFFIXES))}")
    if path.suffix == ".py":
        raise RecipeError(f"{path}: a YAML file is required, got a Python file; name it in `imports` of a YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: the file cannot be read as UTF-8 ({error})") from None
    return parse_yaml(text, str(path))


_ENTRIES = "; close it, or put commas between its entries"
_OPENED = {
    "while parsing a flow mapping": ("brace", _ENTRIES),
    "while parsing a flow sequence": ("bracket", _ENTRIES),
    "while scanning a quoted scalar": ("quote", "; close it"),
}
"""For each construct in which ruamel.yaml may find an error, the name of the character that opens the construct, and
what to do if it is not closed."""


def parse_yaml(text: str, source: str = "value") -> Any:
    """Return the plain data of YAML 1.2 text.

    source: name of the text in error messages.

    Raises:
        RecipeError: the text is malformed. The message has line and column of the error. If a brace, bracket or quote
            is not closed, the message has the place of this character. The parser sees the error only in a later line.
    """
    try:
        from ruamel.yaml.error import MarkedYAMLError, YAMLError
    except ModuleNotFoundError:
        raise RecipeError(f"{source}: ruamel.yaml is not installed; run `pip install ruamel.yaml`") from None
    try:
        return deepcopy(_loaded(text))
    except MarkedYAMLError as error:
        problem, mark, remedy = error.problem or "malformed YAML", error.problem_mark, ""
        if error.context in _OPENED:
            opened, remedy = _OPENED[error.context]
            problem = f"the {opened} is not closed before {_place(mark)} ({problem})"
            mark = error.context_mark
        elif "\\t" in problem:
            remedy = "; YAML is indented with spaces, not with tabs"
        elif twice := re.match(r'found duplicate key "(.*?)"', problem):
            problem, remedy = f"the key '{twice[1]}' is given twice", "; remove one of the two"
        elif problem == "mapping values are not allowed here":
            remedy = (
                "; this ': ' would begin a mapping inside a value: write each key on its own line, indent the "
                "keys of a mapping equally, and put a text with ': ' in quotes"
            )
        where, lines = "" if mark is None else f", {_place(mark)}", text.splitlines()
        if mark is not None and len(lines) > 1 and mark.line < len(lines):
            problem += f", in the line {short(lines[mark.line].strip())}"
        raise RecipeError(f"{source}{where}: {problem}{remedy}") from None
    except YAMLError as error:
        raise RecipeError(f"{source}: malformed YAML ({error})") from None


def _place(mark: Any) -> str:
    """Return the line and column of a mark of ruamel.yaml, both counted from 1."""
    return f"line {mark.line + 1}, column {mark.column + 1}"


@lru_cache(maxsize=64)
def _loaded(text: str) -> Any:
    """Return the data of YAML text. The result is cached, so that callers must copy it before they change it.

    Commands read the files of a study several times, and ruamel.yaml takes 100 times as long as a copy of the data.
    """
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)


def write_yaml(data: Any, unicode: bool = True, inline: bool = False) -> str:
    """Return plain data as YAML 1.2 text. `parse_yaml` of the text returns equal data.

    unicode: False to escape all characters beyond ASCII.
    inline: True to write a mapping or list on one line if it contains no other one, such as `{name: soap, lr: 0.016}`.

    Raises RecipeError if ruamel.yaml is not installed.
    """
    try:
        from ruamel.yaml import YAML
    except ModuleNotFoundError:
        raise RecipeError("to_yaml: ruamel.yaml is not installed; run `pip install ruamel.yaml`") from None
    yaml, stream = YAML(typ="safe"), StringIO()
    yaml.default_flow_style = None if inline else False
    yaml.allow_unicode = unicode
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    yaml.dump(data, stream)
    return stream.getvalue()


def recipe_folder() -> Path:
    """Return the folder of the shipped YAML recipes."""
    return Path(str(resources.files("eigengraft.optimizers"))) / "recipe" / "shipped"


@cache
def shipped() -> dict[str, Any]:
    """Return the raw data of every shipped recipe by name, from JSON, so that the core needs no YAML library."""
    data: dict[str, Any] = json.loads((recipe_folder() / "shipped.json").read_text(encoding="utf-8"))
    return data
