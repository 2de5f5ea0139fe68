"""Experiments from files, mappings and overrides.

An override is `dotted.path=value`. A path is looked up in the experiment first (`steps=100`, `task.width=48`,
`recipe.update.rms.beta=0.99`); one that starts with a field of the recipe is taken as the recipe's
(`update.rms.beta=0.99`, `weight_decay.kind=l2`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import eigengraft
from eigengraft.component import Component, validated
from eigengraft.errors import OTHER_NAMES, RecipeError
from eigengraft.optimizers.recipe.loading import parse_yaml, read_yaml
from eigengraft.optimizers.recipe.overrides import apply_overrides

from .experiment import Experiment, resolved
from .imports import resolve_paths

ExperimentSource = str | Path | Mapping[str, Any] | Experiment


def load_experiment(source: ExperimentSource, overrides: Iterable[str] = (), imports: Iterable[str] = ()) -> Experiment:
    """The experiment in a YAML file, a mapping or an `Experiment`, with overrides applied.

    Paths inside a file (`recipe`, `imports`, `task.path`) are relative to that file, those in overrides to the working
    directory. Raises RecipeError, one line for each fault.
    """
    own, recipes = split_overrides(overrides)
    if isinstance(source, (str, Path)):
        path = Path(source)
        data = read_experiment(path)
        data.setdefault("name", re.sub(r"[^\w.+=-]+", "-", path.stem))
    else:
        raw = source.model_dump(mode="json") if isinstance(source, Experiment) else source
        data = {key: _plain(value) for key, value in raw.items()}
    data.setdefault("schedule", "constant")  # so that an override may reach into it
    data.setdefault("parallel", "none")
    data["imports"] = [*_listed(data, "imports"), *imports]
    data["overrides"] = [*_listed(data, "overrides"), *recipes]
    try:
        return validated(Experiment, resolved(apply_overrides(data, own, parse_yaml)))
    except RecipeError as error:
        if isinstance(source, (str, Path)):
            raise RecipeError(f"{source} does not describe an experiment:\n{error}") from error
        raise


def read_experiment(path: Path) -> dict[str, Any]:
    """The mapping in an experiment file, its paths made independent of the working directory."""
    if not path.is_file():
        raise RecipeError(f"experiment: an existing experiment file is required, got '{path}'")
    data = read_yaml(path)
    if isinstance(data, Mapping) and "axes" in data:
        raise RecipeError(f"{path}: an experiment is required, got a study; run it with `eigengraft ablate {path}`")
    if not isinstance(data, Mapping):
        kind = "an empty file" if data is None else f"a {type(data).__name__}"
        raise RecipeError(f"{path}: a mapping with at least 'task' and 'recipe' is required, got {kind}")
    data = dict(data)
    data["imports"] = list(map(str, _listed(data, "imports")))
    return resolve_paths(data, path.parent)


def _plain(value: Any) -> Any:
    """Overrides reach into plain data only."""
    return value.model_dump(mode="json") if isinstance(value, Component) else value


def _listed(data: Mapping[str, Any], field: str) -> list[Any]:
    """A list of the data; a single text stands for a list of one."""
    value = data.get(field) or []
    if field == "overrides" and isinstance(value, Mapping):
        return [f"{path}={json.dumps(_plain(item))}" for path, item in value.items()]
    if not isinstance(value, (str, list, tuple)):
        raise RecipeError(f"{field}: a list of texts is required, got {value!r}")
    return [value] if isinstance(value, str) else list(value)


def split_overrides(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Overrides of the experiment, and those of its recipe without the prefix `recipe.`, each in their order."""
    own: list[str] = []
    recipes: list[str] = []
    fields, of_recipe = Experiment.model_fields, eigengraft.Recipe.model_fields
    for override in overrides:
        first, dot, _ = _path(override).partition(".")
        # a field of both is a plain number in the experiment, so that a path going deeper means the recipe's
        if first in fields and not (dot and first in {"recipe", *of_recipe}):
            own.append(override)
        elif first == "recipe" or first in of_recipe:
            recipes.append(override.removeprefix("recipe."))
        else:
            known = list(dict.fromkeys([*fields, *of_recipe]))
            near = (
                [OTHER_NAMES[first]]
                if first in OTHER_NAMES
                else difflib.get_close_matches(first, known, n=1, cutoff=0.5)
            )
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise RecipeError(f"{first}: unknown field; {hint}The experiment and its recipe have {', '.join(known)}")
    return own, recipes


def _path(override: str) -> str:
    """The path of a well-formed override."""
    path, equals, text = override.partition("=")
    if not equals or not all(part.strip() for part in path.split(".")):
        raise RecipeError(f"override '{override}': dotted.path=value is required, for instance steps=100")
    parse_yaml(text, f"override '{override}'")
    return path.strip()
