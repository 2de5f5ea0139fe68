"""Checks of param groups: options, keys, values, and what routes must be told."""

from __future__ import annotations

import difflib
import math
from collections.abc import Container, Iterable, Mapping, MutableMapping
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigengraft.component import plain
from eigengraft.errors import warn_user

from .recipe.recipe import Recipe
from .recipe.routing import ParamInfo, describe_named, describe_unnamed
from .write.closures.line_search import SCALE
from .write.write import Hyper

_KEYS = ("params", "param_names", "lr", "weight_decay", "name", "initial_lr", "peak_lr", "recipe", "iterate", SCALE)
_MEANT = ("params", "param_names", "lr", "weight_decay", "peak_lr")
"""Keys that a user may misspell."""
_NUMBERS = ("lr", "weight_decay", "peak_lr", "initial_lr", "max_lr")
_OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay", "decay": "weight_decay"}
_IGNORED = ("foreach", "fused", "capturable")
_OFF = {
    "maximize": "minimize the negative of the loss",
    "differentiable": "no gradient passes through a step",
}
"""Options of torch's optimizers that a step has no other way for: what may be done about each."""
_OF_WRAPPERS = frozenset({"rho", "alpha"})
"""Options of torch's Adadelta, RMSprop and ASGD that are also keys which wrappers of optimizers (SAM, LookSAM) put into
the groups of the optimizer that they wrap."""
_TAKEN = frozenset((*_KEYS, *_IGNORED, *_OFF))
WHOLE_SHARDS = "use torch.distributed.fsdp.fully_shard (FSDP2)"
"""What to do instead where a host cuts flat pieces."""


def check_options(given: Mapping[str, Any], who: str) -> None:
    """Says once what has no effect, among options of torch's optimizers; raises for one that would have.

    `TypeError` for any other option, `ValueError` for one that must be off.
    """
    for key, value in given.items():
        if key not in (*_IGNORED, *_OFF):
            raise TypeError(f"{who}: lr and weight_decay are the options, got '{key}'; the recipe says the rest")
        if key in _OFF and value:
            raise ValueError(f"{who}: {key}=False is required, got {value!r}; {_OFF[key]}")
    asked = [key for key in _IGNORED if given.get(key)]
    if asked:
        warn_user(f"{who}: {', '.join(asked)}: no effect, all blocks of a shape are computed at once")


def own_keys(group: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """A param group without options of torch's optimizers that have no effect. Keys of the user's stay.

    recipe: what the optimizer writes into its groups. Raises ValueError for another recipe there, and for a key that
    would have an effect elsewhere: an option of torch's optimizers, a field of recipes, a key that is misspelt.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"param group: a mapping with 'params' is required, got a {type(group).__name__}")
    options = {key: group[key] for key in (*_IGNORED, *_OFF) if key in group}
    check_options(options, "param group")
    for key in group:
        if key in _KEYS or key in options:
            continue
        near = difflib.get_close_matches(key, _MEANT, n=1, cutoff=0.75)
        meant = _OTHER_NAMES.get(key) or (near[0] if near and near[0] not in key else "")  # weight_decay_mult is a key
        if meant or key in _elsewhere():
            hint = f", did you mean '{meant}'?" if meant else ""
            raise ValueError(
                f"param group: the keys are params, lr and weight_decay, got '{key}'{hint}; the recipe says the rest"
            )
        warn_user(f"param group: '{key}' stays in the group, and has no effect on steps")
    if "params" not in group:
        raise ValueError(f"param group: a mapping with 'params' is required, got the keys {[*group]}")
    if group.get("recipe", recipe) != recipe:
        raise ValueError(
            "param group: one recipe for all groups is required (its `routes` tell parameters apart), got 'recipe'"
        )
    return {key: plain(value) if key in _NUMBERS else value for key, value in group.items() if key not in options}


def warn_of_options(groups: Iterable[Mapping[str, Any]], recipe: Recipe) -> None:
    """Warns of what was put into a group by hand and belongs to the recipe; other keys are the user's.

    That is an option of torch's optimizers (`group["momentum"] = 0.5`), a field of recipes or one of a stage of this
    recipe (`group["beta"] = 0.5`), which the warning has the path of.
    """
    for group in groups:
        for key in sorted(group.keys() - _TAKEN):
            paths = _paths_of(key, recipe)
            if paths or key in _elsewhere():
                there = f"{', '.join(paths)} of the recipe says it" if paths else "the recipe says it"
                warn_user(f"param group: '{key}' has no effect on steps; {there}")


def _paths_of(key: str, recipe: Recipe) -> list[str]:
    """Dotted paths of the stages' fields of this name."""
    stages = [found for at, rule in recipe.updates().items() for found in rule.stages(at)]
    return [f"{path}.{key}" for path, stage in stages if key in type(stage).model_fields]


@cache
def _elsewhere() -> frozenset[str]:
    """Options of torch's optimizers and fields of recipes, but for names that wrappers and schedulers use."""
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type)]
    options = [key for cls in classes if issubclass(cls, torch.optim.Optimizer) for key in signature(cls).parameters]
    return (frozenset(options) - _OF_WRAPPERS) | (Recipe.model_fields.keys() - {"lr_scale"})


