"""The runs that tune the cells of a study, planned from what has been run so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from ...files import short_name
from ...reports.run import METRICS, Metric, Run
from ...training.callbacks import Limits
from ...training.experiment import Experiment
from ..plan import Cell, PlannedRun, cells, changed, refuse_changed
from ..study import Study
from .base import Trial, Tuned, Tuning, Values, trial_name


def plan_tuning(
    study: Study, directory: Path, failed: Collection[str] = ()
) -> tuple[list[PlannedRun], dict[str, Tuned]]:
    """The runs that the search of `study.tune` needs next, and what it found in the cells where it is over.

    Both follow from the runs in `directory` alone, so that a stopped search continues. A value with a run named in
    `failed` counts as diverged. Raises RecipeError when a run was made with other settings.
    """
    planned: list[PlannedRun] = []
    tuned: dict[str, Tuned] = {}
    for cell in cells(study) if study.tune is not None else ():
        assert study.tune is not None
        search = _CellSearch(study, study.tune, cell, directory, failed)
        left = search.left()
        planned += left
        if not left:
            tuned[cell.name] = study.tune.found(search.experiment, search.trials)
    return planned, tuned


class _CellSearch:
    """The search in one cell.

    trials: those that have ended, after `left`.
    """

    def __init__(self, study: Study, tuning: Tuning, cell: Cell, directory: Path, failed: Collection[str]) -> None:
        self.study, self.tuning, self.cell = study, tuning, cell
        self.directory, self.failed = directory, failed
        self.metric: Metric = METRICS[study.metric]
        self.experiment = changed(study.base, cell.changes)
        self.trials: list[Trial] = []

    def left(self) -> list[PlannedRun]:
        """The runs to do next, after every trial that has ended was seen; none: the search is over."""
        # Each turn knows the scores of more values, until some have no score yet or no more are wanted.
        while wanted := self.tuning.next(self.experiment, self.trials):
            ended: dict[str, Trial | None] = {trial_name(trial.values): trial for trial in self.trials}
            new = {name: values for values in wanted if (name := trial_name(values)) not in ended}
            planned = {name: self.runs(values) for name, values in new.items()}
            refuse_changed([run for runs in planned.values() for run in runs], self.directory)
            ended |= {name: self._trial(values, planned[name]) for name, values in new.items()}
            if left := [run for name, runs in planned.items() if ended[name] is None for run in runs]:
                return left
            self.trials += [trial for values in wanted if (trial := ended[trial_name(values)]) is not None]
        return []

    def runs(self, values: Values) -> list[PlannedRun]:
        """The runs of the next trial, one for each seed of the search."""
        name = trial_name(values)
        own = changed(self.study.base, {**self.cell.changes, **values})
        return [
            PlannedRun(
                {**self.cell.labels, "tuned": name},
                seed,
                self._limited(own.replace(seed=seed)),
                f"tuning/{self.cell.directory}/{short_name(name)}/seed-{seed}",
            )
            for seed in self.tuning.seeds
        ]

    def _limited(self, experiment: Experiment) -> Experiment:
        limits = self.tuning.limits(experiment, self.trials, self.metric)
        return experiment if limits is None else experiment.replace(callbacks=(*experiment.callbacks, limits))

    def _trial(self, values: Values, runs: Sequence[PlannedRun]) -> Trial | None:
        """The trial of these runs: diverged where one diverged or failed, None while one has not ended."""
        scores, seconds, stopped, curves = [], 0.0, [], {}
        for planned in runs:
            if planned.directory in self.failed:
                return Trial(values, math.inf)
            run = Run(dict(planned.labels), planned.seed, self.directory / planned.directory)
            if not run.result:
                return None
            scores.append(self.metric.sign * run.final(self.metric))
            seconds += run.result["seconds"]
            stopped += [run.result["steps"]] if _was_stopped(planned.experiment, run, self.metric) else []
            steps, _, losses = run.curve(self.metric)
            curves[planned.seed] = {k: self.metric.sign * v for k, v in zip(steps, losses, strict=True)}
        return Trial(values, sum(scores) / len(scores), min(stopped, default=None), seconds, curves)


def _was_stopped(experiment: Experiment, run: Run, metric: Metric) -> bool:
    """Whether the limits of an experiment ended its run."""
    limits = next((one for one in experiment.callbacks if isinstance(one, Limits)), None)
    step = int(run.result["steps"])
    return limits is not None and step < experiment.steps and limits.exceeded(step, run.final(metric))
