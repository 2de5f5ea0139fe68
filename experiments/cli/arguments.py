"""Arguments and options that several commands take."""

from __future__ import annotations

from itertools import combinations
from typing import Annotated, Any

import typer

from eigengraft.errors import RecipeError

Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="FILE.py", help="a file or module that defines components; repeatable"),
]
Workers = Annotated[int | None, typer.Option(min=1, help="number of processes; default one per core")]


def override_argument(text: str) -> Any:
    """The argument that takes overrides, `dotted.path=value`; each must still be there when all have been applied."""
    return typer.Argument(help=text, callback=_all_have_effect)


def _all_have_effect(overrides: list[str] | None) -> list[str] | None:
    for first, second in combinations(overrides or (), 2):
        path, later = _path(first), _path(second)
        if "=" in first and _replaces(later, path):
            remedy = "one of the two is required" if path == later else f"'{second}' is required before it"
            raise RecipeError(f"override '{first}': has no effect, as '{second}' replaces it; {remedy}")
    return overrides


def _path(override: str) -> str:
    """The path of an override; that of a field deeper in the recipe does without the prefix `recipe.`."""
    path = override.partition("=")[0].strip()
    inner = path.removeprefix("recipe.")
    return inner if "." in inner else path


def _replaces(later: str, path: str) -> bool:
    """Whether setting `later` drops what was set at `path`: the same field, one inside, or one of another kind."""
    whole = later.removesuffix(".kind")
    return path == later or path.startswith(f"{whole}.")
