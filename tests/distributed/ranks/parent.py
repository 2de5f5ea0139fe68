"""The parent of ranks: forks the ranks of every run of `launch`, so that a run costs milliseconds to start."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(folder: Path) -> None:
    """Forks the ranks of the runs in `runs.json`, waits for them, and writes how each of them ended."""
    sys.path.append(str(Path(__file__).resolve().parent))
    runs = [SimpleNamespace(**run) for run in json.loads((folder / "runs.json").read_text())]
    functions = {run.function: _function(run.function) for run in runs}
    if importlib.util.find_spec("fsspec"):
        importlib.import_module("fsspec.core")  # as torch does when a rank first saves: once here, not in each of them
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    gc.collect()
    gc.freeze()  # ranks neither search nor copy what was imported here
    for batch in _batches(runs):
        if not _batch(batch, functions, folder):
            break


def _batches(runs: Sequence[SimpleNamespace]) -> Iterator[list[SimpleNamespace]]:
    """Runs that follow each other on equally many ranks: the same ranks make them. One that may fail has its own."""
    marks = [(run.world, place if run.fails else -1) for place, run in enumerate(runs)]
    for _, batch in itertools.groupby(zip(marks, runs, strict=True), key=lambda pair: pair[0]):
        yield [run for _, run in batch]


def _batch(batch: Sequence[SimpleNamespace], functions: dict[str, Callable[[Any], Any]], folder: Path) -> bool:
    """The runs of one batch; whether all have ended well that must. Their ranks are waited for, come what may: killed
    ones, too, would stay as zombies."""
    begin, pids, well = time.monotonic(), {}, True
    try:
        for rank in range(max(batch[0].world, 1)):
            pid = os.fork()
            if pid == 0:
                _rank(functions, batch, rank, folder)
            pids[pid] = rank
        while pids:
            pid, status = os.wait()
            rank, code = pids.pop(pid), os.waitstatus_to_exitcode(status)
            for run in batch:
                stem = folder / f"{run.name}-{rank}"
                ended_well = run is not batch[-1] and stem.with_suffix(".pt").exists()
                end = [0 if ended_well else code, time.monotonic() - begin]
                stem.with_suffix(".end").write_text(json.dumps(end))
            well &= batch[0].fails or code == 0
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return well


def _function(name: str) -> Callable[[Any], Any]:
    module, _, function = name.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(f"workers.{module}"), function)
    return found


def _rank(
    functions: dict[str, Callable[[Any], Any]], batch: Sequence[SimpleNamespace], rank: int, folder: Path
) -> None:
    """The life of one rank; it never returns, so that nothing of the parent runs twice."""
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _log(folder, batch[0], rank)
    code, world = 0, batch[0].world
    try:
        torch.set_num_threads(1)
        if world:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
            store, span = f"file://{folder / batch[0].name}.store", timedelta(seconds=batch[0].timeout)
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=span)
        for run in batch:
            _log(folder, run, rank)
            torch.save(functions[run.function](run.job), folder / f"{run.name}-{rank}.pt")
        if world:
            dist.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        print(f"Error: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _log(folder: Path, run: SimpleNamespace, rank: int) -> None:
    """From here on what the rank prints goes to the log of that run."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(folder / f"{run.name}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
