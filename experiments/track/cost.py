"""The counted cost of a step: the least time that a model and its optimizer take on a GPU whose rates are known (the
card).

A step takes t = 6 N T / m + max(F / f + H / m, B / b).

- N: parameters of the model. T: tokens of a step on the card. 6 N T: operations of its forward and backward pass.
- F: operations of the optimizer in float32. H: operations of stages with `precision: bfloat16`. `eigengraft plan`
  counts both. The operations of a refresh are divided by its interval.
- B: bytes that the optimizer reads or writes: 3 for each byte of parameters (gradient, and parameter twice) and 2 for
  each byte of state.
- m, f, b: rates of the card, for products in bfloat16, for products in float32, and for bytes.

t is a lower bound. Real steps take longer, because of launches, kernels that wait for memory, and decompositions, which
run far below the rate of products. Nothing is run to compute t.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from eigengraft.component import Component
from eigengraft.optimizers.plan.plan import known, plan
from eigengraft.optimizers.recipe.loading import load_recipe
from eigengraft.optimizers.recipe.recipe import Recipe
from eigengraft.optimizers.recipe.routing import ParamInfo
from eigengraft.preconditioners import Stage

from ..tasks.model_shapes import MODELS

TOKENS = 65_536
"""Tokens of a step on one card: the share of one of 8 cards in the batch of modded-nanogpt's track 3."""
COUNTED_MODELS = {"gpt2": "GPT-2 small", "llama-1b": "Llama 3.2 1B"}
"""Models for which the time of a step is computed: name in `MODELS` -> name in tables."""


class Card(NamedTuple):
    """The rates of a card.

    name: name in tables.
    bfloat16: operations per second of a model's passes and of products in bfloat16.
    float32: operations per second of products in float32.
    traffic: bytes per second that are read and written.
    """

    name: str
    bfloat16: float
    float32: float
    traffic: float

    def milliseconds(self, full: float, half: float, traffic: float) -> float:
        """Return the least milliseconds of a step on this card: the time of its arithmetic or the time of its memory
        traffic, whichever is longer.

        full, half: floating-point operations in float32 and in bfloat16.
        traffic: bytes that are read and written.
        """
        return 1e3 * max(full / self.float32 + half / self.bfloat16, traffic / self.traffic)


H100 = Card("H100 SXM", bfloat16=0.4 * 989e12, float32=67e12, traffic=3.35e12)
"""Rates of NVIDIA's data sheet. The rate in bfloat16 is multiplied by 0.4, the share that passes of models reach."""


def step_ms(recipe: Mapping[str, Any] | str, model: str) -> float:
    """Return the milliseconds of one step of a model with a recipe on an H100, computed from its operations and bytes.

    model: name of the model in `MODELS`.
    """
    return 6e3 * _numel(model) * TOKENS / H100.bfloat16 + optimizer_ms(recipe, model)


def optimizer_ms(recipe: Mapping[str, Any] | str, model: str) -> float:
    """Return the milliseconds of the optimizer in a step of a float32 model on an H100, computed from operations and
    bytes.

    model: name of the model in `MODELS`.
    """
    return H100.milliseconds(*_work(json.dumps(recipe), model))


def state_bytes(recipe: Mapping[str, Any] | str, model: str) -> float:
    """Return the bytes of state per parameter of a float32 model."""
    numel = _numel(model)
    return (_work(json.dumps(recipe), model)[2] - 12.0 * numel) / (2.0 * numel)


def step_costs(recipes: Mapping[str, Mapping[str, Any]], model: str) -> dict[str, float]:
    """Return the time of a step with each recipe, divided by that with the shipped recipe adamw.

    Times are computed from counted operations and bytes (`step_ms`), not measured.
    """
    unit = step_ms("adamw", model)
    return {name: step_ms(recipe, model) / unit for name, recipe in recipes.items()}


def _numel(model: str) -> int:
    return sum(math.prod(shape) for _, shape in MODELS[model].shapes())


@cache
def _work(declared: str, model: str) -> tuple[float, float, float]:
    """Return operations in float32, operations in bfloat16, and bytes that the optimizer reads and writes in a step.

    declared: the recipe as JSON.
    model: name of the model in `MODELS`.
    """
    recipe, infos = load_recipe(json.loads(declared)), list(known(MODELS[model].shapes()))
    found, half = plan(recipe, infos, (1,), "ddp"), _half_operations(recipe, infos)
    return float(found.work[0]) - half, half, 12.0 * _numel(model) + 2.0 * float(found.state[0])


def _half_operations(recipe: Recipe, infos: Sequence[ParamInfo]) -> float:
    """Return the operations of all stages that have a component with `precision: bfloat16`, without refreshes."""
    total = 0.0
    for info in infos:
        path, _ = recipe.route(info)
        rule = recipe.rules()[path]
        half = [stage for _, stage in rule.stages() if _in_bfloat16(stage)]
        for grid in rule.blocking.grids(info.shape, recipe.view_of(info).matrices) if half else ():
            total += len(grid.keys) * sum(stage.work(grid.shape) for stage in half)
    return total


def _in_bfloat16(stage: Stage) -> bool:
    """Return True if a component of the stage computes products in bfloat16. Stages inside this stage do not count."""
    parts = [value for _, value in stage if isinstance(value, Component) and not isinstance(value, Stage)]
    return any(getattr(part, "precision", None) == "bfloat16" for part in (stage, *parts))
