"""Run a study: complete runs are kept, stopped runs continue, and a failed run does not stop the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..reports.run import fault_file
from ..training.loading import load_experiment
from ..training.outcome import Result, Tick
from ..training.train import train
from .plan import PlannedRun, expected_seconds, plan_runs, refuse_changed, write_manifest
from .pool import run_pool
from .study import Study
from .tuning.rounds import plan_tuning


@dataclass(frozen=True)
class StudyEvent:
    """An event of one run.

    value: a Tick for "progress", a Result for "done", and the reason, as text, for "failed".
    fraction: share of the study's expected work that is done.
    """

    run: PlannedRun
    kind: Literal["started", "progress", "done", "failed"]
    value: Any
    fraction: float


@dataclass(frozen=True)
class PreparedStudy:
    """A checked study with the runs that are still to be done.

    A study that tunes is prepared and run several times: its searches go on, until nothing is left to tune.

    directory: of the study.
    tuning: whether `runs` are the next runs of the searches, and not the study's own.
    runs: all runs.
    left: runs without a result, the longest first.
    seconds: rough guess of the time of every run, by its directory.
    """

    directory: Path
    tuning: bool
    runs: tuple[PlannedRun, ...]
    left: tuple[PlannedRun, ...]
    seconds: Mapping[str, float]


def prepare_study(study: Study, directory: Path, failed: Collection[str] = ()) -> PreparedStudy:
    """Check every cell of the study and every run already in `directory`; nothing is run. Raises RecipeError.

    A value whose run is named in `failed` counts as diverged while the study tunes.
    """
    if study.tune is not None:
        plan_runs(study)  # names every wrong cell, where a search would stop at the first
    tuning, tuned = plan_tuning(study, directory, failed)
    own = plan_runs(study, tuned)
    planned = tuning or own
    refuse_changed(planned, directory)
    left = [run for run in planned if not (directory / run.directory / "result.json").exists()]
    seconds = expected_seconds(planned)
    left.sort(key=lambda run: -seconds[run.directory])
    write_manifest(study, own, tuned, directory)
    return PreparedStudy(directory, bool(tuning), tuple(planned), tuple(left), seconds)


def run_study(prepared: PreparedStudy, workers: int | None = None) -> Generator[StudyEvent, None, None]:
    """Do the runs that are left on `workers` processes, default one per core, and yield events.

    Leaving the iteration stops the study.
    A stopped or killed study continues when it is prepared and run again.
    """
    weights, left = prepared.seconds, {run.directory: 1.0 for run in prepared.left}
    total = sum(weights.values())
    jobs = [(run.experiment.model_dump(mode="json"), prepared.directory / run.directory) for run in prepared.left]
    for event in run_pool(_train, jobs, workers or available_cores()):
        run = prepared.left[event.job]
        fault = fault_file(prepared.directory / run.directory)
        if event.kind == "started":
            fault.unlink(missing_ok=True)
        elif event.kind == "failed":
            fault.parent.mkdir(parents=True, exist_ok=True)
            fault.write_text(event.value, encoding="utf-8")
        if event.kind != "started":
            left[run.directory] = 1 - event.value.step / event.value.steps if event.kind == "progress" else 0.0
        yield StudyEvent(run, event.kind, event.value, 1 - sum(weights[d] * left[d] for d in left) / total)


def available_cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _train(job: tuple[dict[str, Any], Path], report: Callable[[Tick], None]) -> Result:
    """Train one run in a worker. The experiment is plain data, because its imports must be done first."""
    config, directory = job
    last = 0.0

    def progress(tick: Tick) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 0.2:
            last = now
            report(tick)

    return train(load_experiment(config), directory, progress)
