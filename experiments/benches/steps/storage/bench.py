"""The time that storage costs: steps of a recipe as it is stored against the same recipe with nothing coded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator

from eigengraft.component import Component
from eigengraft.errors import RecipeError
from eigengraft.optimizers import Optimizer, Recipe
from eigengraft.optimizers.recipe.loading import load_recipe

from ...common.bench import Bench
from ...common.declarations import listed, require_distinct
from ...common.results import FigurePanel, ResultTable
from ..step.measure import Contender, one_step
from .rows import StorageRow
from .view import storage_advice, storage_panels, storage_summary


class StorageCase(Component):
    """A recipe with `storage`, and a number of steps that covers at least one interval of its refreshes."""

    recipe: str = Field(description="shipped name or YAML file")
    overrides: tuple[str, ...] = Field(default=(), strict=False, description="dotted.path=value, in order")
    steps: int = Field(default=10, ge=1, description="steps measured")

    def label(self) -> str:
        """The recipe's name and the values of its overrides."""
        return " ".join((self.recipe, *(override.rpartition(".")[2] for override in self.overrides)))

    def pair(self) -> tuple[Recipe, Recipe]:
        """The recipe without routes, as it is stored and with nothing coded."""
        declared = {**load_recipe(self.recipe, self.overrides).declaration(), "routes": []}
        if not declared.get("storage"):
            raise RecipeError(f"recipes: a recipe with `storage` is required, got '{self.recipe}'")
        return load_recipe(declared), load_recipe({**declared, "storage": {}})


def parse_cases(value: Any) -> Any:
    """Read a name as a case without overrides."""
    return [{"recipe": item} if isinstance(item, str) else item for item in listed(value)]


DIRECTION = "update.graft.direction.shampoo"
CASES = (
    StorageCase(recipe="soap_int8", steps=20),
    StorageCase(
        recipe="shampoo_4bit",
        overrides=(f"{DIRECTION}.statistic.interval=100", f"{DIRECTION}.refresh.steps=500"),
        steps=500,
    ),
)
"""Default candidates, each at the intervals of its paper."""


class StorageBench(Bench):
    """Recipes x one set of matrices, as stored and plain in turn on the same gradients, `warm` steps not counted.

    The matrices of a language model: embedding [v, w] and, for each layer, [3 w, w], [w, w], [4 w, w], [w, 4 w].
    Gradients are independent normal numbers. `seconds` is not used.
    """

    kind: Literal["storage"] = "storage"
    recipes: Annotated[tuple[StorageCase, ...], BeforeValidator(parse_cases)] = Field(
        default=CASES, strict=False, description="cases, or names of recipes"
    )
    layers: int = Field(default=4, ge=1, description="transformer layers of the model")
    width: int = Field(default=256, ge=1, description="width w of the model")
    vocabulary: int = Field(default=4096, ge=1, description="vocabulary size v of the model")
    warm: int = Field(default=2, ge=0, description="first steps, in which roots and bases are made from nothing")
    candidate_field: ClassVar[str] = "recipes"
    quick_fields: ClassVar[Mapping[str, Any]] = {
        "recipes": [{"recipe": "soap_int8", "steps": 10}, {"recipe": "shampoo_4bit", "steps": 50}],
        "layers": 1,
        "width": 64,
        "vocabulary": 128,
    }

    @field_validator("recipes")
    @classmethod
    def _distinct(cls, recipes: tuple[StorageCase, ...]) -> tuple[StorageCase, ...]:
        require_distinct(recipes, StorageCase.label)
        return recipes

    def cells(self) -> int:
        return len(self.recipes)

    def measure(self) -> Iterator[list[StorageRow]]:
        for case in self.recipes:
            yield [self._row(case)]

    def shapes(self) -> list[tuple[int, int]]:
        """MatrixShapes of all matrices."""
        w = self.width
        return [(self.vocabulary, w), *self.layers * [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w)]]

    def _row(self, case: StorageCase) -> StorageRow:
        device, generator = self.target_device(), torch.Generator().manual_seed(self.seed)
        start = [0.02 * torch.randn(shape, generator=generator) for shape in self.shapes()]
        optimizers = [Optimizer([torch.nn.Parameter(x.to(device)) for x in start], r, lr=1e-3) for r in case.pair()]
        contenders = [Contender(own, own.param_groups[0]["params"], 0.0) for own in optimizers]
        times: tuple[list[float], list[float]] = ([], [])
        for step in range(self.warm + case.steps):
            gradients = [torch.randn(x.shape, generator=generator).to(device) for x in start]
            for which in (0, 1) if step % 2 else (1, 0):
                times[which].append(one_step(contenders[which], gradients, time.perf_counter).total)
        stored, plain = (measured[self.warm :] for measured in times)
        sizes = [optimizer.state_bytes() for optimizer in optimizers]
        return StorageRow(
            candidate=case.label(),
            declaration=case.declaration(),
            device=self.device,
            steps=case.steps,
            ratio=sum(stored) / sum(plain),
            ordinary=median(stored) / median(plain),
            bytes=sizes[0] / sizes[1],
            stored_ms=stored,
            plain_ms=plain,
        )

    def summary(self, rows: Sequence[StorageRow]) -> ResultTable:
        return storage_summary(rows)

    def panels(self, rows: Sequence[StorageRow]) -> tuple[FigurePanel, FigurePanel]:
        return storage_panels(rows)

    def advice(self, rows: Sequence[StorageRow]) -> list[str]:
        return storage_advice(rows)
