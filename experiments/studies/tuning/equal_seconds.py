"""Lengths of runs with which all cells of a study train as long as their baseline, from a timed run of each cell."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from eigengraft.errors import RecipeError

from ...reports.run import Run
from ...training.callbacks import StopAfter
from ..axes import Setting
from ..plan import Cell, PlannedRun, cells, changed, refuse_changed
from ..study import Study

TIMED_STEPS = 200
"""Steps of a timed run, whose first twentieth, with what is done once, is not counted; of a shorter run all."""


def plan_timing(study: Study, directory: Path, failed: Collection[str] = ()) -> tuple[list[PlannedRun], Study]:
    """The timed runs that are still to be done, and once there are none the study with the steps of every cell.

    A cell has round(N s / t) steps, N and s the steps and the seconds a step of its baseline, t its own seconds a step:
    training seconds, without evaluation. They follow from the runs in `directory` alone. Raises RecipeError for a timed
    run that is named in `failed`, that diverged before it had seconds, or was made with other settings.
    """
    if study.equal == "steps":
        return [], study
    timed = {cell.name: (cell, _timed_run(study, cell)) for cell in cells(study)}
    refuse_changed([run for _, run in timed.values()], directory)
    for _, run in timed.values():
        if run.directory in failed:
            raise RecipeError(f"equal: a timed run of every cell is required, got {run.directory}.error.txt")
    left = [run for _, run in timed.values() if not (directory / run.directory / "result.json").exists()]
    if left:
        return left, study
    seconds = {name: _step_seconds(directory / run.directory) for name, (_, run) in timed.items()}
    axis, baseline = study.compared
    lengths = []
    for name, (cell, _) in timed.items():
        base = Cell({**cell.labels, axis: baseline}, {}).name
        steps = round(timed[base][1].experiment.steps * seconds[base] / seconds[name])
        lengths.append(Setting(when={k: (label,) for k, label in cell.labels.items()}, set={"steps": max(1, steps)}))
    return [], study.replace(equal="steps", settings=(*study.settings, *lengths))


def _timed_run(study: Study, cell: Cell) -> PlannedRun:
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
    return PlannedRun({**cell.labels, "timed": f"{steps} steps"}, study.seeds[0], timed, f"timing/{cell.name}")


def _step_seconds(directory: Path) -> float:
    """Training seconds a step of a timed run after its first row."""
    run = Run({}, 0, directory)
    steps, seconds = [int(row["step"]) for row in run.rows], run.seconds()
    if len(steps) < 2:
        raise RecipeError(f"equal: a timed run that goes on is required, {directory} diverged at step {steps[-1]}")
    return (seconds[-1] - seconds[0]) / (steps[-1] - steps[0])
