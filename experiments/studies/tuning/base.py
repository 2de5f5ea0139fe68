"""Searches: the fields that all kinds share, trials, results, and the values that a field may have."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, final

from pydantic import AfterValidator, Field, model_validator

from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError

from ...reports.records import Metric
from ...training.callbacks import Limits
from ...training.experiment import Experiment
from ..axes import LABEL

Values = dict[str, Any]
"""A value for every field of a search space, by dotted path."""


def _distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Return the seeds. Raises ValueError if a seed is repeated."""
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be distinct, got {list(seeds)}; remove the repeated ones")
    return seeds


Seeds = Annotated[tuple[int, ...], AfterValidator(_distinct)]
"""Seeds, all of which are different."""


@dataclass(frozen=True)
class Trial:
    """Values that were tried with every seed of the search.

    values: values by dotted path.
    score: metric.sign * mean of the metric over seeds, so that lower is better; infinite if a run diverged or failed.
    stopped: first step at which successive halving stopped a run of the trial. The score uses the metric that a stopped
        run had when it stopped. None: all runs were completed.
    seconds: training seconds of all runs together.
    curves: metric.sign * metric by seed and evaluated step. None: not recorded.
    """

    values: Mapping[str, Any]
    score: float
    stopped: int | None = None
    seconds: float = 0.0
    curves: Mapping[int, Mapping[int, float]] | None = None


@dataclass(frozen=True)
class Tuned:
    """The result of the search in one cell.

    values: best values, by dotted path.
    edges: field -> "least" or "largest" if the best value is at an end of the tried values.
    trials: all trials in their order.
    rule: sentences that say how values were chosen.
    """

    values: Mapping[str, Any]
    edges: Mapping[str, str]
    trials: tuple[Trial, ...]
    rule: str

    def described(self, metric: Metric) -> dict[str, Any]:
        """Return the result as plain data for the manifest of a study."""
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
    """A search for the best values of some fields, in every cell of a study separately.

    Values are compared by the mean of the study's metric over `seeds`. The next trials depend on the completed trials
    alone. A stopped study therefore continues the same search, with any number of processes.
    """

    seeds: Seeds = Field(
        strict=False, min_length=1, examples=[[101]], description="seeds of the search, none of the study's"
    )
    trials: int = Field(10, ge=1, description="largest number of values tried in a cell")
    seconds: float | None = Field(
        None, gt=0, description="training seconds in a cell after which no other value is tried; none: no limit"
    )

    @final
    def require_apart(self, seeds: Iterable[int], axes: Iterable[str]) -> None:
        """Raise ValueError if the study shares a seed with the search, or has a field of the search as an axis."""
        for seed in sorted(set(self.seeds) & set(seeds)):
            raise ValueError(f"tune.seeds: seed {seed} is also a seed of the study; search with other seeds")
        for field in self.fields:
            if field in axes:
                raise ValueError(
                    f"tune.space: '{field}' is also an axis of the study; remove it from axes or from tune.space"
                )

    @property
    @abstractmethod
    def fields(self) -> Collection[str]:
        """Dotted paths of the tuned fields."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """Sentences for a report that say how values are chosen."""

    @abstractmethod
    def proposed(self, cell: Experiment, trials: Sequence[Trial]) -> list[Values]:
        """Return all values to try next. Their runs may be done side by side. An empty list ends the search.

        Raises RecipeError if a field has no start value.
        """

    @abstractmethod
    def edges(self, cell: Experiment, best: Trial, trials: Sequence[Trial]) -> dict[str, str]:
        """Return the fields whose best value is at an end of the tried values, with "least" or "largest"."""

    def limits(self, experiment: Experiment, trials: Sequence[Trial], metric: Metric) -> Limits | None:
        """Return the limits that stop a run of the next trial, given earlier trials. None: no run is stopped."""
        return None

    @final
    def next(self, cell: Experiment, trials: Sequence[Trial]) -> list[Values]:
        """Return the values to try next, or an empty list if no trials or seconds are left."""
        if self.seconds is not None and sum(trial.seconds for trial in trials) >= self.seconds:
            return []
        return self.proposed(cell, trials)

    @final
    def found(self, cell: Experiment, trials: Sequence[Trial]) -> Tuned:
        """Return the result of a search with these trials."""
        best = best_trial(trials)
        return Tuned(best.values, self.edges(cell, best, trials), tuple(trials), self.rule)


def best_trial(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the lowest score among trials that were not stopped, or among all if all were stopped.

    Of trials with equal scores, such as diverged trials, the trial with the smallest hyperparameters is returned.
    """
    whole = [trial for trial in trials if trial.stopped is None]
    return min(whole or trials, key=lambda trial: (trial.score, [_order(value) for value in trial.values.values()]))


