"""Real processes for tests of distribution: runs of several ranks, what each rank printed, returned and ended with."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...processes import Process, start

PARENT = Path(__file__).resolve().parent / "parent.py"


class RanksError(RuntimeError):
    """Ranks that had to end well did not."""


@dataclass(frozen=True)
class Run:
    """`function` ("module:name" in tests/workers) is called with `job` on `world` ranks; 0: without a process group.

    job: JSON. timeout: seconds of the process group. fails: whether ranks may end with an error.
    """

    name: str
    function: str
    world: int
    job: Any = None
    timeout: float = 60.0
    fails: bool = False


@dataclass(frozen=True)
class Outcome:
    """Of one rank. code: 0, 1 after an exception, -9 after SIGKILL; result: what the function returned, if it did;
    seconds: how long the rank lived."""

    code: int
    output: str
    result: Any
    seconds: float

    @property
    def error(self) -> str:
        """The message of the exception that ended the rank: from the last line that starts a traceback's end."""
        lines = self.output.rstrip().splitlines()
        ends = [i for i, line in enumerate(lines) if line.startswith("Error: ")]
        return "\n".join(lines[ends[-1] :]).removeprefix("Error: ") if ends else ""


def launch_once(runs: Sequence[Run], factory: Any, name: str, limit: float) -> dict[str, list[Outcome]]:
    """As `launch`, in a folder that the workers of pytest-xdist share (factory: `tmp_path_factory`): one of them starts
    the ranks, the others wait for what it finds."""
    root: Path = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "ended").exists():
            return _outcomes(runs, folder)
        found = launch(runs, folder, limit)
        (folder / "ended").touch()
        return found


def launch(runs: Sequence[Run], folder: Path, limit: float = 150.0) -> dict[str, list[Outcome]]:
    """The outcome of every rank of every run, by name; one run after the other up to one that fails.

    Runs that follow each other on equally many ranks share these, unless they may fail: a rank costs some tenths of a
    second until it has done everything once.

    limit: seconds for all of it, after which every process is killed. Fails, with what the ranks printed, if that
    happens or if a rank ends with an error in a run that must not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))
    parent = start(PARENT, folder, folder=folder)
    try:
        code = parent.wait(limit)
    except subprocess.TimeoutExpired:
        raise RanksError(f"ranks: they did not end within {limit} s\n{_logs(folder)}") from None
    finally:
        _end(parent)
    if code:
        raise RanksError(f"ranks: their parent ended with {code}\n{parent.communicate()[1]}\n{_logs(folder)}")
    return _outcomes(runs, folder)


def _outcomes(runs: Sequence[Run], folder: Path) -> dict[str, list[Outcome]]:
    found = {}
    for run in runs:
        found[run.name] = [_outcome(folder, run, rank) for rank in range(max(run.world, 1))]
        codes = [outcome.code for outcome in found[run.name]]
        if any(codes) and not run.fails:
            raise RanksError(f"ranks: those of {run.name} ended with {codes}\n{_logs(folder, run.name)}")
    return found


def _end(parent: Process) -> None:
    """Ends the parent, which ends its ranks, so that nothing outlives a test."""
    parent.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        parent.wait(10)
    parent.kill()


def _logs(folder: Path, name: str = "") -> str:
    logs = sorted(folder.glob(f"{name}*.log"))
    return "\n".join(f"--- {log.stem}\n{log.read_text()[-3000:]}" for log in logs if log.stat().st_size)


def _outcome(folder: Path, run: Run, rank: int) -> Outcome:
    import torch

    stem = folder / f"{run.name}-{rank}"
    code, seconds = json.loads(stem.with_suffix(".end").read_text())
    path = stem.with_suffix(".pt")
    result = torch.load(path, weights_only=False) if path.exists() else None
    return Outcome(code, stem.with_suffix(".log").read_text(), result, seconds)
