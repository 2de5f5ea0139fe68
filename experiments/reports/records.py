"""The runs of a directory, read from its files; unfinished, failed and missing runs included."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

MANIFEST = "study"

Status = Literal["complete", "diverged", "failed", "unfinished", "missing"]


@dataclass(frozen=True)
class Metric:
    """The metric of a comparison: a column of metrics.jsonl and field of result.json; `sign` -1: larger is better."""

    key: str
    title: str
    sign: int

    @property
    def worst(self) -> float:
        """The value of a run that diverged."""
        return self.sign * math.inf


METRICS = {
    "val_loss": Metric("val_loss", "validation loss", 1),
    "val_accuracy": Metric("val_accuracy", "validation accuracy", -1),
}


@dataclass(frozen=True)
class Run:
    """One run directory: `labels` say where on the axes of its study it lies."""

    labels: Mapping[str, str]
    seed: int
    directory: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return _read(self.directory / "config.json")

    @cached_property
    def environment(self) -> dict[str, Any]:
        return _read(self.directory / "env.json")

    @cached_property
    def result(self) -> dict[str, Any]:
        return _read(self.directory / "result.json")

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
        return _lines(self.directory / "metrics.jsonl")

    @cached_property
    def diagnostics(self) -> list[dict[str, Any]]:
        """The lines of diagnostics.jsonl, which many runs do not have."""
        return _lines(self.directory / "diagnostics.jsonl")

    @cached_property
    def error(self) -> str:
        path = fault_file(self.directory)
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def status(self, metric: Metric) -> Status:
        if self.result:
            return "complete" if math.isfinite(self.final(metric)) else "diverged"
        if self.error:
            return "failed"
        return "unfinished" if self.config else "missing"

    def final(self, metric: Metric) -> float:
        """The metric at the end of a complete run; the worst value where the run diverged."""
        return _number(self.result.get(metric.key), metric)

    def curve(self, metric: Metric) -> tuple[list[int], list[float], list[float]]:
        """Steps, training seconds and metric at every evaluation."""
        rows = [row for row in self.rows if row.get(metric.key) is not None]
        return (
            [int(row["step"]) for row in rows],
            [float(row["seconds"]) for row in rows],
            [_number(row[metric.key], metric) for row in rows],
        )


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
    """All runs of a directory. Runs are compared along the axis `compare` with the runs labelled `baseline`."""

    name: str
    description: str
    metric: Metric
    compare: str
    baseline: str
    runs: tuple[Run, ...]
    tuned: tuple[TunedCell, ...] = ()


def read_records(directory: Path) -> Records:
    """The runs under `directory`: those of its study, or without a study every run directory found."""
    manifest = _read(directory / f"{MANIFEST}.json")
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
    runs = []
    for path in found:
        seed = json.loads((path / "config.json").read_text(encoding="utf-8")).get("seed", 0)
        name = path.relative_to(directory).as_posix() if path != directory else path.name
        runs.append(Run({"run": re.sub(r"/?seed-\d+$", "", name) or directory.name}, seed, path))
    return Records(directory.name, "", METRICS["val_loss"], "run", runs[0].labels["run"], tuple(runs))


def learning_rate(config: Mapping[str, Any]) -> float | None:
    """The peak learning rate of a run: its own, else its recipe's."""
    own: float | None = config.get("lr")
    return config.get("recipe", {}).get("lr") if own is None else own


def fault_file(run: Path) -> Path:
    """The file beside the directory `run` in which a study records why the run failed."""
    return run.with_name(f"{run.name}.error.txt")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _number(value: object, metric: Metric) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else metric.worst
