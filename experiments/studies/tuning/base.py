"""What every kind of tuning declares, what it sees of the trials so far, and what it found."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from eigengraft.component import Component

from ...reports.run import Metric
from ...training.callbacks import Limits
from ...training.experiment import Experiment

Values = dict[str, Any]
"""A value by dotted path, for every field of a space."""


def distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The seeds. Raises ValueError where one is there twice."""
    if len(set(seeds)) < len(seeds):
        raise ValueError("distinct seeds are required")
    return seeds


@dataclass(frozen=True)
class Trial:
    """Values that were tried with every seed of the search.

    score: metric.sign * mean of the metric over seeds, so that low is good; infinite where a run diverged or failed.
    stopped: the step at which successive halving stopped a run, and the score is that of; none: all ran to their end.
    seconds: training seconds of its runs together.
    curves: seed -> evaluated step -> metric.sign * metric.
    """

    values: Mapping[str, Any]
    score: float
    stopped: int | None = None
    seconds: float = 0.0
    curves: Mapping[int, Mapping[int, float]] | None = None


@dataclass(frozen=True)
class Tuned:
    """What the tuning of one cell found.

    values: the best of those tried, by dotted path.
    edges: field -> "least" or "largest", where the best value is at an end of what was tried.
    trials: all of them, in their order.
    rule: how values were chosen, in sentences.
    """

    values: Mapping[str, Any]
    edges: Mapping[str, str]
    trials: tuple[Trial, ...]
    rule: str

    def described(self, metric: Metric) -> dict[str, Any]:
        """This as plain data, for the manifest of a study."""
        tried = [
            {
                "values": dict(one.values),
                "mean": None if math.isinf(one.score) else metric.sign * one.score,
                "stopped": one.stopped,
            }
            for one in self.trials
        ]
        return {"values": dict(self.values), "edges": dict(self.edges), "tried": tried, "rule": self.rule}


class Tuning(Component, ABC, family="tuning"):
    """A search of the best values of some fields, in every cell of a study by itself.

    Values are compared by the mean of the study's metric over `seeds`. What a search tries next follows from the trials
    that have ended and nothing else: a stopped study goes on the same, with any number of processes.
    """

    seeds: tuple[int, ...] = Field(strict=False, min_length=1, description="seeds of the search, none of the study's")
    trials: int = Field(10, ge=1, description="largest number of values tried in a cell")
    seconds: float | None = Field(
        None, gt=0, description="training seconds in a cell after which no other value is tried; none: no limit"
    )

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return distinct(seeds)

    def require_apart(self, seeds: Iterable[int], axes: Iterable[str]) -> None:
        """Raises ValueError where a study compares a seed of the search, or has a field of it as an axis."""
        for seed in sorted(set(self.seeds) & set(seeds)):
            raise ValueError(f"tune.seeds: other seeds than those that are compared are required, got {seed} in both")
        for field in self.fields:
            if field in axes:
                raise ValueError(f"tune.space: paths that are no axis of the study are required, got '{field}'")

    @property
    @abstractmethod
    def fields(self) -> Collection[str]:
        """Dotted paths of what is tuned."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """How values are chosen, in sentences for a report."""

    @abstractmethod
    def proposed(self, cell: Experiment, trials: Sequence[Trial]) -> list[Values]:
        """Values to try next, all at once; none: the search is over. Raises RecipeError where nothing says a start."""

    @abstractmethod
    def edges(self, cell: Experiment, best: Trial, trials: Sequence[Trial]) -> dict[str, str]:
        """Fields whose best value is at an end of what was tried: "least" or "largest"."""

    def limits(self, experiment: Experiment, trials: Sequence[Trial], metric: Metric) -> Limits | None:
        """What stops a run of the next trial early, given those before it; none: nothing does."""
        return None

    def next(self, cell: Experiment, trials: Sequence[Trial]) -> list[Values]:
        """The proposed values, as far as trials and seconds are left."""
        if self.seconds is not None and sum(trial.seconds for trial in trials) >= self.seconds:
            return []
        return self.proposed(cell, trials)

    def found(self, cell: Experiment, trials: Sequence[Trial]) -> Tuned:
        """What a search with these trials found; among equal ones, diverged ones too, the least values."""
        best = best_trial(trials)
        return Tuned(best.values, self.edges(cell, best, trials), tuple(trials), self.rule)


def best_trial(trials: Sequence[Trial]) -> Trial:
    """The trial with the lowest score among those that were not stopped; among equal ones the one of least values."""
    whole = [trial for trial in trials if trial.stopped is None]
    return min(whole or trials, key=lambda trial: (trial.score, [_order(value) for value in trial.values.values()]))


def _order(value: object) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, (int, float)) else (math.inf, str(value))


def trial_name(values: Mapping[str, Any]) -> str:
    """The values of a trial as a name of a directory."""
    return ",".join(f"{path}={text(value)}" for path, value in values.items())


def text(value: object) -> str:
    """One value as text."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def six_digits(value: float) -> float:
    """The value to six digits, as it stands in names."""
    return float(f"{value:.6g}")
