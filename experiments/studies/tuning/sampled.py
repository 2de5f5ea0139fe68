"""Searches that draw values from a space at random or by a density model, with successive halving."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from eigengraft.component import Component
from eigengraft.errors import RecipeError

from ...reports.records import Metric
from ...training.callbacks import Limits
from ...training.experiment import Experiment
from .base import Range, Scalar, Trial, Tuning, Values, read_space


class Halving(Component):
    """Successive halving: at steps least * rate^j, a run continues if at most floor((n + 1) / rate) - 1 others are
    better.

    The n others are the runs of earlier trials of the cell with the same seed that reached the step. The best run so
    far always continues. Steps are rounded up to the next evaluation. This is the rule of Optuna's
    SuccessiveHalvingPruner (Li et al. 2018, arXiv:1810.05934, without suspension). Trials that run side by side are not
    compared.
    """

    rate: int = Field(3, ge=2, description="one of this many runs continues to this many times the steps")
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
                f"tune.halving.least: {self.least} leaves no evaluation (every {experiment.eval_every} steps) before "
                f"the last step {experiment.steps}, so no run could be stopped early; lower `least` or `eval_every`"
            )
        for step in rungs:
            curves = [(trial.curves or {}).get(experiment.seed, {}) for trial in trials]
            others = sorted(curve[step] for curve in curves if step in curve)
            place = max((len(others) + 1) // self.rate - 1, 0)
            if place < len(others) and math.isfinite(others[place]):
                limits.append((step, metric.sign * others[place]))
        return Limits(metric=metric.key, larger=metric.sign < 0, limits=tuple(limits)) if limits else None


class Sampled(Tuning, ABC):
    """A search that draws each trial from `space`."""

    trials: int = Field(20, ge=1, description="number of values tried in a cell")
    space: dict[str, Range | list[Scalar]] = Field(
        min_length=1,
        examples=[{"lr": {"low": 1e-4, "high": 1e-2}}],
        description="dotted path -> {low, high, log, integer}, or list of values",
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
    def fields(self) -> Collection[str]:
        return self.space

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
            # Draws depend only on earlier trials and the number of the trial, so that they are the same after a kill.
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
        raise RecipeError("tune.kind: tpe needs Optuna, which is not installed; run `pip install optuna`") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, one: Range | list[Scalar]) -> Any:
    if not isinstance(one, Range):
        return optuna.distributions.CategoricalDistribution(one)
    if one.integer:
        return optuna.distributions.IntDistribution(int(one.low), int(one.high), log=one.log)
    return optuna.distributions.FloatDistribution(one.low, one.high, log=one.log)


def _frozen(optuna: Any, trial: Trial, spaces: dict[str, Any]) -> Any:
    """Return a trial as Optuna represents it. A diverged trial has the largest finite float32 as its loss."""
    score = min(trial.score, float(np.finfo(np.float32).max)) if not math.isnan(trial.score) else math.inf
    shared = {"params": dict(trial.values), "distributions": spaces}
    if trial.stopped is not None:
        pruned = optuna.trial.TrialState.PRUNED
        return optuna.trial.create_trial(state=pruned, intermediate_values={trial.stopped: score}, **shared)
    return optuna.trial.create_trial(value=score, **shared)
