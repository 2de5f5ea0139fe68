"""Claims of runs: of all workers that share a study's directory, on one machine or many, one trains a run at a time.

Beside the run `seed-0` lies `seed-0.claim-<n>` while its n-th worker holds it. It is made complete and locked in one
step (a hard link), so that of several workers one succeeds, and it is gone when the run has ended or failed. The claim
of a worker that died is not removed but followed by `claim-<n + 1>`, which again one worker alone can make.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT = 5.0
"""Seconds between two signs of life of a worker."""
STALE = 60.0
"""Seconds without a sign of life after which a worker on another machine counts as dead."""


@dataclass(frozen=True)
class Claims:
    """The claims of one run.

    run: its directory.
    """

    run: Path

    def held(self) -> bool:
        """Whether a worker that is alive holds the run."""
        last = self._last()
        return last > 0 and _alive(self._file(last))

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Hold the run meanwhile: the number of the claim, one more than workers died; 0: another worker holds it."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        last = self._last()
        if last and _alive(self._file(last)):
            yield 0
            return
        own, stop = self._file(last + 1), threading.Event()
        with _locked_file(own.with_name(f".{own.name}.{uuid.uuid4().hex}")) as complete:
            try:
                os.link(complete, own)
            except FileExistsError:
                yield 0
                return
            finally:
                complete.unlink()
            if any(number != last + 1 and _alive(self._file(number)) for number in self._numbers()):
                own.unlink()  # claims were removed meanwhile, and two workers counted differently
                yield 0
                return
            beating = threading.Thread(target=self._beat, args=(own, last + 2, stop), daemon=True)
            beating.start()
            try:
                yield last + 1
            finally:
                stop.set()
                beating.join()
                self._remove(number for number in self._numbers() if number <= last + 1)

    def forget_dead(self) -> None:
        """Remove the claims of dead workers, so that attempts are counted anew."""
        self._remove(number for number in self._numbers() if not _alive(self._file(number)))

    def _remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._file(number).unlink(missing_ok=True)

    def _beat(self, own: Path, follower: int, stop: threading.Event) -> None:
        """Give signs of life; end this process when another worker took it for dead and holds the run."""
        while not stop.wait(HEARTBEAT):
            if self._file(follower).exists():
                os._exit(1)
            with contextlib.suppress(OSError):
                os.utime(own)

    def _last(self) -> int:
        """The number of the last claim; 0: there is none."""
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        """The numbers of all claims there are."""
        head = f"{self.run.name}.claim-"
        found = self.run.parent.iterdir() if self.run.parent.is_dir() else ()
        numbers = (path.name.removeprefix(head) for path in found if path.name.startswith(head))
        return [int(number) for number in numbers if number.isdecimal()]

    def _file(self, number: int) -> Path:
        return self.run.with_name(f"{self.run.name}.claim-{number}")


@contextmanager
def _locked_file(path: Path) -> Iterator[Path]:
    """A file with the name of this machine, locked as long as this process lives or until the end of the block."""
    with path.open("w", encoding="utf-8") as stream:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(platform.node())
        stream.flush()
        yield path


def _alive(claim: Path) -> bool:
    """Whether the worker of a claim lives: it holds the lock, or has given a sign of life from another machine."""
    try:
        with claim.open("r+", encoding="utf-8") as stream:
            if _is_locked(stream.fileno()):
                return True
            if stream.read() == platform.node() and sys.platform != "win32":
                return False  # here locks tell everything
        return _age(claim) < STALE
    except FileNotFoundError:
        return False


def _is_locked(file: int) -> bool:
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _age(claim: Path) -> float:
    """Seconds since a file was changed, by the clock of its file system."""
    probe = claim.with_name(f".{claim.name}.{uuid.uuid4().hex}")
    try:
        probe.touch()
        return probe.stat().st_mtime - claim.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
