"""Time that quantized storage costs: steps of a recipe with its storage, and steps of the same recipe without
quantization.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from eigengraft.component import Component
from eigengraft.errors import RecipeError
from eigengraft.optimizers import Optimizer, Recipe, load_recipe

from . import view
from .bench import Bench, Column, Problem
from .candidates import listed
from .steps.measure import Contender, one_step
from .steps.sets import gpt, initial_values
from .view import Panel, Recommendation, Row, Table


class StorageCase(Component):
    """A recipe with `storage`, and a number of steps that covers at least one interval of its refreshes."""

    recipe: str = Field(description="shipped name or YAML file")
    overrides: tuple[str, ...] = Field((), strict=False, description="dotted.path=value, in order")
    steps: int = Field(10, ge=1, description="steps measured")

    def label(self) -> str:
        """Return the recipe's name and the values of its overrides."""
        return " ".join((self.recipe, *(override.rpartition(".")[2] for override in self.overrides)))

    def pair(self) -> tuple[Recipe, Recipe]:
        """Return two recipes without routes: the recipe with its declared storage, and the recipe with all state
        unquantized.
        """
        declared = {**load_recipe(self.recipe, self.overrides).declaration(), "routes": []}
        if not declared.get("storage"):
            raise RecipeError(f"recipes: '{self.recipe}' quantizes no state; give a recipe with `storage`")
        return load_recipe(declared), load_recipe({**declared, "storage": {}})


def parse_cases(value: Any) -> Any:
    """Read a name as a case without overrides."""
    return tuple({"recipe": item} if isinstance(item, str) else item for item in listed(value))


DIRECTION = "update.graft.direction.shampoo"
CASES = (
    StorageCase(recipe="soap_int8", steps=20),
    StorageCase(
        recipe="shampoo_4bit",
        overrides=(f"{DIRECTION}.statistic.interval=100", f"{DIRECTION}.refresh.steps=500"),
        steps=500,
    ),
)
"""Default candidates, each with the refresh intervals of its paper."""


class StorageBench(Bench):
    """Recipes on one set of matrices: steps with quantized and with unquantized state in turn, on the same gradients.

    The matrices are those of a language model: an embedding [v, w] and, for each layer, [3 w, w], [w, w], [4 w, w] and
    [w, 4 w]. Gradients are independent normal numbers. The first `warm` steps are not counted. The field `seconds` has
    no effect.
    """

    kind: Literal["storage"] = "storage"
    recipes: Annotated[tuple[StorageCase, ...], BeforeValidator(parse_cases)] = Field(
        CASES, description="cases, or names of recipes"
    )
    layers: int = Field(4, ge=1, description="transformer layers of the model")
    width: int = Field(256, ge=1, description="width w of the model")
    vocabulary: int = Field(4096, ge=1, description="vocabulary size v of the model")
    warm: int = Field(2, ge=0, description="first steps, in which roots and bases are made from nothing")
    candidate_field: ClassVar[str] = "recipes"
    columns: ClassVar[Mapping[str, Column]] = {
        "steps": Column("number of measured steps"),
        "ratio": Column("mean of stored_ms over mean of plain_ms, refreshes included"),
        "ordinary": Column("median of stored_ms over median of plain_ms"),
        "bytes": Column("bytes of the state as stored over bytes with nothing coded"),
        "stored_ms": Column("time of each step with coded slots", "ms"),
        "plain_ms": Column("time of each step with nothing coded", "ms"),
    }
    quick_fields: ClassVar[Mapping[str, Any]] = {
        "recipes": [{"recipe": "soap_int8", "steps": 10}, {"recipe": "shampoo_4bit", "steps": 50}],
        "layers": 1,
        "width": 64,
        "vocabulary": 128,
    }

    def problems(self) -> Sequence[Problem]:
        return [Problem({}, partial(initial_values, self.shapes(), self.seed))]

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of all matrices, without norms."""
        return [shape for shape in gpt(self.layers, self.width, self.vocabulary) if len(shape) == 2]

    def label(self, candidate: StorageCase) -> str:
        return candidate.label()

    def measure(self, candidate: StorageCase, fields: Mapping[str, Any], given: list[Tensor]) -> Iterator[Row]:
        device, generator = self.target_device(), torch.Generator().manual_seed(self.seed + 1)
        optimizers = [
            Optimizer([torch.nn.Parameter(x.to(device, copy=True)) for x in given], recipe, lr=1e-3)
            for recipe in candidate.pair()
        ]
        contenders = [Contender(own, own.param_groups[0]["params"], 0.0) for own in optimizers]
        times: tuple[list[float], list[float]] = ([], [])
        for step in range(self.warm + candidate.steps):
            gradients = [torch.randn(x.shape, generator=generator).to(device) for x in given]
            for which in (0, 1) if step % 2 else (1, 0):
                times[which].append(one_step(contenders[which], gradients, time.perf_counter).total)
        stored, plain = (measured[self.warm :] for measured in times)
        sizes = [optimizer.state_bytes() for optimizer in optimizers]
        yield {
            "steps": candidate.steps,
            "ratio": sum(stored) / sum(plain),
            "ordinary": median(stored) / median(plain),
            "bytes": sizes[0] / sizes[1],
            "stored_ms": stored,
            "plain_ms": plain,
        }

    def table(self) -> Table:
        return Table(
            "steps with storage over steps with nothing coded, refreshes in the mean",
            {"recipe": "candidate"},
            {
                "steps": view.first("steps"),
                "state / plain": view.first("bytes", view.finite("{:.3g}")),
                "time / plain: mean": view.first("ratio", view.finite("{:.3g}")),
                "median step": view.first("ordinary", view.finite("{:.3g}")),
                "stored ms": view.first("stored_ms", lambda times: view.milli(median(times))),
                "plain ms": view.first("plain_ms", lambda times: view.milli(median(times))),
            },
        )

    def panels(self) -> tuple[Panel, Panel]:
        slowest = {"{}": _slowest_first("stored_ms"), "{}, plain": _slowest_first("plain_ms")}
        return (
            Panel(
                "state over plain", "mean time of a step over plain", {"{}": view.xy("bytes", "ratio")}, band=(1.0, 1.0)
            ),
            Panel("steps, the slowest first", "time over the median plain step", slowest, band=(1.0, 1.0)),
        )

    def recommendations(self) -> Sequence[Recommendation]:
        return [
            Recommendation(
                lambda row: str(row["candidate"]), lambda rows: fmean(row["ratio"] for row in rows),
                "{:.2f} times the time of a step".format, error=lambda rows: float(rows[0]["bytes"]),
                error_name="part of the state",
            )
        ]  # fmt: skip


def _slowest_first(name: str) -> Any:
    """Return a function from rows to the points of a line: one point (place, time) for each step.

    The slowest step has place 1, so that refreshes are visible. The time is divided by the median time of a step with
    unquantized state.
    """

    def points(rows: Sequence[Row]) -> list[tuple[float, float]]:
        unit = median(rows[0]["plain_ms"])
        return [(rank, ms / unit) for rank, ms in enumerate(sorted(rows[0][name], reverse=True), start=1)]

    return points
