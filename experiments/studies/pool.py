"""A pool of local processes. Each process does the next job when it is free. If a process dies, only its job is lost.

`concurrent.futures` and joblib are not used. With these libraries, the death of one process breaks the whole pool, so
that the jobs of all other processes are lost too. Their processes also outlive a parent that was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TextIO

from eigengraft.errors import RecipeError, hide_installed_lines

JobFunction = Callable[[Any, Callable[[Any], None]], Any]
"""A function `work(job, report)` that does one job in a worker process and returns its result.

The function may call `report(value)` any number of times.
"""


@dataclass(frozen=True)
class PoolEvent:
    """An event of one job.

    job: number of the job.
    kind: "started", "progress", "done" or "failed"; "died" if the process of the job died and the job is started again;
        "warned" if the job caused a warning.
    value: reported value for "progress", result for "done", reason for "failed" and "died", text for "warned", None for
        "started".
    """

    job: int
    kind: Literal["started", "progress", "done", "failed", "died", "warned"]
    value: Any = None


_UNGUARDED = 78
"""Exit code of a worker process if the main script, which it imports, would start another pool.

The code is EX_CONFIG of sysexits.h, which neither an ordinary failure nor a signal has.
"""


class EndPool(RecipeError):
    """An error of a job that ends the whole pool: it is raised by `run_pool`, and no further job is done."""


def require_guarded() -> None:
    """End this process if it is a worker process of a pool and is just importing the main script.

    In this case the main script has called this function outside of `if __name__ == "__main__"`. The parent process
    recognizes the exit code and raises an error about the missing guard.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(_UNGUARDED)


class _Worker:
    """One process and the number of the job that it is doing, None if it is free."""

    def __init__(self, work: JobFunction) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.job: int | None = None
        self.process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, job: int, value: Any) -> PoolEvent:
        self.job = job
        with suppress(OSError):  # the process has just died, as `receive` will report
            self.connection.send(value)
        return PoolEvent(job, "started")

    def receive(self) -> PoolEvent:
        assert self.job is not None
        job = self.job
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            kind, value = "died", f"its process ended with {_exit(self.process.exitcode)}"
        if kind == "ended":
            raise EndPool(value)
        if kind not in ("progress", "warned"):
            self.job = None
        return PoolEvent(job, kind, value)

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()


def run_pool(work: JobFunction, jobs: Sequence[Any], workers: int, attempts: int = 1) -> Iterator[PoolEvent]:
    """Do all jobs in their order on `workers` processes, and yield events of the jobs. Leaving the iteration stops the
    processes.

    Raises RecipeError if the script of this process calls `require_guarded` outside of `if __name__ == "__main__"`, and
    EndPool if a job raised it.

    A job whose process died is started again until it has had `attempts` attempts. A job that raised an error is not
    started again. `work` and the jobs are pickled and processes are spawned, so that a script that calls this function
    needs `if __name__ == "__main__"`.

    work: function that does one job. It receives an item of `jobs`, and a function that reports progress.
    """
    waiting = deque(range(len(jobs)))
    deaths = [0] * len(jobs)
    team: list[_Worker] = []
    try:
        for _ in range(min(workers, len(jobs))):
            team.append(_Worker(work))
            yield team[-1].start(job := waiting.popleft(), jobs[job])
        while busy := {worker.connection: worker for worker in team if worker.job is not None}:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker = busy[connection]
                event = worker.receive()
                if worker.process.exitcode == _UNGUARDED:
                    raise RecipeError(
                        "a study starts processes, each of which imports this script again; put the call that runs the "
                        "study, and all work that is to be done once, under `if __name__ == '__main__':`"
                    )
                if event.kind == "died":
                    deaths[event.job] += 1
                    if deaths[event.job] < attempts:
                        waiting.appendleft(event.job)
                    else:
                        event = PoolEvent(event.job, "failed", event.value)
                yield event
                if worker.job is None and waiting:
                    if not worker.process.is_alive():
                        team[team.index(worker)] = worker = _Worker(work)
                    yield worker.start(job := waiting.popleft(), jobs[job])
    finally:
        for worker in team:
            worker.stop()


def _serve(connection: Connection, work: JobFunction) -> None:
    """Do jobs from the pipe in a worker process until the pipe is closed."""
    # An interrupt at the terminal reaches the whole process group. Only the parent reacts to it, and stops its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    hide_installed_lines()
    sending = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with sending:  # any thread of the job may cause a warning
            connection.send((kind, value))

    def send_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        send("warned", warnings.formatwarning(message, category, filename, lineno, line))

    warnings.showwarning = send_warning
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            send("done", work(job, lambda value: send("progress", value)))
        except EndPool as error:
            send("ended", str(error))
        except Exception:
            send("failed", traceback.format_exc())


def _end_with_parent() -> None:
    """End this process when its parent was killed, so that it does not write where the next attempt writes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
