"""Running a study: what is complete is kept, what was stopped continues, what fails does not stop the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..reports.records import fault_file
from ..training.loading import load_experiment
from ..training.outcome import Result, Tick
from ..training.train import train
from .plan import Planned, expected_seconds, plan, refuse_changed, write_manifest
from .pool import run_pool
from .study import Study


@dataclass(frozen=True)
class News:
    """Something that happened to a run; `fraction` of the study's expected work is done by now.

    `value` is a Tick for "progress", a Result for "done", and the reason, as text, for "failed".
    """

    run: Planned
    kind: Literal["started", "progress", "done", "failed"]
    value: Any
    fraction: float


@dataclass(frozen=True)
class Prepared:
    """A study that was found right, and what is left of it to do in `directory`."""

    directory: Path
    runs: tuple[Planned, ...]
    left: tuple[Planned, ...]
    """Longest first."""
    seconds: Mapping[str, float]
    """Rough guesses of the time of every run, by its directory in the study's."""


def prepare(study: Study, directory: Path) -> Prepared:
    """Check every cell of the study and every run already there; nothing is run. Raises RecipeError."""
    planned = plan(study)
    refuse_changed(planned, directory)
    left = [run for run in planned if not (directory / run.directory / "result.json").exists()]
    seconds = expected_seconds(planned)
    left.sort(key=lambda run: -seconds[run.directory])
    write_manifest(study, planned, directory)
    return Prepared(directory, tuple(planned), tuple(left), seconds)


def run_study(prepared: Prepared, workers: int | None = None) -> Generator[News, None, None]:
    """Do what is left on `workers` processes (one a core) and tell what happens. Leaving the iteration stops it.

    A stopped study, killed or not, continues where it was by preparing and running it again.
    """
    weights, left = prepared.seconds, {run.directory: 1.0 for run in prepared.left}
    total = sum(weights.values())
    jobs = [(run.experiment.model_dump(mode="json"), prepared.directory / run.directory) for run in prepared.left]
    for event in run_pool(_train, jobs, workers or cores()):
        run = prepared.left[event.job]
        fault = fault_file(prepared.directory / run.directory)
        if event.kind == "started":
            fault.unlink(missing_ok=True)
        elif event.kind == "failed":
            fault.parent.mkdir(parents=True, exist_ok=True)
            fault.write_text(event.value, encoding="utf-8")
        if event.kind != "started":
            left[run.directory] = 1 - event.value.step / event.value.steps if event.kind == "progress" else 0.0
        yield News(run, event.kind, event.value, 1 - sum(weights[d] * left[d] for d in left) / total)


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _train(job: tuple[dict[str, Any], Path], report: Callable[[Tick], None]) -> Result:
    """In a worker: one run. The experiment comes as data, because outside components must be imported first."""
    config, directory = job
    last = 0.0

    def progress(tick: Tick) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 0.2:
            last = now
            report(tick)

    return train(load_experiment(config), directory, progress)
