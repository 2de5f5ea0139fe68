"""Rows of the bench of ranks, and what they are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ...common.results import BenchRow

BusyTimes = Sequence[Sequence[float]]
"""`[R][T]`, milliseconds that each rank has computed in each step; waiting does not count."""


@dataclass(frozen=True)
class RankRow(BenchRow):
    """One recipe with one `at_once` on R ranks.

    ranks: R.
    at_once: least refresh work of a step, in units of the costliest block.
    steps: steps measured, whole intervals of refreshes.
    path_ms: mean over steps of the milliseconds of the rank that computes longest.
    efficiency: milliseconds of a step on one rank over R path_ms.
    counted: the same of counted work, from a plan.
    busy_ms: `[R]`, mean milliseconds of each rank in a step.
    """

    ranks: int
    at_once: int
    steps: int
    path_ms: float
    efficiency: float
    counted: float
    busy_ms: list[float]


def path_of(busy: BusyTimes) -> float:
    """The mean over steps of the longest time of any rank: the critical path of a step."""
    return fmean(max(step) for step in zip(*busy, strict=True))


def efficiency_of(alone: float, ranks: int, path: float) -> float:
    """Work of a step on one rank over what R ranks could do while the critical path lasts."""
    return alone / (ranks * path)
