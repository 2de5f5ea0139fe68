"""Claims of runs as files of a directory that all workers see.

Beside the run `seed-0` lies `seed-0.claim-<n>` while its n-th worker holds it. It is made complete and locked in one
step (a hard link).
"""

from __future__ import annotations

import os
import platform
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...files import make_directory, writing
from .claims import STALE, Claims


@dataclass(frozen=True)
class FileClaims(Claims):
    """The claims of one run.

    run: its directory.
    """

    run: Path

    def numbers(self) -> list[int]:
        head = f"{self.run.name}.claim-"
        found = self.run.parent.iterdir() if self.run.parent.is_dir() else ()
        numbers = (path.name.removeprefix(head) for path in found if path.name.startswith(head))
        return [int(number) for number in numbers if number.isdecimal()]

    def alive(self, number: int) -> bool:
        """Whether the worker holds the lock, or has given a sign of life from another machine."""
        claim = self._file(number)
        try:
            with claim.open("r+", encoding="utf-8") as stream:
                if _is_locked(stream.fileno()):
                    return True
                if stream.read() == platform.node() and sys.platform != "win32":
                    return False  # here locks tell everything
            return _age(claim) < STALE
        except FileNotFoundError:
            return False

    @contextmanager
    def made(self, number: int) -> Iterator[bool]:
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

    def sign(self, number: int) -> None:
        os.utime(self._file(number))

    def _file(self, number: int) -> Path:
        return self.run.with_name(f"{self.run.name}.claim-{number}")


@contextmanager
def _locked_file(path: Path) -> Iterator[Path]:
    """A file with the name of this machine, locked as long as this process lives or until the end of the block."""
    with writing(path), path.open("w", encoding="utf-8") as stream:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(platform.node())
        stream.flush()
        yield path


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
