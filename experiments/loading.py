"""Experiments from files, mappings and overrides.

An override is `dotted.path=value`. A path is looked up in the experiment first (`steps=100`, `task.width=48`,
`recipe.update.rms.beta=0.99`); one that starts with a field of the recipe is taken as the recipe's
(`update.rms.beta=0.99`, `weight_decay.kind=l2`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import eigengraft
from eigengraft.component import Component, RecipeError, checked
from eigengraft.optimizers.files import parse_yaml, read_yaml
from eigengraft.optimizers.overrides import apply_overrides

from .experiment import Experiment, resolved
from .imports import is_file

Source = str | Path | Mapping[str, Any] | Experiment


def load_experiment(source: Source, overrides: Iterable[str] = (), imports: Iterable[str] = ()) -> Experiment:
    """The experiment in a YAML file, a mapping or an `Experiment`, with overrides applied.

    Paths inside a file (`recipe`, `imports`, `task.path`) are relative to that file, those in overrides to the working
    directory. Raises RecipeError, one line for each fault.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            return _load({"name": path.stem, **read_experiment(path)}, overrides, imports)
        except RecipeError as error:
            raise RecipeError(f"{path} does not describe an experiment:\n{error}") from error
    fields = (
        source if isinstance(source, Mapping) else {name: getattr(source, name) for name in Experiment.model_fields}
    )
    # overrides reach into plain data only
    raw = {
        key: value.model_dump(mode="json") if isinstance(value, Component) else value for key, value in fields.items()
    }
    return _load(raw, overrides, imports)


def read_experiment(path: Path) -> dict[str, Any]:
    """The mapping in an experiment file, its paths made independent of the working directory."""
    if not path.is_file():
        raise RecipeError(f"an existing experiment file is required, got '{path}'")
    data = read_yaml(path)
    if not isinstance(data, Mapping):
        raise RecipeError(f"a mapping with at least 'task' and 'recipe' is required, got {type(data).__name__}")
    home, data = path.parent, dict(data)
    if isinstance(data.get("imports"), list):
        data["imports"] = [str(home / name) if is_file(str(name)) else name for name in data["imports"]]
    if isinstance(data.get("recipe"), str) and data["recipe"].endswith((".yaml", ".yml", ".json")):
        data["recipe"] = str(home / data["recipe"])
    if isinstance(data.get("task"), Mapping) and isinstance(data["task"].get("path"), str):
        data["task"] = {**data["task"], "path": str(home / data["task"]["path"])}
    return data


def _load(data: dict[str, Any], overrides: Iterable[str], imports: Iterable[str]) -> Experiment:
    own, recipes = split_overrides(overrides)
    data.setdefault("schedule", "constant")  # so that an override may reach into it
    data["imports"] = [*(data.get("imports") or ()), *imports]
    data["overrides"] = [*(data.get("overrides") or ()), *recipes]
    data = apply_overrides(data, own)
    return checked(Experiment, resolved(data))


def split_overrides(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Overrides of the experiment, and those of its recipe without the prefix `recipe.`, each in their order."""
    own: list[str] = []
    recipes: list[str] = []
    fields, of_recipe = Experiment.model_fields, eigengraft.Recipe.model_fields
    for override in overrides:
        path, value = _parts(override)
        first, dot, rest = path.partition(".")
        if first == "recipe" and dot:
            recipes.append(f"{rest}={value}")
        # a field of both is a plain number in the experiment, so that a path going deeper means the recipe's
        elif first in fields and not (dot and first in of_recipe):
            own.append(f"{path}={value}")
        elif first in of_recipe:
            recipes.append(f"{path}={value}")
        else:
            known = list(dict.fromkeys([*fields, *of_recipe]))
            near = difflib.get_close_matches(first, known, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise RecipeError(f"{path}: unknown, the experiment and its recipe have {', '.join(known)}{hint}")
    return own, recipes


def _parts(override: str) -> tuple[str, str]:
    """The path of an override and its value, read as YAML and written as JSON, which every reader of overrides knows."""
    path, equals, text = override.partition("=")
    if not equals or not all(part.strip() for part in path.split(".")):
        raise RecipeError(f"override '{override}': dotted.path=value is required, for instance steps=100")
    return path.strip(), json.dumps(parse_yaml(text, f"override '{override}'"), default=str)
