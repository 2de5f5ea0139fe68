"""The rules of a track as data: its tasks, the loss to reach on each, seeds, and how learning rates are found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from eigengraft.component import Component, validated
from eigengraft.optimizers.recipe.loading import read_yaml

from ..studies.study import Study, load_study

LAPTOP = Path(__file__).with_name("laptop.yaml")


class TrackTask(Component):
    """One task of a track, and when a loss counts as reached.

    A recipe has reached `target` at a step if (target - mean) sqrt(n) >= z sigma, where the mean is that of the
    validation losses of n seeds at the step.
    """

    experiment: dict[str, Any] = Field(min_length=1, description="the task and the steps, as in an experiment file")
    target: float = Field(gt=0, description="validation loss to reach")
    sigma: float = Field(gt=0, description="standard deviation over seeds of the loss of AdamW where it reaches it")
    sha256: str = Field("", description="of the task's data; none: not checked")


class Track(Component):
    """Fixed tasks on which recipes are compared by the steps they need; `version` changes whenever a value does."""

    version: int = Field(ge=1, description="number of the rules")
    base: dict[str, Any] = Field(description="what all runs share, as in an experiment file")
    tasks: dict[str, TrackTask] = Field(min_length=1, description="tasks by name")
    tune: dict[str, Any] = Field(description="the search of every entry on every task, as in a study")
    seeds: tuple[int, ...] = Field(strict=False, min_length=2, description="seeds of the runs that count")
    z: float = Field(gt=0, description="how many standard errors a mean must lie below the target")


def load_track(path: Path = LAPTOP) -> Track:
    """The track in a file. Raises RecipeError."""
    return validated(Track, read_yaml(path))


def entry_study(track: Track, recipe: str, imports: Iterable[str] = ()) -> Study:
    """The study of one entry, a shipped recipe's name or a recipe file: every task, its search and its seeds."""
    base: Mapping[str, Any] = {**track.base, "recipe": recipe, "imports": list(imports)}
    return load_study(
        {
            "name": entry_name(recipe),
            "base": dict(base),
            "axes": {"task": {name: task.experiment for name, task in track.tasks.items()}},
            "tune": track.tune,
            "seeds": track.seeds,
        }
    )


def entry_name(recipe: str) -> str:
    """The name of an entry: that of the recipe, or of its file without the suffix."""
    return Path(recipe).stem
