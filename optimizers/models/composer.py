"""Composition of an optimizer from a recipe and a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..checkpoint.replaced_params import ModelLink
from ..optimizer import Optimizer
from ..recipe.loading import RecipeSource
from ..recipe.overrides import Overrides
from ..recipe.param_names import canonical_names
from ..recipe.routing import DescribedParameters, ParamInfo, describe_model
from .evaluation import watch_evaluation
from .layer_grams import INPUT_GRAM, OUTPUT_GRAM, watch_inputs, watch_output_gradients
from .lint import warn_of_faults
from .logits import watch_logits

_WATCHES: Mapping[str, Callable[[Optimizer, nn.Module], object]] = {
    INPUT_GRAM: watch_inputs,
    OUTPUT_GRAM: watch_output_gradients,
    "max_logit": watch_logits,
}
"""Signals that come from hooks in a model, and what registers the hooks."""


def compose(  # noqa: PLR0913  its arguments after the model are options
    recipe: RecipeSource,
    model: nn.Module | Iterable[Any] | DescribedParameters,
    lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    *,
    overrides: Overrides = (),
    checked: bool = False,
    steps: int | None = None,
    silence: Iterable[str] = (),
) -> Optimizer:
    """The optimizer of a recipe for a model, or for named parameters or groups.

    model: a model, of which routes see module types, tied weights and output heads; or named parameters or groups, of
        which routes see names and shapes only; or what `grouped` or `submodel` return. Frozen parameters take no state
        until they are thawed. From a model come also the signals `activation_gram`, `output_gradient_gram` and
        `max_logit`, where the recipe asks for them, and a warning if it is evaluated at another iterate than the one
        that the recipe averages.
    lr, weight_decay: default the recipe's.
    overrides: changes of the recipe, as a mapping {dotted path: value} or as strings "path=value".
    checked: check at every step that each stage keeps its contract, and raise a `ContractError` that names it; slower.
    steps: length of the run, by which schedules are checked; None: it is not known.
    silence: ids of warnings that are not given. A warning ends with its id, as `[storage-unused]`.
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
    warn_of_faults(optimizer, steps, silence)
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
