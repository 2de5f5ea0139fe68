"""The parent of ranks: forks the ranks of every run of `launch`, so that a run costs milliseconds to start."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(folder: Path) -> None:
    """Forks the ranks of the runs in `runs.json`, waits for them, and writes how each of them ended."""
    sys.path.append(str(Path(__file__).resolve().parent))
    task = json.loads((folder / "runs.json").read_text())
    runs = [SimpleNamespace(**run) for run in task["runs"]]
    functions = {run.function: _function(run.function) for run in runs}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for batch in [runs] if task["together"] else [[run] for run in runs]:
        if not _batch(batch, functions, folder):
            break


def _batch(batch: Sequence[SimpleNamespace], functions: dict[str, Callable[[Any], Any]], folder: Path) -> bool:
    """Some runs at once; whether all have ended well that must. Their ranks are waited for, come what may: killed ones,
    too, would stay as zombies."""
    begin, pids, well = time.monotonic(), {}, True
    try:
        for run in batch:
            for rank in range(max(run.world, 1)):
                pid = os.fork()
                if pid == 0:
                    _rank(functions[run.function], run, rank, folder)
                pids[pid] = (run, folder / f"{run.name}-{rank}.end")
        while pids:
            pid, status = os.wait()
            end = [os.waitstatus_to_exitcode(status), time.monotonic() - begin]
            run, path = pids.pop(pid)
            path.write_text(json.dumps(end))
            well &= run.fails or end[0] == 0
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return well


def _function(name: str) -> Callable[[Any], Any]:
    module, _, function = name.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(f"workers.{module}"), function)
    return found


def _rank(function: Callable[[Any], Any], run: SimpleNamespace, rank: int, folder: Path) -> None:
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
