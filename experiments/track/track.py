"""A track: its rules as data, the runs of its entries, their scores, and the table and figure of all entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pydantic import Field

from eigengraft.component import Component, validated
from eigengraft.optimizers.recipe.loading import read_yaml

from ..files import read_object
from ..reports.figures import INK, LIGHT, save_figure, style_axes
from ..reports.records import read_records
from ..reports.seed_statistics import Target
from ..reports.tables import format_rate, markdown_table
from ..reproduction.results import collect_results, keep_results
from ..studies.study import Study, load_study

LAPTOP = Path(__file__).with_name("laptop.yaml")


class TrackTask(Component):
    """One task of a track, and when a loss counts as reached.

    A recipe has reached `target` at a step if (target - mean) sqrt(n) >= z sigma, for the mean of the validation losses
    of n seeds at that step.
    """

    experiment: dict[str, Any] = Field(min_length=1, description="the task and the steps, as in an experiment file")
    target: float = Field(gt=0, description="validation loss to reach")
    sigma: float = Field(
        gt=0, description="standard deviation over seeds of the loss of AdamW at the step where it reaches the target"
    )
    sha256: str = Field("", description="sha256 of the task's data; empty: the data are not checked")


class Track(Component):
    """Fixed tasks on which recipes are compared by their steps. `version` changes whenever a value changes."""

    version: int = Field(ge=1, description="version of the rules")
    base: dict[str, Any] = Field(description="base experiment, with the fields of an experiment file")
    tasks: dict[str, TrackTask] = Field(min_length=1, description="tasks by name")
    tune: dict[str, Any] = Field(description="the search of every entry on every task, as in a study")
    seeds: tuple[int, ...] = Field(strict=False, min_length=2, description="seeds of the runs that count")
    z: float = Field(gt=0, description="number of standard errors by which a mean must be below the target")


def load_track(path: Path = LAPTOP) -> Track:
    """Return the track in a file. Raises RecipeError."""
    return validated(Track, read_yaml(path))


def entry_study(track: Track, recipe: str, imports: Iterable[str] = ()) -> Study:
    """Return the study of one entry: every task with its search and its seeds.

    recipe: name of a shipped recipe, or a recipe file.
    imports: files or modules that define components of the recipe.
    """
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
    """Return the name of an entry: that of the recipe, or of its file without the suffix."""
    return Path(recipe).stem


@dataclass(frozen=True)
class TaskRun:
    """One run of an entry.

    seed: seed of the run.
    steps: evaluated steps.
    losses: validation losses at these steps; infinity for a loss that is not finite.
    seconds: training seconds.
    lr: learning rate.
    edge: "least" or "largest" if the learning rate is at that end of the tried values, else empty.
    data: start of the sha256 of the task's data.
    """

    seed: int
    steps: Sequence[int]
    losses: Sequence[float]
    seconds: float
    lr: float
    edge: str
    data: str


@dataclass(frozen=True)
class EntryRuns:
    """The runs of one entry.

    name: name of the entry.
    runs: task -> runs by ascending seed.
    made: date, machine and versions.
    """

    name: str
    runs: Mapping[str, Sequence[TaskRun]]
    made: Mapping[str, str]


def keep_entry(track: Track, directory: Path, path: Path) -> list[str]:
    """Write the finished runs of an entry's study to a file. Return the tasks whose data differ from those of the
    track.

    Raises ValueError if a run is not finished.
    """
    content = collect_results(directory)
    records = read_records(directory)
    others = []
    for row, run in zip(content["rows"], records.runs, strict=True):
        task = row["labels"]["task"]
        row["data"] = run.data[1][:16]
        if row["data"] != track.tasks[task].sha256[:16] and task not in others:
            others.append(task)
    content["made"] = {"track": str(track.version), **content["made"]}
    keep_results(content, path)
    return others


def read_entries(track: Track, folder: Path) -> list[EntryRuns]:
    """Return the entries in a folder. Raises ValueError if runs are missing or entries had different data."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"track: '{folder}' has no results of entries; make some with `eigengraft track run`")
    entries = [_read(track, path) for path in paths]
    for task in track.tasks:
        data = {entry.name: {run.data for run in entry.runs[task]} for entry in entries}
        first = entries[0].name
        for name, found in data.items():
            if found != data[first]:
                raise ValueError(f"track: {first} and {name} were run with different data of {task}; run one again")
    return entries


def _read(track: Track, path: Path) -> EntryRuns:
    content = read_object(path)
    if content["made"].get("track") != str(track.version):
        raise ValueError(f"{path}: results are of version {content['made'].get('track')}, not {track.version}")
    found: dict[str, list[TaskRun]] = {task: [] for task in track.tasks}
    for row in content["rows"]:
        steps, losses = row["curve"]
        finite = [math.inf if loss is None else loss for loss in losses]
        one = TaskRun(row["seed"], steps, finite, row["seconds"], row["lr"], row.get("edge", ""), row["data"])
        found[row["labels"]["task"]].append(one)
    runs = {task: sorted(some, key=lambda run: run.seed) for task, some in found.items()}
    for task, some in runs.items():
        if [run.seed for run in some] != sorted(track.seeds):
            seeds = [run.seed for run in some]
            raise ValueError(f"{path}: runs of {task} must have the seeds {sorted(track.seeds)}, got {seeds}")
    return EntryRuns(path.stem, runs, content["made"])


WORST_RATIO = 4.0
"""Largest ratio to the fewest steps that counts in a profile."""


