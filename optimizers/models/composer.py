"""Composition of an optimizer from a recipe and a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from eigengraft.errors import warn_user

from ..optimizer import Optimizer
from ..recipe.loading import RecipeSource, load_recipe
from ..recipe.overrides import Overrides
from ..recipe.routing import DescribedParameters, ParamInfo, canonical_names, describe_model
from .gradient_sums import VARIANCE, watch_gradient_variance
from .layer_grams import INPUT_GRAM, OUTPUT_GRAM, watch_inputs, watch_output_gradients
from .lint import warn_of_faults
from .logits import watch_logits

_WATCHES: Mapping[str, Callable[[Optimizer, nn.Module], object]] = {
    INPUT_GRAM: watch_inputs,
    OUTPUT_GRAM: watch_output_gradients,
    "max_logit": watch_logits,
}
"""Functions that register hooks in a model, by name of the signal that the hooks collect."""


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
    **options: Any,
) -> Optimizer:
    """Compose the optimizer of a recipe for a model, or for named parameters or groups.

    With a model, routes can match module types, tied weights and output heads. The optimizer then also provides the
    signals `activation_gram`, `output_gradient_gram` and `max_logit` if the recipe requests them. If the recipe
    averages iterates, an evaluation of the model without `optimizer.eval()` causes a warning. With named parameters,
    routes match names and shapes only. Frozen parameters have no state until they are thawed.

    Args:
        recipe: name of a shipped recipe, path of a YAML file, mapping, list of stages, or `Recipe`.
        model: an `nn.Module`; named parameters or groups; or the result of `grouped` or `submodel`.
        lr: learning rate; None means the recipe's.
        weight_decay: weight decay; None means the recipe's.
        overrides: changes of the recipe, as a mapping {dotted path: value} or as strings "path=value".
        checked: True to check at every step that each stage keeps its contract, which is slower.
        steps: number of steps of the run. It is the `total_steps` of a recipe that needs one and has none, for
            schedules by `fraction`, and is used by warnings about schedules. None: it is unknown, and a recipe with
            `published_steps` assumes these.
        silence: ids of warnings to suppress. A warning ends with its id, such as `[storage-unused]`.
        options: options of torch's optimizers, as `Optimizer` accepts them.

    Raises:
        RecipeError: the recipe is invalid, or the model does not satisfy a bound in the recipe's `expect`.
        TypeError: an option is unknown. The message names the override that has the meaning of the option.
        ValueError: the recipe does not fit the parameters.
    """
    if isinstance(recipe, nn.Module):
        raise TypeError(
            f"compose: got a module in place of the recipe, and {model!r:.60} in place of the model; the order is "
            "compose(recipe, model), and lr=... is a keyword"
        )
    described = grouped(model, None) if isinstance(model, nn.Module) else model
    names_only = not isinstance(described, DescribedParameters)
    described = DescribedParameters.of(described)
    if steps is not None:
        recipe, overrides = load_recipe(recipe, overrides).for_run(steps), ()
    optimizer = Optimizer(described, recipe, lr, weight_decay, overrides=overrides, checked=checked, **options)
    asking = optimizer.param_sets.signals.asking
    if VARIANCE in asking and all(param_set.rank_group is None for param_set in optimizer.param_sets):
        watch_gradient_variance(optimizer)
    if described.model is not None:
        for signal, watch in _WATCHES.items():
            if signal in asking:
                watch(optimizer, described.model)
        compiled = isinstance(described.model, torch.jit.ScriptModule)  # it accepts no hooks
        if optimizer.recipe.averaging is not None and not compiled:
            hook = EvaluationHook(optimizer)
            hook.handle = described.model.register_forward_pre_hook(hook)
            weakref.finalize(optimizer, hook.handle.remove)
    warn_of_faults(optimizer, steps, silence, names_only=names_only)
    return optimizer


def grouped(model: nn.Module, groups: Iterable[Mapping[str, Any]] | None) -> DescribedParameters:
    """Describe param groups of a model for `compose`: `compose("soap", grouped(model, groups))`.

    `compose` then knows the layers of the parameters, as if it were given the model itself, and not only their names.

    Args:
        model: the model that has the parameters.
        groups: mappings with `params` (tensors or (name, tensor) pairs), optional `lr` and `weight_decay`, and any keys
            of the user's own; None for one group of all parameters.

    `compose` warns of trainable parameters that are in no group (`parameters-left`).

    Raises:
        TypeError: the arguments are not a module and mappings with `params`.
        ValueError: a parameter of a group is not in the model, or the model has no trainable parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"grouped: a module is required first, got {type(model).__name__}; call grouped(model, groups)")
    named = list(model.named_parameters())
    for name, parameter in named:
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name}: the parameter is lazy and has no shape yet; call the model once before this call"
            )
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError("compose: the model has no trainable parameters")
    infos = describe_model(model)
    if groups is None:
        return DescribedParameters(named, infos, model=model)
    names, found = {id(parameter): name for name, parameter in named}, []
    group: Any
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            got = type(group).__name__ + (f" with the keys {[*group]}" if isinstance(group, Mapping) else "")
            raise TypeError(
                f"grouped: group {index}: a mapping with 'params' is required, such as "
                f"{{'params': [...], 'lr': 0.01}}, got {got}"
            )
        given = [group["params"]] if isinstance(group["params"], (Tensor, str)) else group["params"]
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in given]
        for place, own in enumerate(tensors):
            if not isinstance(own, Tensor):
                raise TypeError(
                    f"grouped: group {index}: a tensor or a (name, tensor) pair is required at position {place}, "
                    f"got {own!r:.60}"
                )
            if id(own) not in names:
                raise ValueError(
                    f"grouped: group {index}: the tensor of shape {tuple(own.shape)} at position {place} is not "
                    "a parameter of the model"
                )
        rest = {key: value for key, value in group.items() if key != "param_names"}
        found.append({**rest, "params": [(names[id(own)], own) for own in tensors]})
    return DescribedParameters(found, infos, model=model)


