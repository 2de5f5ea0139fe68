"""A track: a benchmark in which recipes (its entries) train fixed tasks to a target loss. This file has its rules as
data, its tables of entries and of runs, and the scores of entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from eigengraft.component import Component, validated
from eigengraft.optimizers.recipe.loading import raw_recipe, read_yaml, shipped_recipes, write_yaml

from ..files import make_directory, write_text
from ..reports.records import RESULT_NUMBERS
from ..reports.seed_statistics import Target
from ..reproduction.claims import ResultRow, collect_results
from ..studies.study import Study, load_study

ENTRIES_FILE, RESULTS_FILE = "entries.yaml", "results.csv"
"""Names of the files in the folder of a track: one has the entries, the other a row for each run."""
MADE = ("track", "date", "cpu", "device", "threads", "python", "torch", "eigengraft")
"""Columns of the provenance of a run: version of the rules, date, machine and versions."""
RUN_COLUMNS = ("entry", "task", "seed", "lr", "edge", *RESULT_NUMBERS, "data", "curve", *MADE)
"""Columns of the table of runs. `curve` has `step:loss` for each evaluation."""


class TrackTask(Component):
    """One task of a track, and when a loss counts as reached.

    A recipe has reached `target` at a step if (target - mean) sqrt(n) >= z sigma. `mean` is the mean validation loss of
    n seeds at that step, sigma the standard deviation of a loss over seeds, and z the number of standard errors that
    the track requires.
    """

    experiment: dict[str, Any] = Field(min_length=1, description="the task and the steps, as in an experiment file")
    target: float = Field(gt=0, description="validation loss to reach")
    sigma: float = Field(
        gt=0,
        description="standard deviation of the validation loss over seeds, at the step where AdamW reaches the target",
    )
    sha256: str = Field("", description="sha256 of the task's data; empty: the data are not checked")


class Track(Component):
    """Fixed tasks on which recipes are compared by the number of steps that they need to reach a target loss.

    `version` changes whenever another field changes.
    """

    version: int = Field(ge=1, description="version of the rules")
    base: dict[str, Any] = Field(description="base experiment, with the fields of an experiment file")
    tasks: dict[str, TrackTask] = Field(min_length=1, description="tasks by name")
    tune: dict[str, Any] = Field(description="the search of every entry on every task, as in a study")
    seeds: tuple[int, ...] = Field(
        strict=False, min_length=2, description="seeds of the runs that are compared; the search has other seeds"
    )
    z: float = Field(gt=0, description="number of standard errors by which a mean must be below the target")


def load_track() -> Track:
    """Return the laptop track, whose rules are in the file laptop.yaml."""
    return validated(Track, read_yaml(Path(__file__).with_name("laptop.yaml")))


@dataclass(frozen=True)
class TrackEntry:
    """One recipe that takes part in a track, a race of recipes on small tasks.

    name: name of the recipe in the tables of the track.
    recipe: the recipe, as a recipe file declares it.
    accumulate: number of micro-batches into which every batch is split, as in an experiment; None: batches are not
        split.
    """

    name: str
    recipe: Mapping[str, Any]
    accumulate: int | None = None


def find_entry(source: str, folder: Path, accumulate: int | None = None) -> TrackEntry:
    """Return the entry that `source` names: one in the table of a folder, a recipe file, or a shipped recipe.

    accumulate: number of micro-batches of every batch; None: the number of the entry in the table, else one.
    """
    known = read_table(folder)
    if source in known:
        return replace(known[source], accumulate=accumulate or known[source].accumulate)
    if Path(source).suffix not in (".yaml", ".yml"):
        raw_recipe(source)  # raises RecipeError for an unknown name
        return TrackEntry(entry_name(source), {"base": source}, accumulate)
    declared = read_yaml(source)
    alone = isinstance(declared, Mapping) and declared.get("base") in (None, *shipped_recipes())
    return TrackEntry(Path(source).stem, declared if alone else raw_recipe(source), accumulate)


def entry_name(recipe: str) -> str:
    """Return the name of the entry of a shipped recipe: the name of the recipe, with "_" in place of "/"."""
    return recipe.replace("/", "_")


def entry_study(track: Track, entry: TrackEntry, imports: Iterable[str] = ()) -> Study:
    """Return the study that runs one entry on all tasks, with a search of the learning rate and the track's seeds.

    imports: files or modules that define components of the recipe.
    """
    split = {} if entry.accumulate is None else {"accumulate": entry.accumulate}
    return load_study(
        {
            "name": entry.name,
            "base": {**track.base, "recipe": dict(entry.recipe), "imports": list(imports), **split},
            "axes": {"task": {name: task.experiment for name, task in track.tasks.items()}},
            "tune": track.tune,
            "seeds": track.seeds,
        }
    )


EntryRuns = Mapping[str, Sequence[ResultRow]]
"""Task -> runs of an entry by ascending seed. The numbers of a run are the columns of its row in the table of runs."""


def keep_entry(track: Track, entry: TrackEntry, directory: Path, folder: Path) -> list[str]:
    """Write an entry and the finished runs of its study into the tables of a folder, and remove its earlier rows.

    Return the tasks whose data differ from those of the track. Raises ValueError if a run is not finished.
    """
    content = collect_results(directory)
    made = {"track": str(track.version), **content["made"]}
    rows, others = [], []
    for row in content["rows"]:
        task = row["labels"]["task"]
        losses = [math.nan if loss is None else loss for loss in row["curve"][1]]
        curve = " ".join(f"{step}:{loss}" for step, loss in zip(row["curve"][0], losses, strict=True))
        rows.append({**row, "entry": entry.name, "task": task, "curve": curve, **made})
        if row["data"] != track.tasks[task].sha256[:16] and task not in others:
            others.append(task)
    make_directory(folder)
    kept = [row for row in _rows(folder) if row["entry"] != entry.name]
    write_text(folder / RESULTS_FILE, results_text(sorted([*kept, *rows], key=lambda row: str(row["entry"]))))
    write_text(folder / ENTRIES_FILE, table_text({**read_table(folder), entry.name: entry}.values()))
    return others


def results_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of runs as CSV. Numbers that a run does not have are empty."""
    from pandas import DataFrame

    text: str = DataFrame(rows, columns=list(RUN_COLUMNS), dtype=object).to_csv(index=False, lineterminator="\n")
    return text


