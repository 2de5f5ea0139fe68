"""The runs that tune the cells of a study, planned from what has been run so far."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from pathlib import Path

from ..reports.run import METRICS, Metric
from .plan import Cell, PlannedRun, cells, changed, refuse_changed
from .study import Study
from .tuning import Tuned, Tuning, found


def plan_tuning(
    study: Study, directory: Path, failed: Collection[str] = ()
) -> tuple[list[PlannedRun], dict[str, Tuned]]:
    """The runs that the search of `study.tune` needs next, and what it found in the cells where it is over.

    Both follow from the runs in `directory` alone, so that a stopped search continues. A value with a run named in
    `failed` counts as diverged. Raises RecipeError when a run was made with other settings.
    """
    planned: list[PlannedRun] = []
    tuned: dict[str, Tuned] = {}
    if study.tune is None:
        return planned, tuned
    metric = METRICS[study.metric]
    for cell in cells(study):
        start = study.tune.first(changed(study.base, cell.changes))
        scores: dict[int, float] = {}
        # Each turn knows the scores of more values, until some have no score yet or no more are wanted.
        while wanted := study.tune.missing(scores):
            runs = {k: _runs(study, study.tune, cell, study.tune.value(start, k)) for k in wanted}
            refuse_changed([run for some in runs.values() for run in some], directory)
            ended = {k: _score(some, directory, metric, failed) for k, some in runs.items()}
            scores |= {k: score for k, score in ended.items() if score is not None}
            if left := [run for k in wanted if ended[k] is None for run in runs[k]]:
                planned += left
                break
        else:
            tuned[cell.name] = found(study.tune, start, scores, metric)
    return planned, tuned


def _runs(study: Study, tuning: Tuning, cell: Cell, value: float) -> list[PlannedRun]:
    label = f"{tuning.field}={value:g}"
    experiment = changed(study.base, {**cell.changes, tuning.field: value})
    return [
        PlannedRun(
            {**cell.labels, "tuned": label},
            seed,
            experiment.replace(seed=seed),
            f"tuning/{cell.name}/{label}/seed-{seed}",
        )
        for seed in tuning.seeds
    ]


def _score(runs: Iterable[PlannedRun], directory: Path, metric: Metric, failed: Collection[str]) -> float | None:
    """metric.sign * mean of the metric: infinite where a run diverged or failed, None while one has not ended."""
    values = []
    for run in runs:
        if run.directory in failed:
            return math.inf
        result = directory / run.directory / "result.json"
        if not result.exists():
            return None
        value = json.loads(result.read_text(encoding="utf-8"))[metric.key]
        values.append(metric.sign * value if value is not None and math.isfinite(value) else math.inf)
    return sum(values) / len(values)
