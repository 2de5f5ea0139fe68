"""Successive halving among the trials of a search, by Optuna's rule, decided from earlier trials alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from eigengraft.component import Component
from eigengraft.errors import RecipeError

from ...reports.run import Metric
from ...training.callbacks import Limits
from ...training.experiment import Experiment
from .base import Trial


class Halving(Component):
    """At steps least * rate^j, j = 0, 1, ..., a run goes on if floor((n + 1) / rate) - 1 others or fewer are better.

    The n others are the runs of earlier trials of the cell with the same seed that reached the step; the best run so
    far always goes on. Steps are rounded up to the next evaluation. This is the rule of Optuna's
    SuccessiveHalvingPruner (Li et al. 2018, arXiv:1810.05934, without suspension). Trials that run side by side do not
    see each other.
    """

    rate: int = Field(3, ge=2, description="one of this many runs goes on, and has this many times the steps")
    least: int = Field(ge=1, description="steps before runs are compared for the first time")

    @property
    def rule(self) -> str:
        """The rule in a sentence for a report."""
        return (
            f"Successive halving: at step {self.least}, and at every {self.rate}-fold of it, a run goes on only if it "
            f"is among the best 1/{self.rate} of the runs of earlier trials with the same seed."
        )

    def rungs(self, experiment: Experiment) -> list[int]:
        """The steps at which runs are compared."""
        every, found, rung = experiment.eval_every, [], self.least
        while (step := -(-rung // every) * every) < experiment.steps:
            found += [step] if step not in found else []
            rung *= self.rate
        return found

    def limits(self, experiment: Experiment, trials: Sequence[Trial], metric: Metric) -> Limits | None:
        """The worst metric at every rung with which a run with the seed of `experiment` goes on. Raises RecipeError."""
        limits, rungs = [], self.rungs(experiment)
        if not rungs:
            required = (
                f"an evaluation (every {experiment.eval_every} steps) before the last of {experiment.steps} steps"
            )
            raise RecipeError(f"tune.halving.least: {required} is required, got {self.least}")
        for step in rungs:
            curves = [(trial.curves or {}).get(experiment.seed, {}) for trial in trials]
            others = sorted(curve[step] for curve in curves if step in curve)
            place = max((len(others) + 1) // self.rate - 1, 0)
            if place < len(others) and math.isfinite(others[place]):
                limits.append((step, metric.sign * others[place]))
        return Limits(metric=metric.key, limits=tuple(limits)) if limits else None
