"""Run a study, alone or with other workers: complete runs are kept, stopped ones continue, failed ones are marked."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eigengraft.errors import RecipeError

from ..files import short_name, write_text
from ..reports.run import fault_file
from ..training.outcome import Result
from ..training.rundir import RunDirectory
from .plan import (
    PlannedRun,
    expected_seconds,
    plan_runs,
    refuse_changed,
    refuse_other_provenance,
    unfinished,
    write_manifest,
)
from .pool import run_pool
from .study import Study
from .tuning.equal_seconds import plan_timing
from .tuning.rounds import plan_tuning
from .workers.claimed_run import ATTEMPTS, train_claimed
from .workers.rendezvous import Rendezvous, SharedDirectory

POLL = 0.5
"""Seconds between two looks at the runs of other workers."""


Phase = Literal["timing", "tuning", "study"]
Kind = Literal["started", "progress", "done", "failed", "died", "elsewhere"]


@dataclass(frozen=True)
class StudyEvent:
    """An event of one run.

    kind: "died": its process died and it will be begun again; "elsewhere": another worker holds it, and will end it.
    value: a Tick for "progress", a Result for "done", and the reason, as text, for "failed" and "died".
    fraction: share of the study's expected work that is done.
    """

    run: PlannedRun
    kind: Kind
    value: Any
    fraction: float


@dataclass(frozen=True)
class PreparedStudy:
    """A checked study with the runs that are still to be done.

    A study that tunes is prepared and run several times: its searches go on, until nothing is left to tune. Before
    them runs are timed where all cells train for equal seconds.

    rendezvous: where its workers meet.
    phase: whether `runs` are timed, are the next runs of the searches, or the study's own.
    runs: all runs.
    left: runs without a result, the longest first.
    seconds: rough guess of the time of every run, by its directory.
    """

    rendezvous: Rendezvous
    phase: Phase
    runs: tuple[PlannedRun, ...]
    left: tuple[PlannedRun, ...]
    seconds: Mapping[str, float]


def prepare_study(
    study: Study, directory: Path, failed: Collection[str] = (), storage: str | None = None
) -> PreparedStudy:
    """Check every cell of the study and every run already in `directory`; nothing is run. Raises RecipeError.

    With `storage`, the URL of a database, results of other workers are brought into the directory first.
    A value whose run is named in `failed` counts as diverged while the study tunes.
    """
    rendezvous = rendezvous_at(short_name(study.name), directory, storage)
    rendezvous.fetch()
    if study.tune is not None or study.equal == "seconds":
        plan_runs(study)  # names every wrong cell, where a search would stop at the first
    timing, timed = plan_timing(study, directory, failed)
    tuning, tuned = ([], {}) if timing else plan_tuning(timed, directory, failed)
    own = plan_runs(timed, tuned)
    planned = timing or tuning or own
    refuse_changed(planned, directory)
    refuse_other_provenance(own, directory)
    left = unfinished(planned, directory)
    seconds = expected_seconds(planned)
    if not timing:  # rounds of timed runs stay in their order
        left.sort(key=lambda run: -seconds[run.directory])
    write_manifest(study, own, tuned, directory)
    phase: Phase = "timing" if timing else "tuning" if tuning else "study"
    return PreparedStudy(rendezvous, phase, tuple(planned), tuple(left), seconds)


def run_study(prepared: PreparedStudy, workers: int | None = None) -> Generator[StudyEvent, None, None]:
    """Do the runs that are left on `workers` processes, default one per core, and yield events.

    Any number of callers, on any machines that see the directory or the database, may do so at once: each run is done
    by one of them, and the others wait for it. Leaving the iteration stops the study. A stopped or killed study
    continues when it is prepared and run again.
    """
    weights, left = prepared.seconds, {run.directory: 1.0 for run in prepared.left}
    total = sum(weights.values())
    waiting = list(prepared.left)
    for run in waiting:
        prepared.rendezvous.claims(run.directory).forget_dead()
    while waiting:
        elsewhere: list[PlannedRun] = []
        for run, kind, value in itertools.chain(
            _pool_events(prepared.rendezvous, waiting, workers or available_cores(), elsewhere),
            _awaited(prepared.rendezvous, elsewhere),
        ):
            if kind in ("progress", "done", "failed"):
                left[run.directory] = 1 - value.step / value.steps if kind == "progress" else 0.0
            yield StudyEvent(run, kind, value, 1 - sum(weights[d] * left[d] for d in left) / total)
        waiting = elsewhere


def _pool_events(
    rendezvous: Rendezvous, runs: Sequence[PlannedRun], workers: int, elsewhere: list[PlannedRun]
) -> Iterator[tuple[PlannedRun, Kind, Any]]:
    """Events of a pool that does these runs; those that another worker holds are put into `elsewhere`."""
    jobs = [(run.experiment.model_dump(mode="json"), run.directory, rendezvous) for run in runs]
    for event in run_pool(train_claimed, jobs, workers, ATTEMPTS):
        run = runs[event.job]
        if event.kind == "failed":
            write_text(fault_file(rendezvous.directory / run.directory), event.value)
            rendezvous.publish(run.directory)
        if event.kind == "done" and event.value is None:
            elsewhere.append(run)
            yield run, "elsewhere", None
        else:
            yield run, event.kind, event.value


def _awaited(rendezvous: Rendezvous, elsewhere: list[PlannedRun]) -> Iterator[tuple[PlannedRun, Kind, Any]]:
    """Events of runs that other workers hold, until all ended or a worker died; those that ended leave the list."""
    while elsewhere:
        for run in list(elsewhere):
            path, held = rendezvous.directory / run.directory, rendezvous.claims(run.directory).held()
            rendezvous.fetch([run.directory])
            result, fault = RunDirectory(path).read("result"), fault_file(path)
            if result is None and held:
                continue
            if result is None and not fault.exists():
                return  # abandoned: the pool takes it
            elsewhere.remove(run)
            yield (run, "failed", fault.read_text("utf-8")) if result is None else (run, "done", Result(**result))
        time.sleep(POLL if elsewhere else 0)


def rendezvous_at(study: str, directory: Path, storage: str | None) -> Rendezvous:
    """Where workers meet: the database with the URL `storage`; none: the directory. Raises RecipeError for no URL."""
    if storage is None:
        return SharedDirectory(directory)
    try:
        from .workers.database import DatabaseRendezvous
    except ImportError:
        required = "SQLAlchemy is required (pip install eigengraft[search]), got none"
        raise RecipeError(f"--storage: {required}") from None
    return DatabaseRendezvous(directory, storage, study)


def complete_study(
    study: Study,
    directory: Path,
    workers: int | None = None,
    watch: Callable[[PreparedStudy], AbstractContextManager[Callable[[StudyEvent], None]]] | None = None,
    storage: str | None = None,
) -> dict[str, str]:
    """Tune and run a study to its end; return the reason of every run that failed, by its directory.

    Workers meet in `directory`, or in the database with the URL `storage`, which brings all results into `directory`.
    `watch` is entered for the runs of every round of the search, and for those of the study, and is told their events.
    """
    failed: dict[str, str] = {}
    while True:
        prepared = prepare_study(study, directory, failed, storage)
        with (
            nullcontext(lambda event: None) if watch is None else watch(prepared) as told,
            closing(run_study(prepared, workers)) as events,
        ):
            for event in events:
                told(event)
                if event.kind == "failed":
                    failed[event.run.directory] = event.value
        if prepared.phase == "study":
            return failed


def available_cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
