"""Real processes for tests of distribution: runs of several ranks, what each rank printed, returned and ended with.

One process imports torch once and forks the ranks of every run, so that a run costs milliseconds to start. Run as a
script, this file is that process.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import eigengraft

HERE = Path(__file__).resolve().parent


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


def launch(runs: Sequence[Run], folder: Path, limit: float = 150.0, together: bool = False) -> dict[str, list[Outcome]]:
    """The outcome of every rank of every run, by name; one run after the other, or all at once.

    limit: seconds for all of it, after which every process is killed. Fails, with what the ranks printed, if that
    happens or if a rank ends with an error in a run that must not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps({"runs": [asdict(run) for run in runs], "together": together}))
    command = [sys.executable, str(HERE / "ranks.py"), str(folder)]
    env = {**os.environ, "PYTHONPATH": str(Path(eigengraft.__file__).parents[1])}
    with (folder / "parent.log").open("w") as log:
        parent = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = parent.wait(limit)
    except subprocess.TimeoutExpired:
        raise RanksError(f"ranks: they did not end within {limit} s\n{_logs(folder)}") from None
    finally:
        _kill(parent)
    if code:
        raise RanksError(f"ranks: their parent ended with {code}\n{_logs(folder)}")
    return _outcomes(runs, folder)


def _outcomes(runs: Sequence[Run], folder: Path) -> dict[str, list[Outcome]]:
    outcomes = {run.name: [_outcome(folder, run, rank) for rank in range(max(run.world, 1))] for run in runs}
    for run in runs:
        if not run.fails and any(outcome.code for outcome in outcomes[run.name]):
            codes = [outcome.code for outcome in outcomes[run.name]]
            raise RanksError(f"ranks: those of {run.name} ended with {codes}\n{_logs(folder, run.name)}")
    return outcomes


def _kill(parent: subprocess.Popen[bytes]) -> None:
    """Ends the parent, which ends its ranks, and then whatever is left, so that nothing outlives a test."""
    parent.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        parent.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()


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


# the parent of the ranks


def main(folder: Path) -> None:
    """Forks the ranks of the runs in `runs.json`, waits for them, and writes how each of them ended."""
    sys.path.append(str(HERE))
    importlib.import_module("torch._dynamo")  # the first step of any optimizer does, at a price for every rank
    task = json.loads((folder / "runs.json").read_text())
    runs = [Run(**run) for run in task["runs"]]
    functions = {run.function: _function(run.function) for run in runs}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for batch in [runs] if task["together"] else [[run] for run in runs]:
        _batch(batch, functions, folder)


def _batch(batch: Sequence[Run], functions: dict[str, Callable[[Any], Any]], folder: Path) -> None:
    """Some runs at once. Their ranks are waited for, come what may: killed ones, too, would stay as zombies."""
    begin, pids = time.monotonic(), {}
    try:
        for run in batch:
            for rank in range(max(run.world, 1)):
                pid = os.fork()
                if pid == 0:
                    _rank(functions[run.function], run, rank, folder)
                pids[pid] = folder / f"{run.name}-{rank}.end"
        while pids:
            pid, status = os.wait()
            end = [os.waitstatus_to_exitcode(status), time.monotonic() - begin]
            pids.pop(pid).write_text(json.dumps(end))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _function(name: str) -> Callable[[Any], Any]:
    module, _, function = name.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(f"workers.{module}"), function)
    return found


def _rank(function: Callable[[Any], Any], run: Run, rank: int, folder: Path) -> None:
    """The life of one rank; it never returns, so that nothing of the parent runs twice."""
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(folder / f"{run.name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 0
    try:
        torch.set_num_threads(1)
        if run.world:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(run.world)}
            store, span = f"file://{folder / run.name}.store", timedelta(seconds=run.timeout)
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=run.world, timeout=span)
        torch.save(function(run.job), folder / f"{run.name}-{rank}.pt")
        if run.world:
            dist.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        print(f"Error: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