def table_text(entries: Iterable[TrackEntry]) -> str:
    """Return the table of entries as YAML: the recipe of each entry, and `accumulate` beside it if batches are split.

    An entry with few fields has one line.
    """
    rows = {
        entry.name: {**entry.recipe, **({} if entry.accumulate is None else {"accumulate": entry.accumulate})}
        for entry in sorted(entries, key=lambda entry: entry.name)
    }
    return write_yaml(rows, inline=True)


def read_table(folder: Path) -> dict[str, TrackEntry]:
    """Return the entries (recipes that take part) from the table in a track's folder, by name; {} without a table."""
    path = folder / ENTRIES_FILE
    rows = read_yaml(path) if path.is_file() else {}
    return {name: TrackEntry(name, row, row.pop("accumulate", None)) for name, row in rows.items()}


def read_entries(track: Track, folder: Path) -> Mapping[str, EntryRuns]:
    """Return entry -> task -> runs by ascending seed, for all entries in a folder.

    Raises ValueError if runs are missing, or if entries had different data.
    """
    path, found = folder / RESULTS_FILE, dict[str, dict[str, list[ResultRow]]]()
    for row in _rows(folder):
        name, version = row["entry"], row["track"]
        if version != str(track.version):
            raise ValueError(
                f"{path}: the results of entry {name} must be from version {track.version} of the track, got "
                f"version {version}; run it again"
            )
        found.setdefault(name, {task: [] for task in track.tasks})[row["task"]].append(_run(row))
    if not found:
        raise ValueError(f"track: '{folder}' has no results of entries; run an entry with `eigengraft track run`")
    first = next(iter(found))
    for name, runs in found.items():
        for task, some in runs.items():
            some.sort(key=lambda run: run.seed)
            if (seeds := [run.seed for run in some]) != sorted(track.seeds):
                raise ValueError(
                    f"{path}: runs of {name} on {task} must have the seeds {sorted(track.seeds)}, got {seeds}"
                )
            one, two = ({run.numbers["data"] for run in own[task]} for own in (found[first], runs))
            if one != two:
                raise ValueError(
                    f"track: the data of task '{task}' must be the same for all entries, got data with the sha256 "
                    f"{', '.join(sorted(one))} for entry '{first}' and {', '.join(sorted(two))} for entry '{name}'; "
                    "run one of the two entries again"
                )
    return found


