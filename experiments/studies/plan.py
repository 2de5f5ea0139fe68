"""The runs of a study: every cell becomes a checked experiment before anything is run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eigengraft.component import RecipeError

from ..reports.records import MANIFEST
from ..training.experiment import Experiment
from ..training.loading import load_experiment
from ..training.rundir import RunDirectory
from .study import Study


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study; `directory` is relative to that of the study."""

    labels: Mapping[str, str]
    seed: int
    experiment: Experiment
    directory: str

    @property
    def title(self) -> str:
        """A short name for progress displays."""
        return "/".join([*self.labels.values(), f"seed-{self.seed}"])


def plan_runs(study: Study) -> list[PlannedRun]:
    """All runs of the study, cell by cell, seeds innermost. Raises RecipeError naming every cell that is wrong."""
    planned, faults = [], []
    for choice in itertools.product(*(choices.items() for choices in study.axes.values())):
        labels = {axis: label for axis, (label, _) in zip(study.axes, choice, strict=True)}
        cell = ",".join(f"{axis}={label}" for axis, label in labels.items())
        changes = {path: value for _, some in choice for path, value in some.items()}
        for setting in study.settings:
            changes |= setting.set if setting.holds(labels) else {}
        try:
            experiment = _changed(study.base, changes)
        except RecipeError as error:
            faults.append(f"{cell}: {str(error).replace(chr(10), f'{chr(10)}{cell}: ')}")
            continue
        planned += [PlannedRun(labels, s, experiment.replace(seed=s), f"{cell}/seed-{s}") for s in study.seeds]
    if faults:
        raise RecipeError("\n".join(faults))
    return planned


def _changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Experiment:
    # Complete fields first: a path into a recipe or a task means the recipe or task that the cell chose.
    complete = {path: value for path, value in changes.items() if path in Experiment.model_fields}
    deep = [f"{path}={json.dumps(value)}" for path, value in changes.items() if path not in complete]
    return load_experiment({**base, **complete}, deep)


def refuse_changed(planned: list[PlannedRun], directory: Path) -> None:
    """Raise RecipeError when `directory` holds runs of these cells that were made with other settings."""
    faults = []
    for run in planned:
        path = directory / run.directory
        if (path / "config.json").exists():
            try:
                RunDirectory(path).claim(run.experiment.model_dump(mode="json"))
            except RecipeError as error:
                faults.append(str(error))
    if faults:
        more = f"\n... and {len(faults) - 4} more runs" if len(faults) > 4 else ""
        raise RecipeError("the study has changed since these runs were made:\n" + "\n".join(faults[:4]) + more)


def write_manifest(study: Study, planned: list[PlannedRun], directory: Path) -> None:
    """Write what reports need to know about the study, beside its runs."""
    axis, baseline = study.compared
    content = {
        "name": study.name,
        "description": study.description,
        "metric": study.metric,
        "compare": axis,
        "baseline": baseline,
        "study": study.model_dump(mode="json"),
        "runs": [{"directory": run.directory, "labels": dict(run.labels), "seed": run.seed} for run in planned],
    }
    directory.mkdir(parents=True, exist_ok=True)
    RunDirectory(directory).write(MANIFEST, content)


def expected_seconds(planned: Iterable[PlannedRun]) -> dict[str, float]:
    """A rough guess of the time of each run, by directory, good enough to start the longest first.

    6 FLOP per weight and target at 50 GFLOP/s, that of a common core, and a fixed cost per step. The data of every
    task is loaded once, so that missing data is found before the first run.
    """
    per_step: dict[str, float] = {}
    seconds = {}
    for run in planned:
        task = run.experiment.task
        key = task.model_dump_json()
        if key not in per_step:
            weights = sum(p.numel() for p in task.new_model(0).parameters() if p.requires_grad)
            per_step[key] = 2e-3 + 6 * weights * task.load().batch(0, 0).targets.numel() / 5e10
        seconds[run.directory] = run.experiment.steps * per_step[key]
    return seconds
