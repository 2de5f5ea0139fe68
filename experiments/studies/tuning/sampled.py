"""Tuning by draws from a space of ranges and lists, at random or near what was good, with successive halving."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from eigengraft.errors import RecipeError

from ...reports.run import Metric
from ...training.callbacks import Limits
from ...training.experiment import Experiment
from .base import Trial, Tuning, Values
from .halving import Halving
from .space import Range, Scalar, read_space


class Sampled(Tuning, ABC):
    """A search that draws each trial from `space`."""

    trials: int = Field(20, ge=1, description="number of values tried in a cell")
    space: dict[str, Range | list[Scalar]] = Field(
        min_length=1, description="dotted path -> {low, high, log, integer}, or list of values"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the draws")
    together: int = Field(1, ge=1, description="trials of a cell that are drawn at once and may run side by side")
    halving: Halving | None = Field(
        None, description="stops runs that are behind earlier ones; none: all run to their end"
    )

    @field_validator("space", mode="before", json_schema_input_type=dict[str, Range | list[Scalar]])
    @classmethod
    def _read(cls, space: Any) -> Any:
        return read_space(space, Range)

    @property
    def fields(self) -> Collection[str]:
        return self.space

    @property
    def rule(self) -> str:
        return f"{self.method} {'' if self.halving is None else self.halving.rule}".strip()

    @property
    @abstractmethod
    def method(self) -> str:
        """How values are drawn, in one sentence."""

    @abstractmethod
    def draw(self, trials: Sequence[Trial], number: int) -> list[Values]:
        """The next `number` of values, given the trials that have ended."""

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
    """Values drawn independently and uniformly from their ranges and lists (Bergstra & Bengio 2012)."""

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
    """x = argmax l(x) / g(x), l and g the densities of good and of other trials (Bergstra et al. 2011), by Optuna.

    Needs Optuna: `pip install eigengraft[search]`. Trials that successive halving stopped count as worse than others.
    """

    kind: Literal["tpe"] = "tpe"
    startup: int = Field(10, ge=1, description="trials drawn at random first")

    @property
    def method(self) -> str:
        return (
            f"Tree-structured Parzen estimator (Optuna's TPESampler): {self.trials} draws from the space, the first "
            f"{min(self.startup, self.trials)} at random, with seed {self.seed}."
        )

    def draw(self, trials: Sequence[Trial], number: int) -> list[Values]:
        optuna = _optuna()
        study = optuna.create_study()
        spaces = {path: _distribution(optuna, one) for path, one in self.space.items()}
        for trial in trials:
            study.add_trial(_frozen(optuna, trial, spaces))
        drawn = []
        for index in range(len(trials), len(trials) + number):
            # The draws of a trial depend on those before it and its own number alone, and so survive every kill.
            study.sampler = optuna.samplers.TPESampler(
                seed=self.seed + index, n_startup_trials=self.startup, multivariate=True, constant_liar=True
            )
            params = study.ask(spaces).params
            drawn.append(
                {p: one.rounded(params[p]) if isinstance(one, Range) else params[p] for p, one in self.space.items()}
            )
        return drawn


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise RecipeError("tune.kind: Optuna is required by tpe (pip install eigengraft[search]), got none") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, one: Range | list[Scalar]) -> Any:
    if not isinstance(one, Range):
        return optuna.distributions.CategoricalDistribution(one)
    if one.integer:
        return optuna.distributions.IntDistribution(int(one.low), int(one.high), log=one.log)
    return optuna.distributions.FloatDistribution(one.low, one.high, log=one.log)


def _frozen(optuna: Any, trial: Trial, spaces: dict[str, Any]) -> Any:
    """A trial in the terms of Optuna; a diverged one has the largest finite loss."""
    score = min(trial.score, float(np.finfo(np.float32).max)) if not math.isnan(trial.score) else math.inf
    shared = {"params": dict(trial.values), "distributions": spaces}
    if trial.stopped is not None:
        pruned = optuna.trial.TrialState.PRUNED
        return optuna.trial.create_trial(state=pruned, intermediate_values={trial.stopped: score}, **shared)
    return optuna.trial.create_trial(value=score, **shared)
