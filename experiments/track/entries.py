"""The runs of entries, one file an entry, which a track's folder keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..files import read_object
from ..reports.records import read_records
from ..reproduction.results import collect_results, keep_results
from .track import Track


@dataclass(frozen=True)
class TaskRun:
    """One run of an entry: its evaluations, infinite ones as infinity, its training seconds and its learning rate.

    edge: "least" or "largest" where the learning rate lies at an end of what was tried, else empty.
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
    """The runs of one entry by task, by ascending seed; and when, on what and with what they were made."""

    name: str
    runs: Mapping[str, Sequence[TaskRun]]
    made: Mapping[str, str]


def keep_entry(track: Track, directory: Path, path: Path) -> list[str]:
    """Write the finished runs of an entry's study to a file; returns the tasks whose data are not the track's.

    Raises ValueError where a run is not finished.
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
    """The entries in the files of a folder. Raises ValueError where runs are missing or data differ between entries."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"track: a folder with results of entries is required, got none in '{folder}'")
    entries = [_read(track, path) for path in paths]
    for task in track.tasks:
        data = {entry.name: {run.data for run in entry.runs[task]} for entry in entries}
        first = entries[0].name
        for name, found in data.items():
            if found != data[first]:
                raise ValueError(f"track: the same data of {task} for every entry, not so for {first} and {name}")
    return entries


def _read(track: Track, path: Path) -> EntryRuns:
    content = read_object(path)
    if content["made"].get("track") != str(track.version):
        raise ValueError(f"{path}: results of version {track.version} are required, got {content['made'].get('track')}")
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
            raise ValueError(f"{path}: runs of {task} with seeds {sorted(track.seeds)} are required, got {seeds}")
    return EntryRuns(path.stem, runs, content["made"])
