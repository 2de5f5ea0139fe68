"""Waiting of ranks: critical paths measured on processes of this machine, beside those of counted work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from eigengraft.optimizers import Recipe, load_recipe
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.stacks.owners import at_once_fields, common_interval

from ...common.bench import Bench
from ...common.declarations import listed, require_distinct
from ...common.fields import PositiveInts
from ...common.results import FigurePanel, ResultTable
from .processes import RankJob, busy_times
from .rows import BusyTimes, RankRow, efficiency_of, path_of
from .view import rank_advice, rank_panels, rank_summary


class RankBench(Bench):
    """Recipes x values of `refresh.at_once` x numbers of ranks on one set of matrices, replicated as under DDP.

    The matrices of a transformer: for each layer [3 w, w], [w, w], [4 w, w], [w, 4 w]. Every rank is a process with one
    thread and is given the same independent normal gradients. Measured is the time for which a rank computes, not that
    for which it waits, so that fewer cores than ranks will do. `seconds` is not used.
    """

    kind: Literal["ranks"] = "ranks"
    recipes: Annotated[tuple[str, ...], BeforeValidator(listed)] = Field(
        default=("shampoo",), strict=False, description="shipped names or YAML files of recipes that spread refreshes"
    )
    at_once: PositiveInts = Field(default=(1, 8), strict=False, description="values of `refresh.at_once`")
    ranks: PositiveInts = Field(
        default=(1, 2, 4), strict=False, description="numbers of ranks; the first is 1, which others are compared with"
    )
    layers: int = Field(default=4, ge=1, description="transformer layers")
    width: int = Field(default=256, ge=1, description="width w")
    intervals: int = Field(default=2, ge=1, description="intervals of refreshes that are measured, after the first one")
    candidate_field: ClassVar[str] = "recipes"
    quick_fields: ClassVar[Mapping[str, Any]] = {"width": 128, "intervals": 1}

    @field_validator("recipes")
    @classmethod
    def _spread(cls, recipes: tuple[str, ...]) -> tuple[str, ...]:
        require_distinct(recipes, str)
        for name in recipes:
            if not at_once_fields(load_recipe(name), [""]):
                raise ValueError(f"a recipe whose refreshes may be spread is required, got '{name}'")
        return recipes

    @model_validator(mode="after")
    def _can_be_measured(self) -> Self:
        if self.ranks[0] != 1:
            raise ValueError(f"ranks: 1 is required first, which others are compared with, got {self.ranks[0]}")
        if self.threads != 1 or self.device != "cpu":
            raise ValueError(
                f"threads: ranks with one thread on the CPU are required, got {self.threads} on '{self.device}'"
            )
        return self

    def shapes(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Shapes of all matrices, by name."""
        w = self.width
        layer = {"mix": (3 * w, w), "out": (w, w), "up": (4 * w, w), "down": (w, 4 * w)}
        return tuple((f"layers.{i}.{name}.weight", shape) for i in range(self.layers) for name, shape in layer.items())

    def variants(self) -> list[tuple[str, int, Recipe]]:
        """(name, at_once, recipe) of everything that is measured on each number of ranks."""
        found = []
        for name in self.recipes:
            fields = at_once_fields(load_recipe(name), [""])
            found += [(name, n, load_recipe(name, dict.fromkeys(fields, n))) for n in self.at_once]
        return found

    def cells(self) -> int:
        return len(self.ranks)

    def measure(self) -> Iterator[list[RankRow]]:
        alone: list[float] = []
        for ranks in self.ranks:
            measured = busy_times([self._job(recipe) for _, _, recipe in self.variants()], ranks)
            alone = alone or [path_of(busy) for busy in measured]
            pairs = zip(self.variants(), measured, alone, strict=True)
            yield [self._row(variant, busy, one) for variant, busy, one in pairs]

    def _job(self, recipe: Recipe) -> RankJob:
        interval = common_interval(recipe)
        return RankJob(recipe.to_json(), self.shapes(), interval, self.intervals * interval, self.seed)

    def _row(self, variant: tuple[str, int, Recipe], busy: BusyTimes, alone: float) -> RankRow:
        name, at_once, recipe = variant
        ranks, path = len(busy), path_of(busy)
        paper = plan(recipe, self.shapes(), (ranks,), "ddp")
        return RankRow(
            candidate=f"{name}, {at_once} at once",
            declaration=recipe.declaration(),
            device=self.device,
            ranks=ranks,
            at_once=at_once,
            steps=len(busy[0]),
            path_ms=path,
            efficiency=efficiency_of(alone, ranks, path),
            counted=efficiency_of(float(paper.work.sum()), ranks, paper.balance.critical_path / paper.interval),
            busy_ms=[fmean(times) for times in busy],
        )

    def summary(self, rows: Sequence[RankRow]) -> ResultTable:
        return rank_summary(rows)

    def panels(self, rows: Sequence[RankRow]) -> tuple[FigurePanel, FigurePanel]:
        return rank_panels(rows)

    def advice(self, rows: Sequence[RankRow]) -> list[str]:
        return rank_advice(rows)
