"""Processes for tests as `python` starts them, forked from one that has imported torch: each costs milliseconds.

One server for each process of pytest imports torch, what the first step of any optimizer imports, and what the
library's face names. What a script imports beyond these it imports itself, so that a missing import of
`eigengraft.experiments` is noticed. Run as a script, this file is the server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import itertools
import json
import multiprocessing.context
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = (
    *(
        "torch._dynamo",
        "eigengraft.optimizers",
        "numpy",
        "typer",
        "rich.console",
        "rich.panel",
        "rich.progress",
        "rich.table",
    ),
    "ruamel.yaml",
)


class Process:
    """A script, module or code that runs, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str | Path], folder: Path, variables: Mapping[str, str]) -> None:
        """arguments: what follows `python`: a file, `-m module` or `-c code`, and their own. folder: where it runs.
        variables: of the environment, beside those of this process."""
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        server = _server()
        self._files = server.folder / str(next(server.numbers))
        request = {
            "arguments": self.args,
            "folder": str(folder),
            "environment": {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables},
            "files": str(self._files),
        }
        server.requests.write(json.dumps(request) + "\n")
        server.requests.flush()
        self.pid = int(self._await("pid", 60))

    def _await(self, suffix: str, timeout: float) -> str:
        path, end = self._files.with_suffix("." + suffix), time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.002)
        return path.read_text()

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float = 120) -> int:
        self.returncode = int(self._await("end", timeout))
        return self.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Waits for its end: standard output and standard error."""
        self.wait(timeout)
        return self._files.with_suffix(".out").read_text(), self._files.with_suffix(".err").read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


FORK_SPAWNED = {"FORK_SPAWNED": "1"}
"""A variable of the environment with which a process forks what it spawns, from its state before it ran anything. An
interpreter that is started instead imports torch and the library for two seconds."""


def start(*arguments: str | Path, folder: Path, **variables: str) -> Process:
    """A process in a folder, with variables of the environment beside those of this one."""
    return Process(arguments, folder, variables)


def run(*arguments: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What became of a process that has ended."""
    process = start(*arguments, folder=folder, **variables)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.wait(), output, errors)


def run_command(command: Sequence[str | Path], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What became of a command that starts `eigengraft` once, as a shell does. The program that it finds under this
    name writes its arguments down, and the library is run with them in a process of `run`."""
    program = folder / "bin" / "eigengraft"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$0.arguments"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", **variables}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)
    arguments = program.with_suffix(".arguments").read_text().split("\0")[:-1]
    return run("-m", "eigengraft", *arguments, folder=folder, **variables)


def fork_what_is_spawned(patch: pytest.MonkeyPatch) -> None:
    """Processes that this one spawns through multiprocessing come from a server that has imported the library: what
    they are given is pickled as before, and they know of nothing that was imported or registered here."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["eigengraft.experiments.training.train", "torch._dynamo"])

    def context(method: str) -> multiprocessing.context.BaseContext:
        assert method == "spawn"
        return server

    patch.setattr(multiprocessing, "get_context", context)


class _Server:
    """The process that forks, and the folder of its children's output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, itertools.count()
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1"}
        environment["PYTHONHASHSEED"] = "7"  # sets have another order than in this process
        command = [sys.executable, str(Path(__file__).resolve())]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdin is not None
        self.requests: IO[str] = self.process.stdin
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the server and whatever it has started that is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@cache
def _server() -> _Server:
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="processes-")
    atexit.register(folder.cleanup)
    return _Server(Path(folder.name))


# the server


def main() -> None:
    """Forks a process for every request. Nobody waits for the one that waits for it."""
    gc.disable()  # modules stay
    for name in PRELOADED:
        importlib.import_module(name)
    gc.enable()
    found = sys.modules["eigengraft"].__file__
    assert found is not None and Path(found).is_relative_to(ROOT), f"eigengraft of {ROOT} is required, got {found}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # children neither search nor copy what was imported here
    for line in sys.stdin:
        if os.fork() == 0:
            _guard(**json.loads(line))


def _guard(files: str, **request: object) -> None:
    """Starts the process, waits for it, and writes how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _child(files, **request)
    _write(Path(files + ".pid"), str(pid))
    _, status = os.waitpid(pid, 0)
    _write(Path(files + ".end"), str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _write(path: Path, text: str) -> None:
    """A reader finds all of it or nothing."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    part.rename(path)


def _child(files: str, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """The life of one process; it never returns, so that nothing of the server runs twice."""
    for number, path in enumerate([os.devnull, files + ".out", files + ".err"]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        multiprocessing.process.ORIGINAL_DIR = folder  # where processes that this one spawns look for its script
        os.environ.clear()
        os.environ.update(environment)
        known = [path for path in sys.path if Path(path) != ROOT / "src"]
        sys.path[:] = [*environment["PYTHONPATH"].split(os.pathsep), *known]
        if environment.keys() >= FORK_SPAWNED.keys():
            _fork_spawned()
        code = _exit_code(arguments)
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _fork_spawned() -> None:
    """Starts multiprocessing's server that forks, by forking too, and has it make what this process will spawn."""
    resource_tracker.ensure_running()

    def fork(path: str, arguments: Sequence[str], files: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        opened = {int(path.name) for path in Path("/dev/fd").iterdir()}
        for file in opened - {0, 1, 2, *files}:
            with contextlib.suppress(OSError):  # the folder itself was open while it was listed
                os.close(file)
        exec(arguments[-1], {})  # multiprocessing's loop, which a new interpreter would run
        os._exit(0)

    with mock.patch.object(multiprocessing.util, "spawnv_passfds", fork):
        forkserver.ensure_running()
    server = multiprocessing.get_context("forkserver")
    multiprocessing.get_context = lambda method: server  # type: ignore[assignment]


def _exit_code(arguments: list[str]) -> int:
    """Runs what the arguments name."""
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.modules["__main__"] = module = ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), vars(module))
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
