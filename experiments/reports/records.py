"""The runs of a directory, read from its files; unfinished, failed and missing runs included."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .run import METRICS, Metric, Run, read_object

MANIFEST = "study"


@dataclass(frozen=True)
class TunedCell:
    """What a search found in one cell of a study, as its manifest says.

    cell: axis=label of every axis, with commas between.
    field: dotted path of the tuned number.
    value: the best value.
    tried: (value, mean of the metric, None where a run diverged), from the least value to the largest.
    inside: whether values on both sides of the best one were tried.
    """

    cell: str
    field: str
    value: float
    tried: tuple[tuple[float, float | None], ...]
    inside: bool


@dataclass(frozen=True)
class Records:
    """All runs of a directory. Runs are compared along the axis `compare` with the runs labelled `baseline`.

    Where no run of a panel has that label, as among runs of no study, they are compared with the first.
    """

    name: str
    description: str
    metric: Metric
    compare: str
    baseline: str
    runs: tuple[Run, ...]
    tuned: tuple[TunedCell, ...] = ()


def read_records(directory: Path) -> Records:
    """The runs under `directory`: those of its study, or without a study every run directory found."""
    manifest = read_object(directory / f"{MANIFEST}.json")
    if not manifest:
        return _stray(directory)
    runs = tuple(Run(run["labels"], run["seed"], directory / run["directory"]) for run in manifest["runs"])
    metric = METRICS[manifest["metric"]]
    tuned = tuple(
        TunedCell(cell, one["field"], one["value"], tuple(map(tuple, one["tried"])), one["inside"])
        for cell, one in manifest.get("tuned", {}).items()
    )
    name, description = manifest["name"], manifest["description"]
    return Records(name, description, metric, manifest["compare"], manifest["baseline"], runs, tuned)


def _stray(directory: Path) -> Records:
    found = [path.parent for path in sorted(directory.rglob("config.json"))]
    if not found:
        raise ValueError(f"report: a directory with a study or with runs is required, got {directory}")
    runs = [_stray_run(path, directory) for path in found]
    tasks = {run.data for run in runs}
    if len(tasks) > 1:  # a panel for each
        kinds = [kind for kind, _ in tasks]
        for run in runs:
            kind, content = run.data
            run.labels["task"] = kind if kinds.count(kind) == 1 else f"{kind} {content[:6]}"
    return Records(directory.name, "", METRICS["val_loss"], "run", runs[0].labels["run"], tuple(runs))


def _stray_run(path: Path, directory: Path) -> Run:
    seed = json.loads((path / "config.json").read_text(encoding="utf-8")).get("seed", 0)
    name = path.relative_to(directory).as_posix() if path != directory else path.name
    return Run({"run": re.sub(r"/?seed-\d+$", "", name) or directory.name}, seed, path)


def learning_rate(config: Mapping[str, Any]) -> float | None:
    """The peak learning rate of a run: its own, else its recipe's."""
    own: float | None = config.get("lr")
    return config.get("recipe", {}).get("lr") if own is None else own
