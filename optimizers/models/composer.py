"""Composition of an optimizer from a recipe and a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from eigengraft.errors import warn_user

from ..checkpoint.replaced_params import ModelLink
from ..optimizer import Optimizer
from ..recipe.loading import RecipeSource
from ..recipe.overrides import Overrides
from ..recipe.param_names import canonical_names
from ..recipe.routing import DescribedParameters, ParamInfo, describe_model
from ..state.shown_state import own_state
from .evaluation import watch_evaluation
from .layer_grams import INPUT_GRAM, OUTPUT_GRAM, watch_inputs, watch_output_gradients
from .logits import watch_logits

_WATCHES: Mapping[str, Callable[[Optimizer, nn.Module], object]] = {
    INPUT_GRAM: watch_inputs,
    OUTPUT_GRAM: watch_output_gradients,
    "max_logit": watch_logits,
}
"""Signals that come from hooks in a model, and what registers the hooks."""
_MOST = 256
"""Bytes of state for each entry above which a parameter is said to be costly; Adam holds 8, SOAP on squares 24."""


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
        which routes see names and shapes only; or what `grouped` or `submodel` return. Frozen parameters take no state
        until they are thawed. From a model come also the signals `activation_gram`, `output_gradient_gram` and
        `max_logit`, where the recipe asks for them, and a warning if it is evaluated at another iterate than the one
        that the recipe averages. A warning names the last layer where the recipe sends heads elsewhere, no head is
        found and the last layer may be one.
    lr, weight_decay: default the recipe's.
    overrides: changes of the recipe, as a mapping {dotted path: value} or as strings "path=value".
    checked: check at every step that each stage keeps its contract, and raise a `ContractError` that names it; slower.
    """
    described = grouped(model, None) if isinstance(model, nn.Module) else model
    optimizer = Optimizer(described, recipe, lr, weight_decay, overrides=overrides, checked=checked)
    if isinstance(described, DescribedParameters) and described.model is not None:
        optimizer.register_step_pre_hook(ModelLink(described.model, optimizer.param_groups).check)
        for signal, watch in _WATCHES.items():
            if signal in optimizer.param_sets.signals.listeners.asking:
                watch(optimizer, described.model)
        if optimizer.recipe.averaging is not None:
            watch_evaluation(optimizer, described.model)
        _warn_of_unclear_head(optimizer)
    _warn_of_costs(optimizer)
    return optimizer


def grouped(model: nn.Module, groups: Iterable[Mapping[str, Any]] | None) -> DescribedParameters:
    """Param groups of a model as `compose` takes them: `compose("soap", grouped(model, groups))`.

    Routes see module types, tied weights and output heads, and steps take signals, as with the model itself.

    groups: mappings with `params`, tensors or (name, tensor) pairs, and their `lr`, `weight_decay` and keys of a user's
        own; None: one group of all parameters. Raises ValueError for a parameter that the model does not have.
    """
    named = list(model.named_parameters())
    _require_trainable(named)
    infos = describe_model(model)
    if groups is None:
        return DescribedParameters(named, infos, model=model)
    names, found = {id(parameter): name for name, parameter in named}, []
    for index, group in enumerate(groups):
        given = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in given]
        for place, own in enumerate(tensors):
            if id(own) not in names:
                what = f"parameters of the model are required, got another of shape {tuple(own.shape)} at {place}"
                raise ValueError(f"grouped: group {index}: {what}")
        rest = {key: value for key, value in group.items() if key != "param_names"}
        found.append({**rest, "params": [(names[id(own)], own) for own in tensors]})
    return DescribedParameters(found, infos, model=model)


def _require_trainable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a parameter without a shape, or if all are frozen."""
    for name, parameter in named:
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name}: a parameter with a shape is required, got a lazy one; call the model once before"
            )
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError("compose: a model with trainable parameters is required, got none")


def _warn_of_costs(optimizer: Optimizer) -> None:
    """Say once which parameters hold state out of proportion, as factors of long axes of thin matrices are."""
    sets, costly = optimizer.param_sets, list[tuple[float, str, tuple[int, ...]]]()
    labels = chain.from_iterable(sets.labels(index) for index in range(len(sets.parameters)))
    for name, parameter in zip(labels, chain(*sets.parameters), strict=True):
        size = sum(stored.nbytes for stored in own_state(optimizer.state.get(parameter)).values())
        if size > max(2**20, _MOST * parameter.numel()):
            costly.append((size / parameter.numel(), name, tuple(parameter.shape)))
    if costly:
        each, name, shape = max(costly)
        more = f", and {len(costly) - 1} others like it" if len(costly) > 1 else ""
        warn_user(
            f"{name}: {each:.0f} bytes of state for each entry of {list(shape)}{more}; `axes: {{max_skew: 4}}` of a "
            "statistic leaves axes so long without a factor, and a route sends parameters to another update"
        )


def _warn_of_unclear_head(optimizer: Optimizer) -> None:
    """Warn if the recipe sends heads elsewhere, and the last layer goes to its own update though it may be a head.

    Nothing is said of models whose head is found, frozen or tied, of adapters, and of stacks of equal blocks.
    """
    recipe, sets = optimizer.recipe, optimizer.param_sets
    rows = [row for own, infos in zip(sets.parameters, sets.infos, strict=True) for row in zip(own, infos, strict=True)]
    if not any("head" in route.match.role for route in recipe.routes) or any(info.facts.factor for _, info in rows):
        return
    for parameter, info in rows:
        if info.unclear and parameter.requires_grad and not recipe.route(info)[0]:
            warn_user(
                f"{info.name}: the last layer goes to the recipe's own update with the hidden layers, because no "
                "output head is found and other layers may consume its outputs; if it is the head, return its module "
                "from a method `get_output_embeddings()` of the model, or put a route with "
                f"`match: {{name: '^{re.escape(info.name or '')}$'}}` before 'default'"
            )


def submodel(model: nn.Module, full: nn.Module) -> DescribedParameters:
    """Some layers of a model as `compose` takes them, for pipeline stages: `compose("soap", submodel(layers, full))`.

    Their optimizer does what one optimizer of the full model would do with these parameters, whose routes and refreshes
    depend on all of them. `compose` raises ValueError for a recipe that takes a sum over all parameters, such as their
    norm, unless the layers are the full model.

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
