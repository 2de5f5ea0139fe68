"""Coordinate descent: a search along the fields of a grid, most often of the learning rate alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from eigengraft.component import Component
from eigengraft.errors import RecipeError

from ...training.experiment import Experiment
from .base import Scalar, Trial, Tuning, Values, best_trial, read_space, six_digits

Point = tuple[int, ...]
"""A point of the grid: for each field, the exponent of its ratio or the index in its list."""


class RatioGrid(Component):
    """start * ratio^k for every integer k, to six digits."""

    ratio: float = Field(2.0, gt=1, description="quotient of neighboring values")
    start: float | None = Field(None, gt=0, description="value to start from; none: the cell's own lr or weight_decay")

    def first(self, path: str, experiment: Experiment) -> float:
        """Return the start value in a cell. Raises RecipeError if there is none."""
        own = None
        if path in ("lr", "weight_decay"):
            own = getattr(experiment, path)
            own = getattr(experiment.recipe, path) if own is None else own
        start = own if self.start is None else self.start
        if not isinstance(start, (int, float)) or start <= 0:
            where = f"tune.space.{path}.start"
            raise RecipeError(f"{where}: the search needs a positive start value, got {start}; give `start`")
        return float(start)


class CoordinateDescent(Tuning):
    """x <- argmin over x and its neighbors on a grid, one field after the other, until no neighbor is better.

    The values of a field are either a grid of constant ratio without ends, {ratio: 2}, or an ordered list, in which the
    search starts at the middle value. The start and its neighbors along the first field are tried first. If the best
    value diverged, only lower neighbors are tried on a grid of constant ratio. The search finds a local minimum.
    """

    kind: Literal["coordinate_descent"] = "coordinate_descent"
    trials: int = Field(10, ge=3, description="largest number of values tried in a cell")
    space: dict[str, RatioGrid | list[Scalar]] = Field(
        {"lr": RatioGrid()}, min_length=1, description="dotted path -> {ratio, start}, or list of values in their order"
    )

    @field_validator("space", mode="before", json_schema_input_type=dict[str, RatioGrid | list[Scalar]])
    @classmethod
    def _read(cls, space: Any) -> Any:
        return read_space(space, RatioGrid)

    @property
    def fields(self) -> Collection[str]:
        return self.space

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
        """Return the existing neighbors of a point along one field."""
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
