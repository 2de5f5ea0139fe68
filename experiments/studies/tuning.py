"""Searches that tune every cell of a study: on a grid, at random, or by a density model with successive halving.

The density model is Optuna's TPESampler. Random search draws with NumPy, because Optuna is an optional package.
Optuna's pruners are not used: they compare a run with all runs that have reported so far, so that decisions would
depend on the speed of workers. Here a run is compared only with runs of earlier trials.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, final

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError, import_optional

from ..files import LABEL
from ..reports.records import Metric, Tried, TunedCell, value_order
from ..training.callbacks import Limits
from ..training.experiment import Experiment

Values = dict[str, Any]
"""A value for every field of a search space, by dotted path."""


def _distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Return the seeds. Raises ValueError if a seed is repeated."""
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be distinct, got {list(seeds)}; remove the repeated ones")
    return seeds


def _listed(seeds: Any) -> Any:
    """Return the seeds. Raises ValueError for a single number, which may be meant as a number of seeds."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        raise ValueError(
            f"a list is required, got {seeds}; write [0, 1] for two seeds, or [{seeds}] for the seed {seeds}"
        )
    return seeds


Seeds = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], BeforeValidator(_listed), AfterValidator(_distinct)
]
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
    space: dict[str, Any] = Field(description="values to try, by the dotted path of their field")

    @final
    def require_apart(self, seeds: Iterable[int], axes: Iterable[str]) -> None:
        """Raise ValueError if the study shares a seed with the search, or has a field of the search as an axis."""
        for seed in sorted(set(self.seeds) & set(seeds)):
            raise ValueError(f"tune.seeds: seed {seed} is also a seed of the study; search with other seeds")
        for field in self.space:
            if field in axes:
                raise ValueError(
                    f"tune.space: '{field}' is also an axis of the study; remove it from axes or from tune.space"
                )

    @property
    @abstractmethod
    def rule(self) -> str:
        """Sentences for a report that say how values are chosen."""

    @abstractmethod
    def proposed(self, cell: Experiment, trials: Sequence[Trial]) -> list[Values]:
        """Return all combinations of values to try next in a cell. An empty list ends the search.

        All of these combinations may be tried at the same time. Raises RecipeError if a tuned field has no start value.

        cell: experiment of the cell.
        trials: completed trials.
        """

    @abstractmethod
    def edges(self, cell: Experiment, best: Trial, trials: Sequence[Trial]) -> dict[str, str]:
        """Return field -> "least" or "largest" for each field whose best value is at that end of the tried values."""

    def limits(self, experiment: Experiment, trials: Sequence[Trial], metric: Metric) -> Limits | None:
        """Return the limits that stop a run of the next trial, given earlier trials. None: no run is stopped."""
        return None

    @final
    def next(self, cell: Experiment, trials: Sequence[Trial]) -> list[Values]:
        """Return the values to try next. An empty list ends the search: nothing is proposed, or the trials have taken
        the seconds that `seconds` allows.
        """
        if self.seconds is not None and sum(trial.seconds for trial in trials) >= self.seconds:
            return []
        return self.proposed(cell, trials)

    @final
    def found(self, cell: Experiment, trials: Sequence[Trial], metric: Metric, name: str) -> TunedCell:
        """Return the result of a search that has ended.

        cell: experiment of the cell.
        trials: all trials of the search.
        metric: metric of the study.
        name: name of the cell.
        """
        best = best_trial(trials)
        means = (None if math.isinf(one.score) else metric.sign * one.score for one in trials)
        tried = tuple(Tried(one.values, mean, one.stopped) for one, mean in zip(trials, means, strict=True))
        return TunedCell(name, best.values, self.edges(cell, best, trials), tried, self.rule)


def best_trial(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the lowest score among trials that were not stopped, or among all if all were stopped.

    Of trials with equal scores, such as diverged trials, the trial with the smallest hyperparameters is returned.
    """
    whole = [trial for trial in trials if trial.stopped is None]
    return min(
        whole or trials, key=lambda trial: (trial.score, [value_order(value) for value in trial.values.values()])
    )


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
    log: bool = Field(
        False, description="true: equal ratios of values are equally likely; false: equal differences are"
    )
    integer: bool = Field(False, description="true: whole numbers only")

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
        """Return the value at `fraction`, from 0 to 1, of the way from `low` to `high`; with `log`, on a log scale."""
        wider = 0.5 if self.integer else 0.0  # else rounding would give the ends only half of their share
        low, high = self.low - wider, self.high + wider
        found = low * (high / low) ** fraction if self.log else low + (high - low) * fraction
        return int(min(max(round(found), self.low), self.high)) if self.integer else self.rounded(found)

    def rounded(self, value: float) -> float | int:
        """Return a value rounded to six significant digits and limited to the range.

        If the range has `integer`, return the value as an int instead.
        """
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
    """Return a search space in which every mapping is validated as a range of values. Lists of values are checked too.

    Raises ValueError with the path of an entry that is neither a mapping nor a list.

    space: dotted path -> list of values, or mapping of the fields of a range.
    interval: class of a range.
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
            raise ValueError(f"{path}: must be a list of values or a mapping with the fields {known}, got {values!r}")
    return found


def _choices(path: str, choices: list[Any]) -> list[Any]:
    """Return `choices`, the values that a search may give to the field at `path`.

    Raises ValueError for fewer than two values, or if one is repeated or cannot be part of a directory's name.
    """
    if len(choices) < 2 or len({text(choice) for choice in choices}) < len(choices):
        raise ValueError(f"{path}: must have at least two values, all distinct, got {choices}")
    for choice in choices:
        if not isinstance(choice, Scalar) or not LABEL.fullmatch(text(choice)):
            raise ValueError(f"{path}: {choice!r} is neither a number nor a text of letters, digits and . _ + -")
    return choices


Point = tuple[int, ...]
"""A point of the grid: for each field, the exponent of its ratio or the index in its list."""


class RatioGrid(Component):
    """start * ratio^k for every integer k, to six digits."""

    ratio: float = Field(2.0, gt=1, description="quotient of neighboring values")
    start: float | None = Field(None, gt=0, description="value to start from; none: the cell's own lr or weight_decay")

    def first(self, path: str, experiment: Experiment) -> float:
        """Return the value of the field at `path` with which the search in a cell starts.

        It is `start`, or else the value that the cell's own experiment has. Raises RecipeError if it is not positive.
        """
        recipe, own = experiment.recipe, None
        if path in (defaults := {"lr": recipe.lr, "weight_decay": recipe.weight_decay.rate}):
            own = getattr(experiment, path)
            own = defaults[path] if own is None else own
        start = own if self.start is None else self.start
        if not isinstance(start, (int, float)) or start <= 0:
            where = f"tune.space.{path}.start"
            raise RecipeError(f"{where}: the search needs a positive start value, got {start}; give `start`")
        return float(start)


class CoordinateDescent(Tuning):
    """x <- argmin over x and its neighbors on a grid, one field after the other, until no neighbor is better.

    The values of a field are either an ordered list, in which the search starts at the middle value, or a grid of
    constant ratio, as {ratio: 2}, which has no smallest and no largest value. The start and its neighbors along the
    first field are tried first. While all runs have diverged, only smaller values are tried on a grid of constant
    ratio. The search finds a local minimum.
    """

    kind: Literal["coordinate_descent"] = "coordinate_descent"
    trials: int = Field(10, ge=3, description="largest number of values tried in a cell")
    space: dict[str, RatioGrid | list[Scalar]] = Field(
        {"lr": RatioGrid()},
        min_length=1,
        description="values to try: dotted path of a field -> {ratio, start}, or list of values in their order",
    )

    @field_validator("space", mode="before", json_schema_input_type=dict[str, RatioGrid | list[Scalar]])
    @classmethod
    def _read(cls, space: Any) -> Any:
        return read_space(space, RatioGrid)

    @property
    def rule(self) -> str:
        return (
            "Coordinate descent: the best values so far are compared with their neighbors on the grid, one field "
            f"after the other, until no neighbor is better or {self.trials} were tried."
        )

    def proposed(self, cell: Experiment, trials: Sequence[Trial]) -> list[Values]:
        points = [self._point(trial.values, cell) for trial in trials]
        if not points:
            origin = tuple(0 if isinstance(grid, RatioGrid) else (len(grid) - 1) // 2 for grid in self.space.values())
            return [self._values(point, cell) for point in sorted({origin, *self._neighbors(origin, 0)})]
        best = best_trial(trials)
        place = self._point(best.values, cell)
        for axis in range(len(self.space)):
            beyond = self._neighbors(place, axis)
            if math.isinf(best.score) and isinstance(list(self.space.values())[axis], RatioGrid):
                beyond = beyond[:1]
            if wanted := [point for point in beyond if point not in points]:
                fits = len(trials) + len(wanted) <= self.trials
                return [self._values(point, cell) for point in wanted] if fits else []
        return []

    def edges(self, cell: Experiment, best: Trial, trials: Sequence[Trial]) -> dict[str, str]:
        points = {self._point(trial.values, cell) for trial in trials}
        place, found = self._point(best.values, cell), {}
        for axis, (path, grid) in enumerate(self.space.items()):
            low, high = _moved(place, axis, -1) in points, _moved(place, axis, 1) in points
            ordered = isinstance(grid, RatioGrid) or all(isinstance(v, (int, float)) for v in grid)
            if ordered and best.values[path] != 0 and not (low and high):  # 0 is never an end
                found[path] = "largest" if low else "least"
        return found

    def _neighbors(self, point: Point, axis: int) -> list[Point]:
        """Return the neighbors of a point along one field, the lower one first. The ends of a list have one neighbor.

        axis: index of the field in `space`.
        """
        grid = list(self.space.values())[axis]
        beside = [_moved(point, axis, by) for by in (-1, 1)]
        return [one for one in beside if isinstance(grid, RatioGrid) or 0 <= one[axis] < len(grid)]

    def _values(self, point: Point, cell: Experiment) -> Values:
        return {
            path: six_digits(grid.first(path, cell) * grid.ratio**k) if isinstance(grid, RatioGrid) else grid[k]
            for k, (path, grid) in zip(point, self.space.items(), strict=True)
        }

    def _point(self, values: Mapping[str, Any], cell: Experiment) -> Point:
        place = []
        for path, grid in self.space.items():
            if isinstance(grid, RatioGrid):
                place.append(round(math.log(values[path] / grid.first(path, cell)) / math.log(grid.ratio)))
            else:
                place.append(grid.index(values[path]))
        return tuple(place)


def _moved(point: Point, axis: int, by: int) -> Point:
    return (*point[:axis], point[axis] + by, *point[axis + 1 :])


class Halving(Component):
    """Successive halving: at the steps `least` * `rate`^j, with the fields `least` and `rate` and j = 0, 1, ..., a run
    continues if at most floor((n + 1) / `rate`) - 1 of n other runs are better.

    The n other runs have the same seed, belong to earlier trials of the cell, and have reached the step. The best run
    so far always continues. Steps are rounded up to the next evaluation. This is the rule of Optuna's
    SuccessiveHalvingPruner (Li et al. 2018, arXiv:1810.05934, without suspension). Trials that run side by side are not
    compared.
    """

    rate: int = Field(
        3,
        ge=2,
        description="ratio of the steps of successive comparisons; in each of them about one of this many runs "
        "continues",
    )
    least: int = Field(ge=1, examples=[30], description="steps before runs are compared for the first time")

    @property
    def rule(self) -> str:
        """Sentence for a report that describes the rule."""
        return (
            f"Successive halving: at step {self.least}, and at every {self.rate}-fold of it, a run goes on only if it "
            f"is among the best 1/{self.rate} of the runs of earlier trials with the same seed."
        )

    def rungs(self, experiment: Experiment) -> list[int]:
        """Return the steps at which runs are compared."""
        every, found, rung = experiment.eval_every, [], self.least
        while (step := -(-rung // every) * every) < experiment.steps:
            found += [step] if step not in found else []
            rung *= self.rate
        return found

    def limits(self, experiment: Experiment, trials: Sequence[Trial], metric: Metric) -> Limits | None:
        """Return the limits of a run of the next trial: for each step at which runs are compared, the worst metric with
        which the run continues.

        The limits follow from runs of earlier trials with the seed of `experiment`. Returns None if there are no limits
        yet. Raises RecipeError if there is no evaluation before the last step.
        """
        limits, rungs = [], self.rungs(experiment)
        if not rungs:
            raise RecipeError(
                f"tune.halving.least: runs are first compared at an evaluation from step {self.least} on, but there is "
                f"none before the last step, {experiment.steps} (`eval_every` is {experiment.eval_every}), so no run "
                "could be stopped early; lower `least` or `eval_every`"
            )
        for step in rungs:
            curves = [(trial.curves or {}).get(experiment.seed, {}) for trial in trials]
            others = sorted(curve[step] for curve in curves if step in curve)
            place = max((len(others) + 1) // self.rate - 1, 0)
            if place < len(others) and math.isfinite(others[place]):
                limits.append((step, metric.sign * others[place]))
        return Limits(metric=metric.key, larger=metric.sign < 0, limits=tuple(limits)) if limits else None


class Sampled(Tuning, ABC):
    """A search that draws the values of each trial from the ranges and lists of `space`."""

    trials: int = Field(20, ge=1, description="number of values tried in a cell")
    space: dict[str, Range | list[Scalar]] = Field(
        min_length=1,
        examples=[{"lr": {"low": 1e-4, "high": 1e-2}}],
        description="values to try: dotted path of a field -> {low, high, log, integer}, or list of values",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the draws")
    together: int = Field(1, ge=1, description="trials of a cell that are drawn at once and may run side by side")
    halving: Halving | None = Field(
        None, description="early end of runs that are worse than earlier ones; none: all runs are completed"
    )

    @field_validator("space", mode="before", json_schema_input_type=dict[str, Range | list[Scalar]])
    @classmethod
    def _read(cls, space: Any) -> Any:
        return read_space(space, Range)

    @property
    def rule(self) -> str:
        return f"{self.method} {'' if self.halving is None else self.halving.rule}".strip()

    @property
    @abstractmethod
    def method(self) -> str:
        """Sentence that says how values are drawn."""

    @abstractmethod
    def draw(self, trials: Sequence[Trial], number: int) -> list[Values]:
        """Return the values of the next `number` trials, given the completed trials."""

    def proposed(self, cell: Experiment, trials: Sequence[Trial]) -> list[Values]:
        number = min(self.together, self.trials - len(trials))
        return self.draw(trials, number) if number > 0 else []

    def edges(self, cell: Experiment, best: Trial, trials: Sequence[Trial]) -> dict[str, str]:
        ranges = {path: one for path, one in self.space.items() if isinstance(one, Range)}
        near = {path: one.edge(best.values[path]) for path, one in ranges.items()}
        return {path: edge for path, edge in near.items() if edge is not None}

    def limits(self, experiment: Experiment, trials: Sequence[Trial], metric: Metric) -> Limits | None:
        return None if self.halving is None else self.halving.limits(experiment, trials, metric)


class Random(Sampled):
    """Random search: values drawn independently and uniformly from their ranges and lists (Bergstra & Bengio 2012)."""

    kind: Literal["random"] = "random"

    @property
    def method(self) -> str:
        return f"Random search: {self.trials} independent draws from the space, with seed {self.seed}."

    def draw(self, trials: Sequence[Trial], number: int) -> list[Values]:
        drawn = []
        for index in range(len(trials), len(trials) + number):
            fractions = np.random.default_rng([self.seed, index]).random(len(self.space))
            drawn.append(
                {
                    path: one.value(float(u)) if isinstance(one, Range) else one[int(u * len(one))]
                    for u, (path, one) in zip(fractions, self.space.items(), strict=True)
                }
            )
        return drawn


class TPE(Sampled):
    """x = argmax l(x) / g(x), with l the density of good trials and g of all others (Bergstra et al. 2011), by Optuna.

    Needs Optuna: `pip install optuna`. Trials that successive halving stopped count as worse than others.
    """

    kind: Literal["tpe"] = "tpe"
    startup: int = Field(10, ge=1, description="number of first trials, which are drawn at random")

    @property
    def method(self) -> str:
        return (
            f"Tree-structured Parzen estimator (Optuna's TPESampler): {self.trials} draws from the space, the first "
            f"{min(self.startup, self.trials)} at random, with seed {self.seed}."
        )

    def draw(self, trials: Sequence[Trial], number: int) -> list[Values]:
        optuna = import_optional("optuna", "tune.kind")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study()
        spaces = {path: _distribution(optuna, one) for path, one in self.space.items()}
        for trial in trials:
            study.add_trial(_frozen(optuna, trial, spaces))
        drawn = []
        for index in range(len(trials), len(trials) + number):
            # Draws depend only on earlier trials and the number of the trial, so that they are the same after a kill.
            study.sampler = optuna.samplers.TPESampler(
                seed=int(np.random.default_rng([self.seed, index]).integers(2**32)),
                n_startup_trials=self.startup,
                multivariate=True,
                constant_liar=True,
            )
            params = study.ask(spaces).params
            drawn.append(
                {p: one.rounded(params[p]) if isinstance(one, Range) else params[p] for p, one in self.space.items()}
            )
        return drawn


def _distribution(optuna: Any, one: Range | list[Scalar]) -> Any:
    if not isinstance(one, Range):
        return optuna.distributions.CategoricalDistribution(one)
    if one.integer:
        return optuna.distributions.IntDistribution(int(one.low), int(one.high), log=one.log)
    return optuna.distributions.FloatDistribution(one.low, one.high, log=one.log)


def _frozen(optuna: Any, trial: Trial, spaces: dict[str, Any]) -> Any:
    """Return a trial as Optuna represents it. A diverged trial has the largest finite float32 as its loss.

    optuna: the module.
    spaces: Optuna's distribution of each field, by dotted path.
    """
    score = min(trial.score, float(np.finfo(np.float32).max)) if not math.isnan(trial.score) else math.inf
    shared = {"params": dict(trial.values), "distributions": spaces}
    if trial.stopped is not None:
        pruned = optuna.trial.TrialState.PRUNED
        return optuna.trial.create_trial(state=pruned, intermediate_values={trial.stopped: score}, **shared)
    return optuna.trial.create_trial(value=score, **shared)
