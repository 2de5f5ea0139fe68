"""Tuning of one field in every cell of a study, before cells are compared: a descent on a grid of constant ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from eigengraft.component import Component, RecipeError

from ..reports.run import Metric
from ..training.experiment import Experiment


def distinct(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The seeds. Raises ValueError where one is there twice."""
    if len(set(seeds)) < len(seeds):
        raise ValueError("distinct seeds are required")
    return seeds


class Tuning(Component):
    """The best value of one field among start * ratio^k, k an integer: values are tried downhill until it is inside.

    start / ratio, start and start * ratio come first. While the best value so far is the least or the largest that was
    tried, the next one beyond it is. Values are compared by the mean of the study's metric over `seeds`; a diverged run
    is worse than any other. A minimum that is not the only one along the grid may be missed.
    """

    field: str = Field("lr", pattern=r"^[\w.]+$", description="dotted path of the number that is tuned")
    start: float | None = Field(None, gt=0, description="first value; none: the cell's own lr or weight_decay")
    ratio: float = Field(2.0, gt=1, description="quotient of neighbouring values")
    seeds: tuple[int, ...] = Field(strict=False, min_length=1, description="seeds of the search, none of the study's")
    trials: int = Field(10, ge=3, description="largest number of values tried in a cell")

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return distinct(seeds)

    def first(self, experiment: Experiment) -> float:
        """The value to start from in a cell. Raises RecipeError where there is none."""
        own = None
        if self.field in ("lr", "weight_decay"):
            own = getattr(experiment, self.field)
            own = getattr(experiment.recipe, self.field) if own is None else own
        start = own if self.start is None else self.start
        if not isinstance(start, (int, float)) or start <= 0:
            raise RecipeError(f"tune.start: a positive value of '{self.field}' to start from is required, got {start}")
        return float(start)

    def value(self, start: float, exponent: int) -> float:
        """start * ratio^exponent, to six digits."""
        return float(f"{start * self.ratio**exponent:.6g}")

    def missing(self, scores: Mapping[int, float]) -> list[int]:
        """Exponents to try next, given the score of each one tried (low is good); none: the search is over."""
        if not scores:
            return [-1, 0, 1]
        best = best_exponent(scores)
        beyond = [best - 1] if math.isinf(scores[best]) else [best - 1, best + 1]
        wanted = [exponent for exponent in beyond if exponent not in scores]
        return wanted if len(scores) + len(wanted) <= self.trials else []


@dataclass(frozen=True)
class Tuned:
    """What the search of one cell found.

    field: dotted path of the tuned number.
    value: the best value.
    tried: value -> mean of the metric over the seeds of the search, None where a run diverged; from low to high.
    inside: whether values on both sides of the best one were tried.
    """

    field: str
    value: float
    tried: Mapping[float, float | None]
    inside: bool


def best_exponent(scores: Mapping[int, float]) -> int:
    """The exponent with the lowest score; among equal ones the lowest exponent."""
    return min(sorted(scores), key=scores.__getitem__)


def found(tuning: Tuning, start: float, scores: Mapping[int, float], metric: Metric) -> Tuned:
    """What a search with these scores found; where every value diverged, the least one."""
    best = best_exponent(scores)
    tried = {
        tuning.value(start, k): None if math.isinf(score) else metric.sign * score
        for k, score in sorted(scores.items())
    }
    return Tuned(tuning.field, tuning.value(start, best), tried, {best - 1, best + 1} <= set(scores))


def described(tuned: Mapping[str, Tuned]) -> dict[str, Any]:
    """What searches found, cell by cell, for the manifest of a study."""
    return {
        cell: {"field": one.field, "value": one.value, "tried": list(one.tried.items()), "inside": one.inside}
        for cell, one in tuned.items()
    }