def check_values(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a learning rate, weight decay or parameter that cannot be used.

    Integer parameters, as quantized base weights are, can have no gradient: they pass and stay frozen.
    """
    for key in ("lr", "weight_decay", *(["peak_lr"] if "peak_lr" in group else [])):
        value = number(group, key)
        if not math.isfinite(value):
            raise ValueError(f"{key}: a finite number >= 0 is required, got {float(value)}")
    names, first = group.get("param_names", ()), dict[int, str]()
    for position, parameter in enumerate(group["params"]):
        name = names[position] if names else f"parameter {position}"
        if parameter.is_inference():
            raise ValueError(
                f"params: {name}: a parameter made outside of torch.inference_mode is required, got one made inside, "
                "which has no gradient and cannot be changed outside; make or load the model before entering it"
            )
        if id(parameter) in first:
            raise ValueError(
                f"params: each parameter once is required, got {first[id(parameter)]} again as {name}; "
                "model.named_parameters() lists a shared parameter once"
            )
        first[id(parameter)] = name


def first_peak(group: Mapping[str, Any]) -> float:
    """The largest learning rate that a new group and the schedulers before it speak of."""
    return max(float(group[key]) for key in ("lr", "initial_lr", "max_lr") if _is_number(group.get(key)))


def read_hyper(group: MutableMapping[str, Any], relative: bool) -> Hyper:
    """Values of a param group at one step. Rates of numpy become Python's, so that weights_only reads a checkpoint.

    relative: whether the recipe depends on the peak of the learning rate, which follows it then.
    """
    for key in ("lr", "weight_decay"):
        if isinstance(group.get(key), np.number):
            group[key] = group[key].item()
    lr = number(group, "lr")
    peak = peak_at(group, lr) if relative else float(group["peak_lr"])
    return Hyper(lr, peak, float(number(group, "weight_decay")))


def peak_at(group: Mapping[str, Any], lr: float | Tensor) -> float:
    """The peak of the group's learning rate in a step with `lr`.

    It is the group's `peak_lr`, its `max_lr`, which OneCycleLR writes into groups, or an `lr` that is larger by more
    than rounding. An lr on a device is not read.
    """
    known = float(group["peak_lr"])
    peak = max(known, float(group["max_lr"])) if _is_number(group.get("max_lr")) else known
    return float(lr) if isinstance(lr, float) and lr > peak * (1 + 1e-6) else peak


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def flat_piece(parameter: Tensor) -> str:
    """What a tensor is that FSDP1 or DeepSpeed's ZeRO has in place of matrices, and the remedy; empty: it is none.

    Both put marks on their tensors: torch `_fsdp_flattened`, DeepSpeed's stage 3 `ds_id` and, on parameters of the
    model, `ds_shape`, whose values are on other ranks most of the time.
    """
    if getattr(parameter, "_fsdp_flattened", False):
        return f"a flat one of FullyShardedDataParallel (FSDP1); {WHOLE_SHARDS}"
    if hasattr(parameter, "ds_shape"):
        return f"one of shape {tuple(parameter.ds_shape)} in flat pieces of DeepSpeed (ZeRO stage 3); {WHOLE_SHARDS}"
    return f"a flat piece of DeepSpeed (ZeRO stage 3); {WHOLE_SHARDS}" if hasattr(parameter, "ds_id") else ""


def group_infos(
    group: Mapping[str, Any], known: Mapping[int, ParamInfo] | None, taken: Container[str]
) -> list[ParamInfo]:
    """Descriptions of a group's parameters; known: by id, what was found before; taken: names of other parameters."""
    if known is None:
        known = describe_named(list(zip(group.get("param_names", ()), group["params"], strict=False)), taken)
    return [known.get(id(parameter)) or describe_unnamed(parameter) for parameter in group["params"]]


def require_facts(recipe: Recipe, infos: Iterable[ParamInfo]) -> None:
    """Raises ValueError for a parameter with two axes or more of which routes ask what nobody has told.

    What has fewer axes is a vector or a scalar under any name; a matrix may be an embedding, a head or neither.
    """
    matches = {route.name: route.match for route in recipe.routes}
    telling = [name for name, m in matches.items() if m.role or m.name or m.module or m.pair is not None]
    unknown = next((info for info in infos if info.name is None and not info.modules and len(info.shape) > 1), None)
    if telling and unknown is not None:
        raise ValueError(
            f"params: names are required, because routes.{telling[0]} of the recipe takes parameters by what they are, "
            f"got a parameter of shape {unknown.shape} without a name; pass the model to eigengraft.compose, or pass "
            "model.named_parameters(), or set `routes` (`[]` updates all parameters alike)"
        )


def number(group: Mapping[str, Any], key: str) -> float | Tensor:
    """The value of a group as a float; a tensor on a device is returned unread, so that the host never waits for it."""
    value = group.get(key)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{key}: a number or a tensor with one element is required, got shape {tuple(value.shape)}")
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor, np.number)):
        raise ValueError(f"{key}: a number is required, got {value!r}")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value
    if not float(value) >= 0:
        raise ValueError(f"{key}: a finite number >= 0 is required, got {float(value)}")
    return float(value)
