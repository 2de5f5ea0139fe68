"""The runs of a directory, read from its files; unfinished, failed and missing runs included."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..files import read_object
from ..provenance import variants
from .run import METRICS, Metric, Run
from .seed_statistics import Target

MANIFEST = "study"
_SHARED = ("name", "seed", "imports", "parallel", "diagnostics", "checkpoint_every", "log_every", "silence")
"""Fields of an experiment in which runs of one cell may differ: they do not change the numbers that are averaged."""


@dataclass(frozen=True)
class Tried:
    """Values that a search tried: the mean of the metric, None where a run diverged, and the step it was stopped at."""

    values: Mapping[str, Any]
    mean: float | None
    stopped: int | None


@dataclass(frozen=True)
class TunedCell:
    """What a search found in one cell of a study, as its manifest says.

    cell: axis=label of every axis, with commas between.
    values: the best values, by dotted path.
    edges: field -> "least" or "largest", where the best value is at an end of what was tried.
    tried: everything that was tried, by ascending values.
    rule: how values were chosen.
    """

    cell: str
    values: Mapping[str, Any]
    edges: Mapping[str, str]
    tried: tuple[Tried, ...]
    rule: str

    @property
    def best(self) -> Tried:
        """The best values with their mean."""
        return next(one for one in self.tried if one.values == self.values)

    @property
    def notices(self) -> list[str]:
        """A sentence for each field whose best value is at an end of what was tried, or one if no value was good."""
        if self.best.mean is None:
            return [
                "every value that was tried diverged or failed, so that none is the best; what went wrong is in tuning"
            ]
        ends = ((field, self.values[field], end) for field, end in self.edges.items())
        return [
            f"the best {field}, {value}, is at the {end} end of what was tried; a better one may lie beyond it"
            for field, value, end in ends
        ]


@dataclass(frozen=True)
class Records:
    """All runs of a directory. Runs are compared along the axis `compare` with the runs labelled `baseline`.

    A panel without runs of that label has no differences. An empty `baseline` is no label: nothing is subtracted.

    equal: what the cells of the study have alike, "steps" as written, or the training "seconds" of the baseline.
    """

    name: str
    description: str
    metric: Metric
    compare: str
    baseline: str
    runs: tuple[Run, ...]
    tuned: tuple[TunedCell, ...] = ()
    target: Target | None = None
    equal: str = "steps"

    @property
    def notices(self) -> list[str]:
        """A sentence for each cell whose runs differ in configuration, code or data, and are not averaged."""
        found: dict[str, dict[str, int]] = {}
        for run in self.runs:
            if run.variant:
                counts = found.setdefault(", ".join(run.labels.values()), {})
                counts[run.variant] = counts.get(run.variant, 0) + 1
        return [
            f"The runs of {cell} were made differently and are kept apart: "
            + "; ".join(f"{variant} ({count} run{'s' if count > 1 else ''})" for variant, count in counts.items())
            for cell, counts in found.items()
        ]

    def rate_edge(self, labels: Mapping[str, str]) -> str:
        """Where the learning rate of a cell was tuned: "least" or "largest" if it is at an end of what was tried."""
        return next((one.edges.get("lr", "") for one in self._searches(labels)), "")

    def tuned_values(self, labels: Mapping[str, str]) -> Mapping[str, Any]:
        """Values that a search found for a cell, by dotted path; empty where nothing was tuned."""
        return next((one.values for one in self._searches(labels)), {})

    def _searches(self, labels: Mapping[str, str]) -> Iterator[TunedCell]:
        return (one for one in self.tuned if one.cell == cell_name(labels))


def cell_name(labels: Mapping[str, str]) -> str:
    """The name of the cell with these labels, as manifests have it."""
    return ",".join(f"{axis}={label}" for axis, label in labels.items())


def read_tuned(directory: Path) -> tuple[TunedCell, ...]:
    """What the searches of the study in `directory` have found so far."""
    manifest = read_object(directory / f"{MANIFEST}.json")
    return tuple(_tuned(cell, one) for cell, one in manifest.get("tuned", {}).items())


def read_records(directory: Path, baseline: str | None = None) -> Records:
    """The runs under `directory`: those of its study; without a study those of all studies and single runs below it.

    baseline: the label to compare with; None: that of the study, and none without a study.
    """
    manifest = read_object(directory / f"{MANIFEST}.json")
    records = _of_study(manifest, directory) if manifest else _joint(directory)
    if baseline is None:
        return records
    labels = list(dict.fromkeys(run.labels[records.compare] for run in records.runs))
    if baseline not in labels:
        raise ValueError(
            f"--baseline: a label of {records.compare} ({', '.join(labels)}) is required, got '{baseline}'"
        )
    return replace(records, baseline=baseline)


def _of_study(manifest: Mapping[str, Any], directory: Path) -> Records:
    runs = _kept_apart(Run(run["labels"], run["seed"], directory / run["directory"]) for run in manifest["runs"])
    metric = METRICS[manifest["metric"]]
    tuned = read_tuned(directory)
    if not tuned and all(run.status(metric) == "missing" for run in runs):
        raise ValueError(
            f"report: runs that have begun are required, got none of the study's {len(runs)} in {directory}"
        )
    name, description = manifest["name"], manifest["description"]
    given = manifest.get("study", {}).get("target")
    target = None if given is None else Target(**given)
    compared = (manifest["compare"], manifest["baseline"])
    return Records(name, description, metric, *compared, runs, tuned, target, manifest.get("equal", "steps"))


def _tuned(cell: str, found: Mapping[str, Any]) -> TunedCell:
    tried = sorted((Tried(**one) for one in found["tried"]), key=lambda one: list(map(_order, one.values.values())))
    return TunedCell(cell, found["values"], found["edges"], tuple(tried), found["rule"])


def _order(value: object) -> tuple[bool, float, str]:
    number = isinstance(value, (int, float))
    return (not number, float(value) if isinstance(value, (int, float)) else 0.0, str(value))


def _joint(directory: Path) -> Records:
    """The runs of all studies below a directory, without those of their searches, and runs of no study.

    There is a panel for each task, its data and length of runs. There is no baseline: none of the runs was chosen.
    """
    manifests = {path.parent: read_object(path) for path in sorted(directory.rglob(f"{MANIFEST}.json"))}
    studies = {home: manifest for home, manifest in manifests.items() if "runs" in manifest}
    places = [home / run["directory"] for home, manifest in studies.items() for run in manifest["runs"]]
    places += [
        path.parent
        for path in directory.rglob("config.json")
        if studies.keys().isdisjoint(path.parents) and read_object(path)
    ]
    found = [place for place in sorted(places) if (place / "config.json").is_file()]
    if not found:
        raise ValueError(f"report: a directory with a study or with runs is required, got {directory}")
    runs = [_single_run(path, directory) for path in found]
    for run, title in zip(runs, _conditions(runs), strict=True):
        if title:
            run.labels["task"] = title
    metrics = {manifest["metric"] for manifest in studies.values()}
    metric = METRICS[metrics.pop() if len(metrics) == 1 else "val_loss"]
    return Records(directory.name, "", metric, "run", "", _kept_apart(runs))


def _conditions(runs: Sequence[Run]) -> list[str]:
    """A title for each run that says its task, data and length; empty if these are the same for all runs."""
    found = [{"steps": run.config.get("steps"), "task": run.config.get("task"), "data": run.data[1]} for run in runs]
    if all(one == found[0] for one in found):
        return ["" for _ in found]
    titles = ["" for _ in found]
    for kind in {run.data[0] for run in runs}:
        places = [place for place, run in enumerate(runs) if run.data[0] == kind]
        for place, name in zip(places, variants([found[place] for place in places]), strict=True):
            titles[place] = ", ".join(filter(None, (kind, name)))
    return titles


def _single_run(path: Path, directory: Path) -> Run:
    seed = read_object(path / "config.json").get("seed", 0)
    name = path.relative_to(directory).as_posix() if path != directory else path.name
    return Run({"run": re.sub(r"/?seed-\d+$", "", name) or directory.name}, seed, path)


def _kept_apart(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The runs, with a variant for those with equal labels that differ in configuration or provenance."""
    cells: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    all_runs = list(runs)
    for run in all_runs:
        if run.environment:
            cells.setdefault(tuple(run.labels.items()), []).append(run)
    found = dict[Path, str]()
    for cell in cells.values():
        made = [{**_without(run.config, _SHARED), **run.provenance} for run in cell]
        found |= {run.directory: name for run, name in zip(cell, variants(made), strict=True)}
    return tuple(replace(run, variant=found.get(run.directory, "")) for run in all_runs)


def _without(config: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in fields}


def learning_rate(config: Mapping[str, Any]) -> float | None:
    """The peak learning rate of a run: its own, else its recipe's."""
    own: float | None = config.get("lr")
    return config.get("recipe", {}).get("lr") if own is None else own