def _order(value: object) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, (int, float)) else (math.inf, str(value))


def trial_name(values: Mapping[str, Any]) -> str:
    """Return the values of a trial as the name of a directory."""
    return ",".join(f"{path}={text(value)}" for path, value in values.items())


def text(value: object) -> str:
    """Return a value as it is written in the name of a trial."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def six_digits(value: float) -> float:
    """Return the value rounded to six digits, the precision of names of trials."""
    return float(f"{value:.6g}")


Scalar = bool | int | float | str
"""A value in a list of a search space."""

NEAR = 0.05
"""Share of a range at each end within which a best value counts as being at the end."""


class Range(Component):
    """All numbers from `low` to `high`, both included, rounded to six digits."""

    low: float = Field(examples=[1e-4], description="least value")
    high: float = Field(examples=[1e-2], description="largest value")
    log: bool = Field(False, description="if true, equal ratios are equally likely; else equal differences")
    integer: bool = Field(False, description="whole numbers only")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"high: must be larger than low {self.low:g}, got {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"low: must be positive with `log`, got {self.low:g}")
        if self.integer and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"low, high: must be whole numbers with `integer`, got {self.low:g} to {self.high:g}")
        return self

    def value(self, fraction: float) -> float | int:
        """Return the value at a fraction of the way from `low` to `high`."""
        if self.integer:  # so that every whole number has an equal share of the fractions
            low, high = self.low - 0.5, self.high + 0.5
            found = low * (high / low) ** fraction if self.log else low + (high - low) * fraction
            return int(min(max(round(found), self.low), self.high))
        found = (
            self.low * (self.high / self.low) ** fraction if self.log else self.low + (self.high - self.low) * fraction
        )
        return self.rounded(found)

    def rounded(self, value: float) -> float | int:
        """Return a value rounded to six digits, or to a whole number, and limited to the range."""
        return int(value) if self.integer else min(max(six_digits(value), self.low), self.high)

    def edge(self, value: float) -> str | None:
        """Return "least" or "largest" if a value is within 5 percent of that end of the range, else None.

        0 is never an end, as no smaller value would be valid.
        """
        if self.log:
            place = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            place = (value - self.low) / (self.high - self.low)
        near = "least" if place <= NEAR else "largest" if place >= 1 - NEAR else None
        return None if near == "least" and self.low == 0 else near


def read_space(space: Any, interval: type[Component]) -> Any:
    """Return a search space with every mapping validated as an `interval`.

    Raises ValueError with the path of an entry that is neither a mapping nor a list.
    """
    if not isinstance(space, Mapping):
        return space
    found: dict[str, Any] = {}
    for path, values in space.items():
        if not re.fullmatch(r"[\w.]+", str(path)):
            raise ValueError(f"{path!r} is not the dotted path of a field, such as update.rms.beta")
        if isinstance(values, (list, tuple)):
            found[path] = _choices(path, list(values))
        elif isinstance(values, (Mapping, Component)):
            try:
                found[path] = validated(interval, values, path)
            except RecipeError as error:
                raise ValueError("; ".join(str(error).splitlines())) from None
        else:
            known = ", ".join(interval.model_fields)
            raise ValueError(f"{path}: must be a list of values or a mapping of {known}, got {values!r}")
    return found


def _choices(path: str, choices: list[Any]) -> list[Any]:
    """Return a list of values. Raises ValueError if a value is repeated or cannot be part of a directory's name."""
    if len(choices) < 2 or len({text(choice) for choice in choices}) < len(choices):
        raise ValueError(f"{path}: must have at least two values, all distinct, got {choices}")
    for choice in choices:
        if not isinstance(choice, Scalar) or not LABEL.fullmatch(text(choice)):
            raise ValueError(f"{path}: {choice!r} is neither a number nor a text of letters, digits and . _ + -")
    return choices
