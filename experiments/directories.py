"""Directories that commands write to."""

from __future__ import annotations

from pathlib import Path

from eigengraft.errors import RecipeError


def make_directory(path: Path) -> None:
    """Make a directory, and those it lies in, unless it is there. Raises RecipeError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise RecipeError(f"{path}: a directory is required, got a file") from None
    except OSError as error:
        raise RecipeError(
            f"{path}: a directory that can be made is required, got: {(error.strerror or str(error)).lower()}"
        ) from None
