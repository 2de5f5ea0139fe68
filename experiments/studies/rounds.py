"""The runs that a study needs before the runs that it compares: runs of searches, and short timed runs.

The timed runs measure the time of a step. If cells train for equal seconds, these times determine their numbers of
steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median

from eigengraft.errors import RecipeError

from ..files import short_name
from ..reports.records import Metric, Run, TunedCell
from ..training.callbacks import Limits, StopAfter
from ..training.experiment import Experiment
from .axes import Setting
from .plan import Cell, PlannedRun, cells, changed, refuse_changed, unfinished
from .study import Study
from .tuning import Trial, Tuning, Values, trial_name


def plan_tuning(
    study: Study, directory: Path, failed: Collection[str] = ()
) -> tuple[list[PlannedRun], dict[str, TunedCell]]:
    """Return the runs that the searches of `study.tune` need next, and the results of completed searches by cell name.

    Runs and results depend on the runs in `directory` alone, so that a stopped search continues. Raises RecipeError if
    a run was made with other settings.

    failed: directories of runs that failed; their values count as diverged.
    """
    planned: list[PlannedRun] = []
    tuned: dict[str, TunedCell] = {}
    for cell in cells(study) if study.tune is not None else ():
        assert study.tune is not None
        search = _CellSearch(study, study.tune, cell, directory, failed)
        left = search.left()
        planned += left
        if not left:
            tuned[cell.name] = study.tune.found(search.experiment, search.trials, study.measured, cell.name)
    return planned, tuned


class _CellSearch:
    """The search in one cell.

    trials: completed trials, filled by `left`.
    """

    def __init__(self, study: Study, tuning: Tuning, cell: Cell, directory: Path, failed: Collection[str]) -> None:
        self.study, self.tuning, self.cell = study, tuning, cell
        self.directory, self.failed = directory, failed
        self.metric: Metric = study.measured
        self.experiment = changed(study.base, cell.changes)
        self.trials: list[Trial] = []

    def left(self) -> list[PlannedRun]:
        """Read all completed trials and return the runs to do next. An empty list means that the search is complete."""
        # Each iteration adds the trials of all wanted values. The loop ends if one of these values has runs to do, or
        # if no values are wanted.
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
        """Return the runs of a trial of these values, one for each seed of the search."""
        name, planned = trial_name(values), []
        own = changed(self.study.base, {**self.cell.changes, **values})
        for seed in self.tuning.seeds:
            experiment = own.replace(seed=seed)
            if (limits := self.tuning.limits(experiment, self.trials, self.metric)) is not None:
                experiment = experiment.replace(callbacks=(*experiment.callbacks, limits))
            directory = f"tuning/{self.cell.directory}/{short_name(name)}/seed-{seed}"
            planned.append(PlannedRun({**self.cell.labels, "tuned": name}, seed, experiment, directory))
        return planned

    def _trial(self, values: Values, runs: Sequence[PlannedRun]) -> Trial | None:
        """Return the trial of these runs, or None while a run has not ended. A failed run makes the trial diverged."""
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
    """Return True if successive halving ended a run early, by the callback `Limits` of its experiment."""
    limits = next((one for one in experiment.callbacks if isinstance(one, Limits)), None)
    step = int(run.result["steps"])
    return limits is not None and step < experiment.steps and limits.exceeded(step, run.final(metric))


ROUNDS = 3
"""Number of timed runs of every cell. Cells are timed in turn, so that other load of the machine affects all of them.
"""
TIMED_STEPS = 100
"""Largest number of steps of a timed run. The first 5 percent are not counted: they contain one-time setup."""


def plan_timing(study: Study, directory: Path, failed: Collection[str] = ()) -> tuple[list[PlannedRun], Study]:
    """Return the timed runs that are not done yet, or, if there are none, the study with the steps of every cell set.

    In a round every cell has one timed run. Let s be the seconds per step of the cell in a round, and s_b those of its
    baseline. The cell then has round(N r) steps, where N is the number of steps of the baseline and r the median of s_b
    / s over rounds. Only training seconds count, without evaluation. The result depends on the runs in `directory`
    alone.

    Raises RecipeError if a timed run has failed, diverged at once, or had other settings.

    failed: directories of runs that failed.
    """
    if study.equal == "steps":
        return [], study
    own = list(cells(study))
    rounds = [{cell.name: _timed_run(study, cell, turn) for cell in own} for turn in range(ROUNDS)]
    timed = [run for runs in rounds for run in runs.values()]
    refuse_changed(timed, directory)
    for run in timed:
        if run.directory in failed:
            raise RecipeError(
                f"equal: a timed run failed, see {run.directory}.error.txt; without its time the steps of "
                "the cell cannot be chosen"
            )
    if left := unfinished(timed, directory):
        return left, study
    seconds = [{name: _step_seconds(directory / run.directory) for name, run in runs.items()} for runs in rounds]
    axis, baseline = study.compared
    lengths = []
    for cell in own:
        base = Cell({**cell.labels, axis: baseline}, {}).name
        ratio = median(one[base] / one[cell.name] for one in seconds)
        steps = max(1, round(rounds[0][base].experiment.steps * ratio))
        lengths.append(Setting(when={k: (label,) for k, label in cell.labels.items()}, set={"steps": steps}))
    return [], study.replace(equal="steps", settings=(*study.settings, *lengths))


def _timed_run(study: Study, cell: Cell, turn: int) -> PlannedRun:
    """Return a run of only the first steps of the cell, without diagnostics, callbacks and intermediate checkpoints."""
    experiment = changed(study.base, cell.changes)
    steps = min(TIMED_STEPS, experiment.steps)
    timed = experiment.replace(
        seed=study.seeds[0],
        eval_every=experiment.steps,
        log_every=max(1, steps // 20),
        checkpoint_every=experiment.steps,
        diagnostics=None,
        callbacks=(StopAfter(step=steps),),
    )
    labels = {**cell.labels, "timed": f"round {turn + 1}"}
    return PlannedRun(labels, study.seeds[0], timed, f"timing/{cell.directory}/round-{turn + 1}")


def _step_seconds(directory: Path) -> float:
    """Return the training seconds per step of a timed run, without the steps before its first row of metrics."""
    run = Run({}, 0, directory)
    steps, seconds = [int(row["step"]) for row in run.rows], run.seconds()
    if len(steps) < 2:
        raise RecipeError(f"equal: the timed run {directory} diverged at step {steps[-1]}; lower its learning rate")
    return (seconds[-1] - seconds[0]) / (steps[-1] - steps[0])
