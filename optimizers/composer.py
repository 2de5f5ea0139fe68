"""From a recipe and a model to an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .optimizer import Optimizer
from .recipe.loading import Source
from .recipe.routing import describe_model


def compose(
    recipe: Source,
    model: nn.Module | Iterable[Any],
    lr: float | Tensor | None = None,
    weight_decay: float | None = None,
) -> Optimizer:
    """The optimizer of a recipe for a model, or for named parameters or groups.

    From a model, routes see module types, tied weights and output heads; frozen parameters are left out. From named
    parameters they see names and shapes only. lr, weight_decay: default the recipe's.
    """
    if not isinstance(model, nn.Module):
        return Optimizer(model, recipe, lr, weight_decay)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError("compose: a model with trainable parameters is required, got none")
    return Optimizer(named, recipe, lr, weight_decay, infos=describe_model(model))