@dataclass(frozen=True)
class TaskScore:
    """One entry on one task.

    steps: first evaluated step at which the target counts as reached; infinity if there is none.
    seconds: mean over runs of the training time up to that step.
    loss: mean of the losses at the last step; infinity if a run diverged.
    lr: learning rate that the search chose.
    edge: "least" or "largest" if it is at that end of the tried values, else empty.
    """

    steps: float
    seconds: float
    loss: float
    lr: float
    edge: str


def score(task: TrackTask, z: float, runs: Sequence[TaskRun]) -> TaskScore:
    """Return the score of an entry on one task.

    z: number of standard errors by which the mean must be below the target.
    runs: one run for each seed.
    """
    losses = [dict(zip(run.steps, run.losses, strict=True)) for run in runs]
    first, end = Target(value=task.target, sigma=task.sigma, z=z).first(losses), int(task.experiment["steps"])
    reached = math.inf if first is None else float(first)
    rate = sum(run.seconds / max(run.steps, default=end) for run in runs) / len(runs)
    last = sum(own.get(end, math.inf) for own in losses) / len(runs)
    return TaskScore(reached, reached * rate, last, runs[0].lr, runs[0].edge)


def scores(track: Track, entries: Sequence[EntryRuns]) -> dict[str, dict[str, TaskScore]]:
    """Return entry -> task -> score."""
    return {
        entry.name: {name: score(task, track.z, entry.runs[name]) for name, task in track.tasks.items()}
        for entry in entries
    }


def ratios(found: Mapping[str, Mapping[str, TaskScore]]) -> dict[str, dict[str, float]]:
    """Return entry -> task -> steps divided by the fewest of all entries, infinity if the target is not reached."""
    fewest: dict[str, float] = {}
    for own in found.values():
        for task, one in own.items():
            fewest[task] = min(one.steps, fewest.get(task, math.inf))
    return {
        name: {task: one.steps / fewest[task] if one.steps < math.inf else math.inf for task, one in own.items()}
        for name, own in found.items()
    }


def profile(own: Mapping[str, float], at: Sequence[float]) -> list[float]:
    """Return rho(tau) = share of tasks with a ratio of at most tau, for every tau in `at` (Dolan & More 2002)."""
    return [sum(ratio <= tau for ratio in own.values()) / len(own) for tau in at]


def profile_score(own: Mapping[str, float]) -> float:
    """Return the integral of rho(tau) from 1 to 4, divided by 3, as AlgoPerf does: 1 for fewest steps everywhere."""
    return sum(max(0.0, WORST_RATIO - ratio) for ratio in own.values()) / (len(own) * (WORST_RATIO - 1))


DRAWN, BASELINE = 8, "adamw"
"""Number of best entries in the figure, and the entry that is always in it."""


def track_table(track: Track, entries: Sequence[EntryRuns], found: Mapping[str, Mapping[str, TaskScore]]) -> str:
    """Return tables with a row for each entry, the best profile first.

    The first table has steps to the target and seconds, or the final loss. The second has learning rates.
    """
    apart = ratios(found)
    order = sorted(found, key=lambda name: (-profile_score(apart[name]), name))
    goals = [f"{name} to {task.target:g} of {task.experiment['steps']}" for name, task in track.tasks.items()]
    steps = markdown_table(
        ("entry", "profile", *goals),
        [(f"`{name}`", f"{profile_score(apart[name]):.2f}", *map(_reached, found[name].values())) for name in order],
    )
    rates = markdown_table(
        ("entry", *track.tasks, "made"),
        [(f"`{name}`", *map(_rate, found[name].values()), _made(entries, name)) for name in order],
    )
    return f"Steps to the target, and seconds:\n\n{steps}\nLearning rates that the searches chose:\n\n{rates}"


def draw_profiles(found: Mapping[str, Mapping[str, TaskScore]]) -> Figure:
    """Draw rho(tau) of the DRAWN entries with the best profiles, and of AdamW."""
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    apart = ratios(found)
    order = sorted(found, key=lambda name: (-profile_score(apart[name]), name))
    for style, name in enumerate([*order[:DRAWN], *(name for name in order[DRAWN:] if name == BASELINE)]):
        at = sorted({1.0, WORST_RATIO, *(one for one in apart[name].values() if one < WORST_RATIO)})
        dash = "-" if style < len(LIGHT) else (0, (5, 1.5))
        # each line is a little lower than the one before, so that lines that coincide stay visible
        shares = [share - 0.006 * style for share in profile(apart[name], at)]
        colour = LIGHT[style % len(LIGHT)]
        axes.plot(at, shares, drawstyle="steps-post", color=colour, linewidth=1.7, linestyle=dash, label=name)
    axes.set_xlabel("steps, divided by the fewest of all entries")
    axes.set_ylabel("share of tasks")
    axes.set_xlim(1, WORST_RATIO)
    axes.set_ylim(-0.06, 1.04)
    style_axes(axes)
    figure.legend(loc="outside right center", fontsize=8.5, labelcolor=INK, frameon=False, handlelength=2.2)
    return figure


def write_profiles(found: Mapping[str, Mapping[str, TaskScore]], path: Path) -> None:
    """Draw the profiles and save them. The suffix determines the format."""
    save_figure(draw_profiles(found), path)


def _reached(one: TaskScore) -> str:
    if one.steps < math.inf:
        return f"{one.steps:.0f} ({one.seconds:.1f} s)"
    return f"no ({one.loss:.3f})" if math.isfinite(one.loss) else "diverged"


def _rate(one: TaskScore) -> str:
    return format_rate(one.lr, one.edge)


def _made(entries: Sequence[EntryRuns], name: str) -> str:
    made = next(entry.made for entry in entries if entry.name == name)
    return f"{made['date']}, eigengraft {made['eigengraft']}, torch {made['torch']}"
