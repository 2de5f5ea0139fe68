"""Files of declarations: YAML files of the user, and the recipes that come with the package."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from eigengraft.errors import RecipeError


def read_yaml(path: str | Path) -> Any:
    """The plain data of a YAML 1.2 file; RecipeError names the file and, when it is malformed, line and column."""
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"{path}: an existing YAML file is required, got nothing there")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: a readable UTF-8 file is required ({error})") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str = "value") -> Any:
    """The plain data of YAML 1.2 text; `source` is what errors call it."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError
    except ModuleNotFoundError:
        raise RecipeError(f"{source}: reading YAML needs ruamel.yaml, install eigengraft[cli]") from None
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise RecipeError(f"{source}{where}: {error.problem or 'malformed YAML'}") from None
    except YAMLError as error:
        raise RecipeError(f"{source}: malformed YAML ({error})") from None


def recipe_folder() -> Path:
    """The folder of the shipped YAML recipes."""
    return Path(str(resources.files("eigengraft.optimizers"))) / "recipe" / "shipped"


@cache
def shipped() -> dict[str, Any]:
    """Raw data of every shipped recipe by name. Read from JSON, so that the core needs no YAML library."""
    data: dict[str, Any] = json.loads((recipe_folder() / "shipped.json").read_text(encoding="utf-8"))
    return data
