"""Waiting times of ranks: critical paths measured with processes on this machine, and predicted from counted work."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, Self

import torch
import torch.distributed as dist
from pydantic import Field, field_validator, model_validator

from eigengraft.errors import RecipeError
from eigengraft.optimizers import Optimizer, Recipe, load_recipe
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.stacks.assignment import common_interval, wave_fields

from . import view
from .bench import Bench, Column, Listed, PositiveInts, Problem
from .view import Panel, Recommendation, Row, Table

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


class RankBench(Bench):
    """Recipes x values of `refresh.min_wave_work` x numbers of ranks on one set of matrices, replicated as under DDP.

    The matrices are those of a transformer of width w: [3 w, w], [w, w], [4 w, w] and [w, 4 w] for each layer. Every
    rank is a process with one thread. All ranks have the same gradients of independent normal numbers. Only the time
    for which a rank computes is measured, not the time for which it waits, so that fewer cores than ranks are enough.
    The field `seconds` has no effect.
    """

    kind: Literal["ranks"] = "ranks"
    recipes: Listed[str] = Field(
        ("shampoo",), description="shipped names or YAML files of recipes that spread refreshes"
    )
    min_wave_work: PositiveInts = Field((1, 8), description="values of `refresh.min_wave_work`")
    ranks: PositiveInts = Field(
        (1, 2, 4), description="numbers of ranks; the first is 1, which others are compared with"
    )
    layers: int = Field(4, ge=1, description="transformer layers")
    width: int = Field(256, ge=1, description="width w")
    intervals: int = Field(2, ge=1, description="intervals of refreshes that are measured, after the first one")
    candidate_field: ClassVar[str] = "recipes"
    columns: ClassVar[Mapping[str, Column]] = {
        "min_wave_work": Column("least refresh work of a step, in units of the costliest block"),
        "steps": Column("number of measured steps, whole intervals of refreshes"),
        "path_ms": Column("time of the rank that computes longest, the mean over steps", "ms"),
        "efficiency": Column("time of a step on one rank over R path_ms"),
        "counted": Column("efficiency of counted work, from a plan"),
        "busy_ms": Column("mean time of each rank in a step", "ms"),
    }
    quick_fields: ClassVar[Mapping[str, Any]] = {"width": 128, "intervals": 1}

    @field_validator("recipes")
    @classmethod
    def _spread(cls, recipes: tuple[str, ...]) -> tuple[str, ...]:
        for name in recipes:
            if not wave_fields(load_recipe(name), [""]):
                raise ValueError(
                    f"refreshes of '{name}' cannot be spread over steps; give a recipe with `refresh.min_wave_work`"
                )
        return recipes

    @model_validator(mode="after")
    def _can_be_measured(self) -> Self:
        if self.ranks[0] != 1:
            raise ValueError(
                f"ranks: the first must be 1, with which the others are compared, got {self.ranks[0]}; give 1 first"
            )
        if self.threads != 1 or self.device != "cpu":
            raise ValueError(
                f"threads: {self.threads} on '{self.device}' cannot be measured; ranks have one thread on the CPU"
            )
        return self

    def shapes(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Return the shapes of all matrices, by name."""
        w = self.width
        layer = {"mix": (3 * w, w), "out": (w, w), "up": (4 * w, w), "down": (w, 4 * w)}
        return tuple((f"layers.{i}.{name}.weight", shape) for i in range(self.layers) for name, shape in layer.items())

    def variants(self) -> list[tuple[str, int, Recipe]]:
        """Return (name of the recipe, min_wave_work, recipe) of each measurement on one number of ranks."""
        found = []
        for name in self.recipes:
            fields = wave_fields(load_recipe(name), [""])
            found += [(name, n, load_recipe(name, dict.fromkeys(fields, n))) for n in self.min_wave_work]
        return found

    def problems(self) -> Sequence[Problem]:
        alone: list[float] = []
        return [Problem({"ranks": ranks}, partial(list, [alone])) for ranks in self.ranks]

    def cells_of(self, problem: Problem) -> Iterator[list[Row]]:
        """Yield the rows of all variants on one number of ranks. The processes of the ranks are started once for all
        variants.
        """
        (alone,), ranks = problem.make(), problem.fields["ranks"]
        measured = busy_times([self._job(recipe) for _, _, recipe in self.variants()], ranks)
        if not alone:
            alone += [path_of(busy) for busy in measured]
        pairs = zip(self.variants(), measured, alone, strict=True)
        yield [self._row(variant, busy, one, problem.fields) for variant, busy, one in pairs]

    def _job(self, recipe: Recipe) -> RankJob:
        interval = common_interval(recipe)
        return RankJob(recipe.to_json(), self.shapes(), interval, self.intervals * interval, self.seed)

    def _row(self, variant: tuple[str, int, Recipe], busy: BusyTimes, alone: float, fields: Mapping[str, Any]) -> Row:
        name, wave, recipe = variant
        ranks, path = len(busy), path_of(busy)
        paper = plan(recipe, self.shapes(), (ranks,), "ddp")
        return {
            **self.row(None, fields, candidate=f"{name}, {wave} at once", min_wave_work=wave, steps=len(busy[0])),
            "declaration": recipe.declaration(),
            "path_ms": path,
            "efficiency": efficiency_of(alone, ranks, path),
            "counted": efficiency_of(float(paper.work.sum()), ranks, paper.balance.critical_path / paper.interval),
            "busy_ms": [fmean(times) for times in busy],
        }

    def label(self, candidate: str) -> str:
        return candidate

    def table(self) -> Table:
        return Table(
            "time of a step for which the busiest rank computes; efficiency: one rank's over all ranks' times",
            {"recipe": "candidate", "ranks": "ranks"},
            {
                "critical path ms": view.first("path_ms", view.milli),
                "least busy ms": view.first("busy_ms", lambda times: view.milli(min(times))),
                "efficiency": view.first("efficiency", view.finite("{:.2f}")),
                "by counted work": view.first("counted", view.finite("{:.2f}")),
            },
        )

    def panels(self) -> tuple[Panel, Panel]:
        both = {"{}": view.xy("ranks", "efficiency"), "{}, counted": view.xy("ranks", "counted")}
        return (
            Panel("ranks", "efficiency", both, band=(1.0, 1.0)),
            Panel("ranks", "critical path of a step, ms", {"{}": view.xy("ranks", "path_ms")}),
        )

    def recommendations(self) -> Sequence[Recommendation]:
        return [
            Recommendation(
                lambda row: f"on {row['ranks']} rank{'s' if row['ranks'] > 1 else ''}",
                cost=lambda rows: float(rows[0]["path_ms"]), cost_text=view.in_ms,
            )
        ]  # fmt: skip
