"""Paths in experiment files, which are relative to the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .imports import names_a_file


def resolve_paths(fields: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Fields of an experiment, or values by dotted path, with the files they name looked up from the folder `home`."""
    return {path: _located(path, value, home) for path, value in fields.items()}


def _located(path: str, value: Any, home: Path) -> Any:
    if path == "imports" and isinstance(value, (list, tuple)):
        return [str(home / name) if names_a_file(str(name)) else name for name in value]
    if path in ("recipe", "recipe.base") and isinstance(value, str) and value.endswith((".yaml", ".yml", ".json")):
        return str(home / value)
    if path == "recipe" and isinstance(value, Mapping) and "base" in value:
        return {**value, "base": _located("recipe.base", value["base"], home)}
    if path == "task.path" and isinstance(value, str):
        return str(home / value)
    if path == "task" and isinstance(value, Mapping) and isinstance(value.get("path"), str):
        return {**value, "path": str(home / value["path"])}
    return value
