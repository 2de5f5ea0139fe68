"""torchtitan: a container of optimizers in which a param group may name a recipe as its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer as TorchOptimizer
from torchtitan.components.optimizer import OptimizersContainer

from eigengraft import compose, shipped_recipes
from eigengraft.optimizers import grouped

_CHOICES = ("fused", "foreach")
"""Options of a param group with which torchtitan chooses an implementation of an optimizer. They are dropped,
because recipes have no such options.
"""


class RecipesContainer(OptimizersContainer):
    """torchtitan's container of optimizers, in which `optimizer_name` of a param group may be a shipped recipe.

    `RecipesContainer.Config(param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="soap", optimizer_kwargs={"lr":
    3e-3})])`

    Pass changes of a recipe as `overrides` in `optimizer_factory_kwargs_by_name`, under the name of the recipe. If
    torchtitan splits a model into parts, groups with the same recipe become one optimizer for each part. The routes of
    the recipe, which choose an update for each parameter, are then applied to each part separately.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The configuration of torchtitan's container, without changes."""

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., TorchOptimizer]:
        if name not in shipped_recipes():
            factory: Callable[..., TorchOptimizer] = OptimizersContainer._resolve_optimizer_factory(name)
            return factory

        def optimizer(groups: list[dict[str, Any]], **options: Any) -> TorchOptimizer:
            kept = [{key: value for key, value in group.items() if key not in _CHOICES} for group in groups]
            first = kept[0]["params"][0]
            part = next(part for part in self.model_parts if any(first is other for other in part.parameters()))
            return compose(name, grouped(part, kept), **options)

        return optimizer
