"""The exchange between workers of a study: leases of runs, results of other workers, and the job that trains a run.

A run is trained by only one worker at a time, however many workers and machines a study has. A worker holds the lease
of a run while it trains the run. Creating a lease fails if the run has one, so that exactly one of several workers
succeeds. The lease is removed when the run has ended or failed. The lease of a worker that died remains, and the next
worker removes it before it creates its own. Each lease has a random token, and a lease is removed only by its token. So
if two workers find the lease of a dead worker, the slower one does not remove the new lease of the faster one.

`FileLeases` stores leases as files beside the run, `database.py` as rows of a table. Optuna's heartbeats are not used.
These belong to `Study.optimize` and restart a dead trial as a new trial. With them, a run would not continue from its
checkpoint, and runs outside a search would have no heartbeat.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import sys
import threading
import time
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eigengraft.errors import RecipeError

from ..files import make_directory, write_text, writing
from ..reports.records import fault_file
from ..training.experiment import load_experiment
from ..training.outcome import Result, Tick
from ..training.train import train
from .plan import refuse_changed_study
from .pool import EndPool

HEARTBEAT = 5.0
"""Seconds between two heartbeats of a worker. Each one writes to the directory or database that all workers share."""
STALE = 60.0
"""Seconds without a heartbeat after which a worker counts as dead, if its lock cannot be checked. They are 12
heartbeats, so that a worker on a slow file system or a busy machine does not count as dead."""


class Lease(NamedTuple):
    """The right of one worker to train a run.

    number: number of the attempt: one more than the number of workers that died with this run.
    token: random text that only this lease has.
    """

    number: int
    token: str


class Leases(ABC):
    """The lease of one run. Methods raise OSError if the storage of the leases cannot be reached."""

    @abstractmethod
    def present(self) -> Lease | None:
        """Return the lease that exists, None if there is none."""

    @abstractmethod
    def alive(self, lease: Lease) -> bool:
        """Return True if the worker that holds this lease is alive, False if it is dead or the lease does not exist."""

    @abstractmethod
    def created(self, number: int) -> AbstractContextManager[Lease | None]:
        """Create a lease of the run, which is alive during the `with` statement, and yield it. Yield None if the run
        has a lease already.

        number: number of the attempt, as in `Lease`.
        """

    @abstractmethod
    def remove(self, lease: Lease) -> None:
        """Remove this lease if it exists. A lease with another token is never removed."""

    @abstractmethod
    def beat(self, lease: Lease) -> bool:
        """Record a heartbeat of the worker that holds this lease. Return False if the lease does not exist."""

    def held(self) -> bool:
        """Return True if a living worker holds the run."""
        lease = self.present()
        return lease is not None and self.alive(lease)

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Hold the run inside the block. Yields 0 if another worker holds the run, else the number of the attempt."""
        number, last = 1, self.present()
        if last is not None:
            if self.alive(last):
                yield 0
                return
            number = last.number + 1
            self.remove(last)
        with self.created(number) as own:
            if own is None:
                yield 0
                return
            stop = threading.Event()
            beating = threading.Thread(target=self._keep_beating, args=(own, stop), daemon=True)
            beating.start()
            try:
                yield own.number
            finally:
                stop.set()
                beating.join()
                self.remove(own)

    def forget_dead(self) -> None:
        """Remove the lease of a dead worker, so that attempts are counted from 1 again."""
        lease = self.present()
        if lease is not None and not self.alive(lease):
            self.remove(lease)

    def _keep_beating(self, own: Lease, stop: threading.Event) -> None:
        """Record heartbeats until `stop` is set.

        Ends this process if its lease was removed: another worker has counted this worker as dead and may train the
        run.
        """
        while not stop.wait(HEARTBEAT):
            with suppress(OSError):
                if not self.beat(own):
                    os._exit(1)


