"""Ranks of a gloo group as processes of this machine, and the time for which each of them computes."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from eigengraft.errors import RecipeError
from eigengraft.optimizers import Optimizer, load_recipe

BusyTimes = Sequence[Sequence[float]]
"""Milliseconds `[R][T]` that each of R ranks has computed in each of T steps, without the time that it waits."""


def path_of(busy: BusyTimes) -> float:
    """Return the mean over steps of the longest time of any rank, which is the critical path of a step."""
    return fmean(max(step) for step in zip(*busy, strict=True))


def efficiency_of(alone: float, ranks: int, path: float) -> float:
    """Return the efficiency of R ranks: the work of a step on one rank, divided by R times the critical path."""
    return alone / (ranks * path)


@dataclass(frozen=True)
class RankJob:
    """A job of the ranks: steps of one recipe, which every rank runs.

    recipe: the recipe as JSON text.
    shapes: shapes of the parameters, by name.
    warm: number of first steps, which are not measured.
    steps: number of steps that are measured.
    seed: seed of parameters and gradients, which are the same on all ranks.
    """

    recipe: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    warm: int
    steps: int
    seed: int


def busy_times(jobs: Sequence[RankJob], ranks: int) -> list[BusyTimes]:
    """Return for each job the milliseconds that each rank computes in each step.

    Each rank is a new process with one thread. Processes are spawned, so a script that calls this needs
    `if __name__ == "__main__"`. Raise RecipeError if a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (list(jobs), rank, ranks, Path(folder) / "store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            found = [answer(ours) for _, ours in started]
        finally:
            for process, _ in started:
                process.terminate()
                process.join()
    return [[rank[job] for rank in found] for job in range(len(jobs))]


def answer(ours: Connection) -> list[list[float]]:
    """Return the times that a rank has measured. Raise RecipeError if the rank has failed or ended."""
    try:
        found: list[list[float]] | str = ours.recv()
    except EOFError:
        found = "its process ended"
    if isinstance(found, str):
        raise RecipeError(f"bench: a rank failed during the bench ({found}); use fewer ranks or smaller matrices")
    return found


def _serve(jobs: Sequence[RankJob], rank: int, ranks: int, store: Path, theirs: Connection) -> None:
    """Run all jobs as one rank and send the times. This is the main function of a process."""
    # Ranks of a bench are expected to wait for each other, so that they need not warn about it.
    warnings.filterwarnings("ignore", message=".*ranks wait for each other's refreshes")
    try:
        torch.set_num_threads(1)
        if ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        theirs.send([_milliseconds(job) for job in jobs])
        if ranks > 1:
            dist.destroy_process_group()
    except Exception as error:
        theirs.send(f"{type(error).__name__}: {error}")


def _milliseconds(job: RankJob) -> list[float]:
    """Return the milliseconds of each step by the clock of this thread, which stops while the thread waits."""
    generator = torch.Generator().manual_seed(job.seed)
    named = [(name, torch.nn.Parameter(0.02 * torch.randn(s, generator=generator))) for name, s in job.shapes]
    optimizer, times = Optimizer(named, load_recipe(job.recipe), lr=1e-3), []
    for _ in range(job.warm + job.steps):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        start = time.thread_time()
        optimizer.step()
        times.append(1e3 * (time.thread_time() - start))
    return times[job.warm :]
