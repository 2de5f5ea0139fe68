"""Lengths of runs with which all cells of a study train as long as their baseline, from timed runs of each cell."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from statistics import median

from eigengraft.errors import RecipeError

from ...reports.run import Run
from ...training.callbacks import StopAfter
from ..axes import Setting
from ..plan import Cell, PlannedRun, cells, changed, refuse_changed, unfinished
from ..study import Study

ROUNDS = 3
"""Timed runs of every cell; cells are timed in turn, so that what else the machine does meets all of them."""
TIMED_STEPS = 100
"""Steps of a timed run, whose first twentieth, with what is done once, is not counted; of a shorter run all."""


def plan_timing(study: Study, directory: Path, failed: Collection[str] = ()) -> tuple[list[PlannedRun], Study]:
    """The timed runs that are still to be done, and once there are none the study with the steps of every cell.

    A cell has round(N r) steps, N the steps of its baseline and r the median over rounds of the baseline's seconds a
    step over its own: training seconds, without evaluation. They follow from the runs in `directory` alone. Raises
    RecipeError for a timed run that is named in `failed`, that diverged at once, or was made with other settings.
    """
    if study.equal == "steps":
        return [], study
    own = list(cells(study))
    rounds = [{cell.name: _timed_run(study, cell, turn) for cell in own} for turn in range(ROUNDS)]
    timed = [run for runs in rounds for run in runs.values()]
    refuse_changed(timed, directory)
    for run in timed:
        if run.directory in failed:
            raise RecipeError(f"equal: a timed run of every cell is required, got {run.directory}.error.txt")
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
    """The first steps of a run of the cell, without what it writes beside its metrics."""
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
    """Training seconds a step of a timed run after its first row."""
    run = Run({}, 0, directory)
    steps, seconds = [int(row["step"]) for row in run.rows], run.seconds()
    if len(steps) < 2:
        raise RecipeError(f"equal: a timed run that goes on is required, {directory} diverged at step {steps[-1]}")
    return (seconds[-1] - seconds[0]) / (steps[-1] - steps[0])