@dataclass(frozen=True)
class FileLeases(Leases):
    """The lease of one run as a file in a directory that all workers see.

    The file `seed-0.lease/<number>-<token>` beside the run `seed-0` exists while a worker holds the run. To create the
    lease, a worker makes a directory of another name, with the file complete and locked inside, and renames it to
    `seed-0.lease`. The renaming fails if a directory `seed-0.lease` with a file exists.

    run: directory of the run.
    """

    run: Path

    def present(self) -> Lease | None:
        try:
            names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return None
        found = (re.fullmatch(r"(\d+)-([0-9a-f]+)", name) for name in names)
        return next((Lease(int(one[1]), one[2]) for one in found if one is not None), None)

    def alive(self, lease: Lease) -> bool:
        """Return True if the lease is locked, or if a worker of another machine has recorded a recent heartbeat."""
        file = self._file(lease)
        try:
            with file.open("r+", encoding="utf-8") as stream:
                if _is_locked(stream.fileno()):
                    return True
                if stream.read() == platform.node() and sys.platform != "win32":
                    return False  # on this machine, an unlocked lease belonged to a worker that died
            return self._age(file) < STALE
        except FileNotFoundError:
            return False

    @contextmanager
    def created(self, number: int) -> Iterator[Lease | None]:
        own, first = Lease(number, uuid.uuid4().hex), True
        draft = self._draft()
        make_directory(draft)
        with _locked_file(draft / self._file(own).name):
            with suppress(OSError):
                # Windows cannot rename a directory to the name of an existing one, so an empty folder is removed first.
                # If the folder contains a lease, `rmdir` fails and removes nothing.
                self._folder.rmdir()
            try:
                draft.rename(self._folder)
            except OSError as error:
                shutil.rmtree(draft)
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                first = False
            yield own if first else None

    def remove(self, lease: Lease) -> None:
        self._file(lease).unlink(missing_ok=True)
        with suppress(OSError):  # the folder may have the new lease of another worker
            self._folder.rmdir()

    def beat(self, lease: Lease) -> bool:
        try:
            os.utime(self._file(lease))
        except FileNotFoundError:
            return False
        return True

    @property
    def _folder(self) -> Path:
        return self.run.with_name(f"{self.run.name}.lease")

    def _file(self, lease: Lease) -> Path:
        return self._folder / f"{lease.number}-{lease.token}"

    def _draft(self) -> Path:
        """Return a new path beside the run, which no other worker uses."""
        return self.run.with_name(f".{self._folder.name}.{uuid.uuid4().hex}")

    def _age(self, file: Path) -> float:
        """Return the seconds since a file was changed, by the clock of its file system."""
        probe = self._draft()
        try:
            probe.touch()
            return probe.stat().st_mtime - file.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


@contextmanager
def _locked_file(path: Path) -> Iterator[None]:
    """Write the name of this machine to a file. Lock the file until the `with` statement or this process ends.

    On Windows the file is not locked.
    """
    with writing(path):
        path.write_text(platform.node(), encoding="utf-8")
    with ExitStack() as stack:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(stack.enter_context(path.open("r+", encoding="utf-8")), fcntl.LOCK_EX)
        yield


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


ATTEMPTS = 3
"""Number of attempts at a run whose process dies. It is more than 1, because the reason may be outside of the run,
and small, because a run that needs too much memory kills its process each time. A run that raised an error is not
repeated by the same command."""


@dataclass(frozen=True)
class Rendezvous:
    """The exchange through which the workers of a study share runs and results: a directory that all of them see.

    directory: directory of the study on this machine. All files of this worker are stored there.
    """

    directory: Path

    def leases(self, run: str) -> Leases:
        """Return the lease of a run. `run` is its directory relative to that of the study."""
        return FileLeases(self.directory / run)

    def fetch(self, runs: Collection[str] | None = None) -> None:
        """Copy into `directory` the results, and the reasons of failures, that other workers have published. In a
        directory that all workers see, nothing is copied.

        runs: directories of the runs, relative to that of the study; None: all runs of the study.
        """

    def publish(self, run: str) -> None:
        """Make the result of a run that has ended here, or the reason of its failure, available to other workers.

        Nothing is done in a directory that all workers see.
        """


def train_leased(job: tuple[dict[str, Any], str, Rendezvous], report: Callable[[Tick], None]) -> Result | None:
    """Train one run while this process holds its lease, and return its result. Return None if another worker holds the
    lease.

    job: (experiment, directory, rendezvous). The experiment is plain data. The files that its field `imports` names are
        imported before it is validated. The directory of the run is relative to that of the study. The rendezvous has
        leases, and the results of other workers.
    report: function that receives the progress, at most five times a second.

    Raises EndPool, before the first step, if code or data have changed since earlier runs of the study.
    """
    config, run, rendezvous = job

    def require(environment: Mapping[str, Any]) -> None:
        rendezvous.fetch()
        try:
            refuse_changed_study(config, environment, rendezvous.directory)
        except RecipeError as error:
            raise EndPool(str(error)) from None

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
            return train(load_experiment(config), directory, _throttled(report), require=require)
        except EndPool:
            raise
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