def submodel(model: nn.Module, full: nn.Module) -> DescribedParameters:
    """Describe some layers of a model for `compose`, for pipeline stages: `compose("soap", submodel(layers, full))`.

    The optimizer updates the layers exactly as one optimizer of the full model would, because routes and the steps of
    refreshes depend on all parameters of the full model. `compose` refuses recipes that need a sum over all parameters,
    such as a norm, unless the layers are the full model.

    Args:
        model: the layers that this optimizer updates.
        full: the model that contains the layers under the same names. `full` may be on the meta device, because its
            values are not read.

    Raises:
        ValueError: `full` lacks a parameter of the layers, or has it in another shape.
    """
    known = {info.name: info for info in describe_model(full).values()}
    named, own = list(model.named_parameters()), dict[int, ParamInfo]()
    for name, (_, parameter) in zip(canonical_names([name for name, _ in named], model), named, strict=True):
        info, shape = known.pop(name, None), tuple(parameter.shape)
        if info is None or info.shape != shape:
            found = "no such parameter" if info is None else f"a parameter `{name}` of shape {info.shape}, not {shape}"
            raise ValueError(f"submodel: {name}: `full` has {found}; `full` must contain all layers of `model`")
        own[id(parameter)] = info
    return DescribedParameters(named, own, tuple(known.values()))


class EvaluationHook:
    """A forward-pre-hook of a model that warns about an evaluation without `optimizer.eval()`.

    An evaluation is a forward in evaluation mode and without gradients, after a step. The hook removes itself after the
    warning, or when the optimizer is deleted. Copies and pickles of the hook do nothing.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self.handle: Any = None

    def __reduce__(self) -> tuple[type[EvaluationHook], tuple[()]]:
        return EvaluationHook, ()

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or model.training or torch.is_grad_enabled():
            return
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None and optimizer.iterate == "train":
            if not any(bool(param_set.step_counts.any()) for param_set in optimizer.param_sets):
                return
            kind = getattr(optimizer.recipe.averaging, "kind", "")
            warn_user(
                f"the recipe averages iterates ({kind}), but the model is evaluated with the iterate of training; call "
                "optimizer.eval() before an evaluation and optimizer.train() after it"
            )
        elif optimizer is not None:
            return
        if self.handle is not None:
            self.handle.remove()
