"""Composition of an optimizer from a recipe and a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .checkpoint.replaced_params import ModelLink
from .optimizer import Optimizer
from .recipe.loading import RecipeSource
from .recipe.overrides import Overrides
from .recipe.routing import DescribedParameters, describe_model


def compose(
    recipe: RecipeSource,
    model: nn.Module | Iterable[Any],
    lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    *,
    overrides: Overrides = (),
    checked: bool = False,
) -> Optimizer:
    """The optimizer of a recipe for a model, or for named parameters or groups.

    model: a model, of which routes see module types, tied weights and output heads; or named parameters or groups, of
        which routes see names and shapes only. Frozen parameters take no state until they are thawed.
    lr, weight_decay: default the recipe's.
    overrides: changes of the recipe, as a mapping {dotted path: value} or as strings "path=value".
    checked: check at every step that each stage keeps its contract, and raise a `ContractError` that names it; slower.
    """
    if not isinstance(model, nn.Module):
        return Optimizer(model, recipe, lr, weight_decay, overrides=overrides, checked=checked)
    named = list(model.named_parameters())
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError("compose: a model with trainable parameters is required, got none")
    described = DescribedParameters(named, describe_model(model))
    optimizer = Optimizer(described, recipe, lr, weight_decay, overrides=overrides, checked=checked)
    optimizer.register_step_pre_hook(ModelLink(model).check)
    return optimizer
