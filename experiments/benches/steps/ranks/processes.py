"""Processes of a bench: ranks of a gloo group on this machine, and how long each of them computes."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from eigengraft.errors import RecipeError
from eigengraft.optimizers import Optimizer, load_recipe

from .rows import BusyTimes


@dataclass(frozen=True)
class RankJob:
    """Steps of one recipe.

    recipe: as JSON text.
    shapes: of the parameters, by name.
    warm: first steps, which are not measured.
    steps: steps that are measured.
    seed: of parameters and gradients, which are the same on all ranks.
    """

    recipe: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    warm: int
    steps: int
    seed: int


def busy_times(jobs: Sequence[RankJob], ranks: int) -> list[BusyTimes]:
    """What each rank has computed in each step of each job, in fresh processes with one thread each.

    Processes are spawned: a script that calls this needs `if __name__ == "__main__"`. Raises RecipeError if one fails.
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
    """What a rank has measured. Raises RecipeError if it has failed or ended."""
    try:
        found: list[list[float]] | str = ours.recv()
    except EOFError:
        found = "its process ended"
    if isinstance(found, str):
        raise RecipeError(f"bench: ranks that run to the end are required, got one that failed: {found}")
    return found


def _serve(jobs: Sequence[RankJob], rank: int, ranks: int, store: Path, theirs: Connection) -> None:
    """Run in a process of its own: do all jobs as one rank."""
    warnings.filterwarnings("ignore", message=".*ranks wait for the one that refreshes")  # which is what is measured
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
    """Time of the thread that computes; while it waits for others, its clock stands still."""
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