def _rows(folder: Path) -> list[dict[str, str]]:
    from pandas import DataFrame, read_csv

    path = folder / RESULTS_FILE
    table = read_csv(path, dtype=str, keep_default_na=False) if path.is_file() else DataFrame()
    rows: list[dict[str, str]] = table.to_dict("records")
    return rows


def _run(row: Mapping[str, str]) -> ResultRow:
    points = [point.split(":") for point in row["curve"].split()]
    losses = [loss if math.isfinite(loss := float(text)) else math.inf for _, text in points]
    numbers = {"seconds": float(row["seconds"]), "lr": float(row["lr"]), "curve": [[int(n) for n, _ in points], losses]}
    return ResultRow({"task": row["task"]}, int(row["seed"]), {**row, **numbers})


WORST_RATIO = 4.0
"""Largest ratio for which a profile is computed: steps of an entry, divided by the fewest steps of all entries."""


@dataclass(frozen=True)
class TaskScore:
    """The result of an entry, a recipe that takes part in the track, on one task.

    steps: first evaluated step at which the target counts as reached; infinity if there is none.
    seconds: mean over runs of the training time up to that step.
    loss: mean of the losses at the last step; infinity if a run diverged.
    lr: learning rate that the search chose.
    edge: "least" or "largest" if this learning rate is at that end of the tried values, else empty.
    """

    steps: float
    seconds: float
    loss: float
    lr: float
    edge: str


Scores = Mapping[str, Mapping[str, TaskScore]]
"""Name of an entry -> name of a task -> score."""


def score(task: TrackTask, z: float, runs: Sequence[ResultRow]) -> TaskScore:
    """Return the score of an entry on one task: the step and the seconds at which its runs reach the target, their
    final loss, and their learning rate.

    z: number of standard errors by which the mean must be below the target.
    runs: one run for each seed.
    """
    losses = [dict(zip(*run.numbers["curve"], strict=True)) for run in runs]
    first, end = Target(value=task.target, sigma=task.sigma, z=z).first(losses), int(task.experiment["steps"])
    reached = math.inf if first is None else float(first)
    paces = [run.numbers["seconds"] / max(own, default=end) for run, own in zip(runs, losses, strict=True)]
    rate = sum(paces) / len(runs)
    last = sum(own.get(end, math.inf) for own in losses) / len(runs)
    return TaskScore(reached, reached * rate, last, runs[0].numbers["lr"], runs[0].numbers["edge"])


def scores(track: Track, entries: Mapping[str, EntryRuns]) -> dict[str, dict[str, TaskScore]]:
    """Return entry -> task -> steps and seconds to the target loss of the task (`TaskScore`).

    entries: for each entry, by its name, the runs of each task, one for each seed.
    """
    return {
        name: {task: score(rules, track.z, runs[task]) for task, rules in track.tasks.items()}
        for name, runs in entries.items()
    }


def ratios(found: Scores, costs: Mapping[str, float] | None = None) -> dict[str, dict[str, float]]:
    """Return, by entry and task, the steps to the target divided by the fewest steps of all entries.

    The result is infinite if the target is not reached.

    costs: by entry, the cost of one step, a factor by which the steps of the entry are multiplied before the division.
        None: all steps cost the same.
    """
    from pandas import DataFrame

    spent = DataFrame({name: {task: one.steps for task, one in own.items()} for name, own in found.items()})
    spent *= [1.0 if costs is None else costs[name] for name in found]
    divided: dict[str, dict[str, float]] = spent.div(spent.min(axis=1), axis=0).fillna(math.inf).to_dict()
    return divided


def profile(own: Mapping[str, float], at: Sequence[float]) -> list[float]:
    """Return rho(tau) = share of tasks with a ratio of at most tau, for every tau in `at` (Dolan & More 2002).

    own: task -> ratio of the entry (see `ratios`).
    """
    return [sum(ratio <= tau for ratio in own.values()) / len(own) for tau in at]


def profile_score(own: Mapping[str, float]) -> float:
    """Return the mean of rho(tau) over 1 <= tau <= 4 (AlgoPerf). 1 means the fewest steps on every task.

    rho(tau) is the share of tasks on which the entry needs at most tau times the fewest steps of all entries.

    own: task -> ratio of the entry (see `ratios`).
    """
    return sum(max(0.0, WORST_RATIO - ratio) for ratio in own.values()) / (len(own) * (WORST_RATIO - 1))
