"""Arguments and options that several commands share."""

from __future__ import annotations

from itertools import combinations
from typing import Annotated, Any

import typer

from eigengraft.errors import RecipeError


def _import_all(sources: list[str] | None) -> list[str] | None:
    for source in sources or ():
        from ..training.imports import import_component  # imports torch

        import_component(source)
    return sources


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE.py",
        help="a file or module that defines components; repeatable",
        callback=_import_all,
    ),
]
Workers = Annotated[int | None, typer.Option(min=1, help="number of processes; default one per core")]


def override_argument(text: str) -> Any:
    """Return the argument with which a command receives overrides, `dotted.path=value`, as typer declares it.

    If a later override of the same command would replace an earlier one, the command ends with an error.

    text: help of the argument.
    """
    return typer.Argument(help=text, callback=_all_have_effect)


def _all_have_effect(overrides: list[str] | None) -> list[str] | None:
    for first, second in combinations(overrides or (), 2):
        path, later = _path(first), _path(second)
        # `first` sets a field. `second` replaces its value if `second` sets the same field, a field that contains this
        # field, or the `kind` of a component that contains this field.
        if "=" in first and (path == later or path.startswith(f"{later.removesuffix('.kind')}.")):
            remedy = "remove one of the two" if path == later else f"put '{second}' before it"
            raise RecipeError(f"override '{first}': has no effect, as '{second}' replaces it; {remedy}")
    return overrides


def _path(override: str) -> str:
    """Return the path of an override without the prefix `recipe.`. If only one name follows the prefix, as in
    `recipe.update`, the path keeps the prefix.
    """
    path = override.partition("=")[0].strip()
    inner = path.removeprefix("recipe.")
    return inner if "." in inner else path
