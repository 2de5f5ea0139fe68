"""Composition of an optimizer from a recipe and a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..checkpoint.replaced_params import ModelLink
from ..optimizer import Optimizer
from ..recipe.loading import RecipeSource
from ..recipe.overrides import Overrides
from ..recipe.param_names import canonical_names
from ..recipe.routing import DescribedParameters, ParamInfo, describe_model
from .input_grams import watch_inputs
from .logits import watch_logits


def compose(
    recipe: RecipeSource,
    model: nn.Module | Iterable[Any] | DescribedParameters,
    lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    *,
    overrides: Overrides = (),
    checked: bool = False,
) -> Optimizer:
    """The optimizer of a recipe for a model, or for named parameters or groups.

    model: a model, of which routes see module types, tied weights and output heads; or named parameters or groups, of
        which routes see names and shapes only; or a `submodel`. Frozen parameters take no state until they are thawed.
        From a model come also the signals `activation_gram` and `max_logit`, where the recipe asks for them.
    lr, weight_decay: default the recipe's.
    overrides: changes of the recipe, as a mapping {dotted path: value} or as strings "path=value".
    checked: check at every step that each stage keeps its contract, and raise a `ContractError` that names it; slower.
    """
    if not isinstance(model, nn.Module):
        return Optimizer(model, recipe, lr, weight_decay, overrides=overrides, checked=checked)
    named = list(model.named_parameters())
    for name, parameter in named:
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name}: a parameter with a shape is required, got a lazy one; call the model once before"
            )
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError("compose: a model with trainable parameters is required, got none")
    described = DescribedParameters(named, describe_model(model))
    optimizer = Optimizer(described, recipe, lr, weight_decay, overrides=overrides, checked=checked)
    optimizer.register_step_pre_hook(ModelLink(model).check)
    watch_inputs(optimizer, model)
    watch_logits(optimizer, model)
    return optimizer


def submodel(model: nn.Module, full: nn.Module) -> DescribedParameters:
    """Some layers of a model as `compose` takes them, for pipeline stages: `compose("soap", submodel(layers, full))`.

    Their optimizer does what one optimizer of the full model would do with these parameters, whose routes and refreshes
    depend on all of them.

    full: the model that the layers are of, under the same names. Its values play no role, so that it may be on the meta
        device. Raises ValueError for a parameter that it does not have.
    """
    known = {info.name: info for info in describe_model(full).values()}
    named, own = list(model.named_parameters()), dict[int, ParamInfo]()
    for name, (_, parameter) in zip(canonical_names([name for name, _ in named], model), named, strict=True):
        info, shape = known.pop(name, None), tuple(parameter.shape)
        if info is None or info.shape != shape:
            got = "none of that name" if info is None else f"one of shape {info.shape}"
            raise ValueError(f"submodel: {name}: a parameter of shape {shape} in `full` is required, got {got}")
        own[id(parameter)] = info
    return DescribedParameters(named, own, tuple(known.values()))
