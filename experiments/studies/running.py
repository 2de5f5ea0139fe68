"""Running of a study, alone, with other workers, or by workers that are jobs of a cluster (through submitit).

Complete runs are kept, stopped runs continue from their last checkpoint, and failed runs are marked.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eigengraft.errors import RecipeError, import_optional
from eigengraft.optimizers.recipe.loading import parse_yaml

from ..files import short_name, write_text
from ..reports.records import fault_file
from ..training.outcome import Result
from ..training.rundir import RunDirectory
from .plan import Phase, PlannedRun, plan_study, write_manifest
from .pool import require_guarded, run_pool
from .rendezvous import ATTEMPTS, Rendezvous, train_leased
from .run_cost import study_cost
from .study import Study, load_study

POLL = 0.5
"""Seconds between two checks of runs that other workers hold. A check reads a few small files, and runs take seconds or
longer."""


Kind = Literal["started", "progress", "done", "failed", "died", "elsewhere", "warned"]


@dataclass(frozen=True)
class StudyEvent:
    """An event of one run, which `run_study` yields.

    kind: "started", "progress", "done" or "failed"; "died" if the run's process died and the run is started again;
        "warned" if the run caused a warning; "elsewhere" if another worker holds the run.
    value: a Tick for "progress", a Result for "done", the reason as text for "failed" and "died", the text of the
        warning for "warned", else None.
    fraction: share of the expected seconds of all runs of the phase that is done.
    """

    run: PlannedRun
    kind: Kind
    value: Any
    fraction: float


@dataclass(frozen=True)
class PreparedStudy:
    """A checked study with the runs that are not done yet.

    A study with searches is prepared and run several times, until no search needs more runs. If cells train for equal
    seconds, short runs that measure the time of a step come first.

    rendezvous: exchange between the workers of the study.
    phase: "timing" if `runs` only measure the time of a step, "tuning" if they are the next runs of searches, "study"
        if they are the runs that the study compares.
    runs: all runs of the phase.
    left: runs of the phase without a result, the longest first. In the phase "timing", in their order in `runs`.
    seconds: expected seconds of every run, by its directory.
    measured: number of finished runs whose times have corrected `seconds`.
    """

    rendezvous: Rendezvous
    phase: Phase
    runs: tuple[PlannedRun, ...]
    left: tuple[PlannedRun, ...]
    seconds: Mapping[str, float]
    measured: int


def prepare_study(
    study: Study, directory: Path, failed: Collection[str] = (), storage: str | None = None
) -> PreparedStudy:
    """Check the study by `plan_study`, write its manifest, and return the runs to do. Nothing is run.

    failed: directories of runs that failed. In a search, the values that such a run has tried count as diverged.
    storage: URL of the database through which workers exchange results. The results in the database are copied to
        `directory` before the check. None: the workers share `directory`.
    """
    rendezvous = rendezvous_at(short_name(study.name), directory, storage)
    rendezvous.fetch()
    planned = plan_study(study, directory, failed)
    cost, left = study_cost(planned.next, directory), list(planned.left)
    if planned.phase != "timing":  # timed runs keep their order: all cells are timed once before one is timed again
        left.sort(key=lambda run: -cost.seconds[run.directory])
    write_manifest(study, planned, directory)
    return PreparedStudy(rendezvous, planned.phase, planned.next, tuple(left), cost.seconds, cost.measured)


def run_study(prepared: PreparedStudy, workers: int | None = None) -> Generator[StudyEvent, None, None]:
    """Do the remaining runs and yield their events. If the caller leaves the iteration, the study stops.

    Any number of callers may call this at the same time, on all machines with access to the directory or the database.
    Each run is done by one of them, and the others wait for its result. A stopped or killed study continues when it is
    prepared and run again.

    workers: number of processes; None: one for each core.
    """
    weights, left = prepared.seconds, {run.directory: 1.0 for run in prepared.left}
    total = sum(weights.values())
    waiting = list(prepared.left)
    for run in waiting:
        prepared.rendezvous.leases(run.directory).forget_dead()
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
    """Do `runs` in a pool of `workers` processes, and yield (run, kind, value of a `StudyEvent`) for each event.

    elsewhere: list to which runs that other workers hold are appended.
    """
    jobs = [(run.experiment.model_dump(mode="json"), run.directory, rendezvous) for run in runs]
    for event in run_pool(train_leased, jobs, workers, ATTEMPTS):
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
    """Wait for the runs in `elsewhere`, which other workers hold, and yield an event for each run that ends.

    Runs that ended are removed from the list. Returns when the list is empty, or when a worker has died, so that its
    run can be done here.
    """
    while elsewhere:
        for run in list(elsewhere):
            path, held = rendezvous.directory / run.directory, rendezvous.leases(run.directory).held()
            rendezvous.fetch([run.directory])
            result, fault = RunDirectory(path).read("result"), fault_file(path)
            if result is None and held:
                continue
            if result is None and not fault.exists():
                return  # the worker that held the run has died; the pool does the run
            elsewhere.remove(run)
            yield (run, "failed", fault.read_text("utf-8")) if result is None else (run, "done", Result(**result))
        time.sleep(POLL if elsewhere else 0)


def rendezvous_at(study: str, directory: Path, storage: str | None) -> Rendezvous:
    """Return the exchange between the workers of a study.

    storage: URL of a database; None: the workers share `directory`.
    """
    if storage is None:
        return Rendezvous(directory)
    import_optional("sqlalchemy", "--storage")
    from .database import DatabaseRendezvous

    return DatabaseRendezvous(directory, storage, study)


def complete_study(
    study: Study,
    directory: str | Path,
    workers: int | None = None,
    watch: Callable[[PreparedStudy], AbstractContextManager[Callable[[StudyEvent], None]]] | None = None,
    storage: str | None = None,
) -> dict[str, str]:
    """Do all searches and runs of a study that are not done yet.

    A stopped or killed study continues when this is called again. Processes are spawned, so that a script that calls
    this needs `if __name__ == "__main__"`.

    Args:
        study: the study.
        directory: directory of the study, which is created if it does not exist.
        workers: number of processes. None: one for each core.
        watch: function that returns a context manager for a phase of the study. The context manager is entered before
            the runs of the phase, and yields a function that receives their events. None: events are dropped.
        storage: URL of the database through which workers exchange results. None: the workers share `directory`.

    Returns:
        The reason of every failed run by its directory.

    Raises:
        RecipeError: a cell is invalid, or `directory` contains runs with other settings, code or data, or the script
            that calls this lacks `if __name__ == "__main__"`.
    """
    require_guarded()
    failed, warned = dict[str, str](), set[str]()
    while True:
        prepared = prepare_study(study, Path(directory), failed, storage)
        with (
            nullcontext(lambda event: None) if watch is None else watch(prepared) as on_event,
            closing(run_study(prepared, workers)) as events,
        ):
            for event in events:
                if event.kind == "warned":  # runs of one recipe have the same warnings
                    if event.value not in warned:
                        warned.add(event.value)
                        sys.stderr.write(event.value)
                    continue
                on_event(event)
                if event.kind == "failed":
                    failed[event.run.directory] = event.value
        if prepared.phase == "study":
            return failed


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class StudyJob:
    """A job that does runs until the study has ended. submitit calls it again after preemption or a time-out.

    study: the study as plain data.
    directory: directory of the study, which all jobs see.
    workers: number of processes of the job.
    """

    study: Mapping[str, Any]
    directory: str
    workers: int

    def __call__(self) -> dict[str, str]:
        """Do runs until the study has ended. Return the reason of each failed run by its directory."""
        return complete_study(load_study(self.study), Path(self.directory), self.workers)

    def checkpoint(self) -> Any:
        """Return a new submission of this job. Its runs continue from their last checkpoints."""
        return import_optional("submitit", "--submit").helpers.DelayedSubmission(self)


def submit_study(
    study: Study, directory: Path, cluster: str, jobs: int, workers: int, options: Sequence[str] = ()
) -> list[Any]:
    """Check the study, submit its jobs, and return submitit's job objects.

    cluster: "slurm", "local" for processes of this machine, or another name that submitit accepts.
    jobs: number of jobs.
    workers: number of processes of each job.
    options: `name=value` arguments of `submitit.AutoExecutor.update_parameters`, such as slurm_partition=gpu.

    Raises RecipeError if the study is invalid, submitit is not installed, or submitit refuses the cluster or an option.
    """
    submitit = import_optional("submitit", "--submit")
    pairs = [_option(option) for option in options]
    prepare_study(study, directory)
    logs = (directory / "jobs").absolute()
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        executor.update_parameters(name=study.name, cpus_per_task=workers, **dict(pairs))
    except (ValueError, NameError, RuntimeError, TypeError) as error:
        raise RecipeError(f"--submit, --option: submitit refuses '{cluster}' or {list(options)}: {error}") from None
    job = StudyJob(study.model_dump(mode="json"), str(directory.absolute()), workers)
    with executor.batch():
        submitted = [executor.submit(job) for _ in range(jobs)]
    return submitted


def _option(option: str) -> tuple[str, Any]:
    name, equals, value = option.partition("=")
    if not equals or not re.fullmatch(r"\w+", name):
        raise RecipeError(f"--option: name=value is required, got '{option}'")
    return name, parse_yaml(value, f"--option '{option}'")
