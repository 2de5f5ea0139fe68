"""Scores of entries: the steps after which a loss is reached on every task, and how close to the fewest they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..reports.seed_statistics import Target
from .entries import EntryRuns, TaskRun
from .track import Track, TrackTask

WORST_RATIO = 4.0
"""Largest ratio to the fewest steps that counts in a profile."""


@dataclass(frozen=True)
class TaskScore:
    """One entry on one task.

    steps: the first evaluated step at which the target counts as reached; infinite: at none.
    seconds: the mean over runs of the training time up to there.
    loss: the mean of the losses at the last step; infinite where a run diverged.
    lr: the learning rate that the search chose.
    edge: "least" or "largest" where it lies at an end of what was tried, else empty.
    """

    steps: float
    seconds: float
    loss: float
    lr: float
    edge: str


def score(task: TrackTask, z: float, runs: Sequence[TaskRun]) -> TaskScore:
    """The score of the runs of an entry on one task, one run a seed."""
    losses = [dict(zip(run.steps, run.losses, strict=True)) for run in runs]
    first, end = Target(value=task.target, sigma=task.sigma, z=z).first(losses), int(task.experiment["steps"])
    reached = math.inf if first is None else float(first)
    rate = sum(run.seconds / max(run.steps, default=end) for run in runs) / len(runs)
    last = sum(own.get(end, math.inf) for own in losses) / len(runs)
    return TaskScore(reached, reached * rate, last, runs[0].lr, runs[0].edge)


def scores(track: Track, entries: Sequence[EntryRuns]) -> dict[str, dict[str, TaskScore]]:
    """Entry -> task -> score."""
    return {
        entry.name: {name: score(task, track.z, entry.runs[name]) for name, task in track.tasks.items()}
        for entry in entries
    }


def ratios(found: Mapping[str, Mapping[str, TaskScore]]) -> dict[str, dict[str, float]]:
    """Entry -> task -> steps, divided by the fewest of all entries; infinite where the target is not reached."""
    fewest: dict[str, float] = {}
    for own in found.values():
        for task, one in own.items():
            fewest[task] = min(one.steps, fewest.get(task, math.inf))
    return {
        name: {task: one.steps / fewest[task] if one.steps < math.inf else math.inf for task, one in own.items()}
        for name, own in found.items()
    }


def profile(own: Mapping[str, float], at: Sequence[float]) -> list[float]:
    """rho(tau) = share of tasks whose ratio is at most tau, for every tau of `at` (Dolan & More 2002, section 2)."""
    return [sum(ratio <= tau for ratio in own.values()) / len(own) for tau in at]


def profile_score(own: Mapping[str, float]) -> float:
    """integral of rho(tau) from 1 to 4, divided by 3, as AlgoPerf has it: 1 for the fewest steps on every task."""
    return sum(max(0.0, WORST_RATIO - ratio) for ratio in own.values()) / (len(own) * (WORST_RATIO - 1))
