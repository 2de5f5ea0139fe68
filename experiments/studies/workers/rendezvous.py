"""The exchange between workers of a study: leases of runs, results of other workers, and the job that trains a run."""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files import write_text
from ...reports.records import fault_file
from ...training.experiment import load_experiment
from ...training.outcome import Result, Tick
from ...training.train import train
from .leases import FileLeases, Leases

ATTEMPTS = 3
"""Number of attempts at a run whose process dies. A run that raised an error is not repeated by the same command."""


@dataclass(frozen=True)
class Rendezvous(ABC):
    """The exchange through which the workers of a study share runs and results.

    directory: directory of the study on this machine. All files of this worker are stored there.
    """

    directory: Path

    @abstractmethod
    def leases(self, run: str) -> Leases:
        """Return the leases of a run. `run` is its directory relative to that of the study."""

    @abstractmethod
    def fetch(self, runs: Collection[str] | None = None) -> None:
        """Copy into `directory` the results, and the reasons of failures, that other workers have published.

        runs: directories of the runs, relative to that of the study; None: all runs of the study.
        """

    @abstractmethod
    def publish(self, run: str) -> None:
        """Make the result of a run that has ended here, or the reason of its failure, available to other workers."""


@dataclass(frozen=True)
class SharedDirectory(Rendezvous):
    """The exchange between workers that see the same directory. Each worker reads all results there, without copies."""

    def leases(self, run: str) -> Leases:
        return FileLeases(self.directory / run)

    def fetch(self, runs: Collection[str] | None = None) -> None:
        """Do nothing: results of other workers are in the directory."""

    def publish(self, run: str) -> None:
        """Do nothing: other workers see the directory."""


def train_leased(job: tuple[dict[str, Any], str, Rendezvous], report: Callable[[Tick], None]) -> Result | None:
    """Train one run while this process holds its lease. Return None if another worker holds the lease.

    job: (experiment, directory, exchange). The experiment is plain data, so that its imports run before it is
        validated. The directory of the run is relative to that of the study.
    report: function that receives the progress, at most five times a second.
    """
    config, run, rendezvous = job
    directory = rendezvous.directory / run
    fault = fault_file(directory)
    with rendezvous.leases(run).hold() as number:
        if number == 0:
            return None
        rendezvous.fetch([run])  # another worker may have ended the run just before
        fault.unlink(missing_ok=True)
        rendezvous.publish(run)
        try:
            if number > ATTEMPTS:
                raise RuntimeError(
                    f"the process of this run died in each of {number - 1} attempts, perhaps for lack of memory; "
                    "to try again, give the same command again"
                )
            return train(load_experiment(config), directory, _throttled(report))
        except Exception:
            with suppress(OSError):  # the disk may be full; the error that is raised tells the user
                write_text(fault, traceback.format_exc())  # before other workers see that the run is free
            raise
        finally:
            rendezvous.publish(run)


def _throttled(report: Callable[[Tick], None]) -> Callable[[Tick], None]:
    """Return a function that calls `report` at most five times a second and drops the other ticks."""
    last = 0.0

    def progress(tick: Tick) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 0.2:
            last = now
            report(tick)

    return progress
