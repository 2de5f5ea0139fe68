"""The exchange between workers of a study: leases of runs, results of other workers, and the job that trains a run.

A run is trained by only one worker at a time, however many workers and machines a study has. A worker holds the lease
`number` of a run while it trains the run. Creating a lease fails if the lease exists, so that exactly one of several
workers succeeds. The lease is removed when the run has ended or failed. The lease of a worker that died is not removed.
The next worker creates the lease `number + 1`, for which again only one worker succeeds.

`FileLeases` stores leases as files beside the run, `database.py` as rows of a table. Optuna's heartbeats are not used.
These belong to `Study.optimize` and restart a dead trial as a new trial. With them, a run would not continue from its
checkpoint, and runs outside a search would have no heartbeat.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import make_directory, write_text, writing
from ..reports.records import fault_file
from ..training.experiment import load_experiment
from ..training.outcome import Result, Tick
from ..training.train import train

HEARTBEAT = 5.0
"""Seconds between two heartbeats of a worker."""
STALE = 60.0
"""Seconds without a heartbeat after which a worker counts as dead, if its lock cannot be checked."""


class Leases(ABC):
    """All leases of one run. Methods raise OSError if the storage of the leases cannot be reached."""

    @abstractmethod
    def numbers(self) -> list[int]:
        """Return the numbers of all leases that exist."""

    @abstractmethod
    def alive(self, number: int) -> bool:
        """Return True if the worker that holds this lease is alive, False if it is dead or the lease does not exist."""

    @abstractmethod
    def created(self, number: int) -> AbstractContextManager[bool]:
        """Create a lease that counts as alive inside the block; yield False if another worker has created it."""

    @abstractmethod
    def remove(self, numbers: Iterable[int]) -> None:
        """Remove leases; numbers without a lease are ignored."""

    @abstractmethod
    def beat(self, number: int) -> None:
        """Record a heartbeat of the worker that holds this lease."""

    def held(self) -> bool:
        """Return True if a living worker holds the run."""
        last = self._last()
        return last > 0 and self.alive(last)

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Hold the run inside the block.

        Yields 0 if another worker holds the run, else the number of the lease: one more than the number of workers that
        died with this run.
        """
        own = self._last() + 1
        if own > 1 and self.alive(own - 1):
            yield 0
            return
        with self.created(own) as created:
            if created and any(number != own and self.alive(number) for number in self.numbers()):
                # Other workers have removed leases meanwhile, and one of them holds another lease of this run. So the
                # lease created here is released.
                self.remove([own])
                created = False
            if not created:
                yield 0
                return
            stop = threading.Event()
            beating = threading.Thread(target=self._keep_beating, args=(own, stop), daemon=True)
            beating.start()
            try:
                yield own
            finally:
                stop.set()
                beating.join()
                self.remove(number for number in self.numbers() if number <= own)

    def forget_dead(self) -> None:
        """Remove the leases of dead workers, so that attempts are counted from 1 again."""
        self.remove(number for number in self.numbers() if not self.alive(number))

    def _keep_beating(self, own: int, stop: threading.Event) -> None:
        """Record heartbeats until `stop` is set.

        Ends this process if a later lease exists: another worker has counted this worker as dead and trains the run.
        """
        while not stop.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                if own + 1 in self.numbers():
                    os._exit(1)
                self.beat(own)

    def _last(self) -> int:
        """Return the number of the last lease, 0 if there is none."""
        return max(self.numbers(), default=0)


@dataclass(frozen=True)
class FileLeases(Leases):
    """Leases of one run as files of a directory that all workers see.

    The file `seed-0.lease-<n>` beside the run `seed-0` exists while the n-th worker holds the run. A hard link creates
    the file complete and locked in one step.

    run: directory of the run.
    """

    run: Path

    def numbers(self) -> list[int]:
        head = f"{self.run.name}.lease-"
        found = self.run.parent.iterdir() if self.run.parent.is_dir() else ()
        numbers = (path.name.removeprefix(head) for path in found if path.name.startswith(head))
        return [int(number) for number in numbers if number.isdecimal()]

    def alive(self, number: int) -> bool:
        """Return True if the lease is locked, or if a worker of another machine has recorded a recent heartbeat."""
        lease = self._file(number)
        try:
            with lease.open("r+", encoding="utf-8") as stream:
                if _is_locked(stream.fileno()):
                    return True
                if stream.read() == platform.node() and sys.platform != "win32":
                    return False  # on this machine, an unlocked lease belonged to a worker that died
            return _age(lease) < STALE
        except FileNotFoundError:
            return False

    @contextmanager
    def created(self, number: int) -> Iterator[bool]:
        own = self._file(number)
        make_directory(own.parent)
        with _locked_file(own.with_name(f".{own.name}.{uuid.uuid4().hex}")) as complete:
            try:
                os.link(complete, own)
                first = True
            except FileExistsError:
                first = False
            finally:
                complete.unlink()
            yield first

    def remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._file(number).unlink(missing_ok=True)

    def beat(self, number: int) -> None:
        os.utime(self._file(number))

    def _file(self, number: int) -> Path:
        return self.run.with_name(f"{self.run.name}.lease-{number}")


@contextmanager
def _locked_file(path: Path) -> Iterator[Path]:
    """Write the name of this machine to a file. Lock the file until the `with` statement or this process ends.

    On Windows the file is not locked.
    """
    with writing(path), path.open("w", encoding="utf-8") as stream:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(platform.node())
        stream.flush()
        yield path


def _is_locked(file: int) -> bool:
    """Return True if another process has locked the open file with this descriptor; always False on Windows."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _age(lease: Path) -> float:
    """Return the seconds since a file was changed, by the clock of its file system."""
    probe = lease.with_name(f".{lease.name}.{uuid.uuid4().hex}")
    try:
        probe.touch()
        return probe.stat().st_mtime - lease.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


ATTEMPTS = 3
"""Number of attempts at a run whose process dies. A run that raised an error is not repeated by the same command."""


@dataclass(frozen=True)
class Rendezvous:
    """The exchange through which the workers of a study share runs and results: a directory that all of them see.

    directory: directory of the study on this machine. All files of this worker are stored there.
    """

    directory: Path

    def leases(self, run: str) -> Leases:
        """Return the leases of a run. `run` is its directory relative to that of the study."""
        return FileLeases(self.directory / run)

    def fetch(self, runs: Collection[str] | None = None) -> None:
        """Copy into `directory` the results, and the reasons of failures, that other workers have published. In a
        directory that all workers see, nothing is copied.

        runs: directories of the runs, relative to that of the study; None: all runs of the study.
        """

    def publish(self, run: str) -> None:
        """Make the result of a run that has ended here, or the reason of its failure, available to other workers. All
        of them see it in a common directory.
        """


def train_leased(job: tuple[dict[str, Any], str, Rendezvous], report: Callable[[Tick], None]) -> Result | None:
    """Train one run while this process holds its lease. Return None if another worker holds the lease.

    job: (experiment, directory, exchange). The experiment is plain data. The files that its field `imports` names are
        imported before it is validated. The directory of the run is relative to that of the study.
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
