"""Composition of an optimizer from a recipe and a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .optimizer import Optimizer
from .recipe.loading import Source
from .recipe.overrides import Overrides
from .recipe.routing import describe_model


def compose(
    recipe: Source,
    model: nn.Module | Iterable[Any],
    lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    *,
    overrides: Overrides = (),
) -> Optimizer:
    """The optimizer of a recipe for a model, or for named parameters or groups.

    model: a model, of which routes see module types, tied weights and output heads, and whose frozen parameters are
        left out; or named parameters or groups, of which routes see names and shapes only.
    lr, weight_decay: default the recipe's.
    overrides: changes of the recipe, as a mapping {dotted path: value} or as strings "path=value".
    """
    if not isinstance(model, nn.Module):
        return Optimizer(model, recipe, lr, weight_decay, overrides=overrides)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError("compose: a model with trainable parameters is required, got none")
    return Optimizer(named, recipe, lr, weight_decay, overrides=overrides, infos=describe_model(model))
