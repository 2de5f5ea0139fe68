"""Checks of param groups and their parameters: options, keys, values, and the requirements of a recipe's routes."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking import Blocking, Pairs
from eigengraft.component import plain
from eigengraft.errors import did_you_mean, warn_user
from eigengraft.numerics import fake_mode
from eigengraft.signals import PARTNER, asking

from .other_options import ON_PAGE, momentum_path, superfluous, translated
from .recipe.loading import load_recipe
from .recipe.recipe import Recipe, Route
from .recipe.routing import ParamInfo
from .write.closures import SCALE
from .write.write import number

_KEYS = (
    "params",
    "param_names",
    "lr",
    "weight_decay",
    "name",
    "initial_lr",
    "peak_lr",
    "recipe",
    "iterate",
    "spikes",
    SCALE,
)
_MEANT = ("params", "param_names", "lr", "weight_decay", "peak_lr")
"""Keys of a param group that a user writes. A key that is similar to one of these is reported as a misspelling."""
_NUMBERS = ("lr", "weight_decay", "peak_lr", "initial_lr", "max_lr")
_OPTIONS = ("lr", "weight_decay", "overrides", "checked", "steps", "silence")
"""Options of `compose`. `Optimizer` has all but the last two."""
_HOW = ("foreach", "fused", "capturable")
"""Options of torch's optimizers that choose how a step is computed."""
_OF_STAGES = ("betas", "momentum", "eps", "nesterov", "dampening")
"""Options of torch's optimizers whose values are fields of stages in a recipe."""
_OFF = {
    "amsgrad": "no stage keeps the largest second moment; leave the option out, or use the recipe 'adopt', which "
    "converges with any decay of second moments",
    "maximize": "minimize the negative of the loss",
    "differentiable": "no gradient passes through a step",
}
"""Options of torch's optimizers that are not supported, with the advice for each."""
_CYCLE = "[{'from': 0.95, 'to': 0.85, 'steps': 300}, {'from': 0.85, 'to': 0.95, 'steps': 700}]"
"""A schedule to show in an error: the momentum of OneCycleLR with default arguments in a run of 1000 steps."""
_OF_WRAPPERS = frozenset({"rho", "alpha"})
"""Options of torch's Adadelta, RMSprop and ASGD that are accepted as the user's own keys, because wrappers (SAM,
LookSAM) write keys of these names into the groups of the optimizer that they wrap."""
KNOWN_KEYS = frozenset((*_KEYS, *_HOW, *_OFF))
"""Keys of a param group for which `warn_of_options` never warns."""
WHOLE_SHARDS = "use torch.distributed.fsdp.fully_shard (FSDP2)"
"""Advice in errors about wrappers that cut parameters into flat shards."""


def require_options(options: Mapping[str, Any], recipe: Recipe, who: str) -> None:
    """Raise TypeError if an option of `Optimizer` or `compose` is unknown. The error suggests the nearest option, or
    the overrides of the recipe that mean the same.

    who: name of the function that was called.
    """
    unknown = {key: value for key, value in options.items() if key not in (*_HOW, *_OFF)}
    if not unknown:
        return
    found = translated(unknown, recipe)
    meant = {path: value for overrides in found.values() for path, value in overrides.items()}
    needless = superfluous(unknown, recipe)
    others = [key for key, overrides in found.items() if not overrides and key not in needless]
    there = [key for key in others if key in ON_PAGE]
    misspelled = others and others[0] not in (*ON_PAGE, *_elsewhere())
    hint = did_you_mean(others[0], _OPTIONS) if misspelled else ""
    advice = f"; pass overrides={meant}" if meant else ""
    if needless:
        advice += f"; leave out {', '.join(needless)}, because the recipe already does what this value asks for"
    if others and others[0] in _OPTIONS:
        hint, advice = "", f"{advice}; only `compose` has {others[0]}"
    elif there:
        advice += f"; for {', '.join(there)} of another library, see docs/from-torch.md in the repository"
    verb = "is not an option" if len(unknown) == 1 else "are not options"
    known = ", ".join(_OPTIONS if who == "compose" else _OPTIONS[:-2])
    raise TypeError(
        f"{who}: {', '.join(map(repr, unknown))} {verb}{hint} (the options are {known}; the recipe declares all else)"
        f"{advice}"
    )


def check_options(given: Mapping[str, Any], who: str) -> None:
    """Warn of options of torch's optimizers that have no effect here. `fused=True` is checked later.

    given: the options.
    who: name of the caller, the beginning of messages.

    Raises ValueError if an option that is not supported was set.
    """
    for key, value in given.items():
        if key in _OFF and value:
            raise ValueError(f"{who}: {key} is not supported, got {value!r}; {_OFF[key]}")
    always = {
        "foreach": "all blocks of one shape are always computed at once",
        "fused": "Adam's chain always runs by fused kernels where they support it",
    }
    for key, why in always.items():
        if given.get(key) is False:
            warn_user(f"{who}: {key}=False has no effect, because {why}; leave the option out")
    if given.get("capturable"):
        warn_user(
            f"{who}: capturable=True has no effect here; pass it to the optimizer, or set `graph: true` in the recipe"
        )


class Defaults(dict[str, Any]):
    """The defaults of param groups. A scheduler of torch that wants to set a momentum gets an error with advice.

    recipe: JSON text of the optimizer's recipe.
    """

    def __init__(self, values: Mapping[str, Any], recipe: str) -> None:
        super().__init__(values)
        self.recipe = recipe

    def __contains__(self, key: object) -> bool:
        """Return True if a default has this name. Raise ValueError if OneCycleLR or CyclicLR asks for a momentum."""
        scheduler = sys._getframe(1).f_globals.get("__name__") == "torch.optim.lr_scheduler"
        if scheduler and key in ("momentum", "betas"):
            path = momentum_path(load_recipe(self.recipe))
            remedy = f"overrides={{'{path}': {_CYCLE}}}"
            remedy = f", and give the field a schedule, as here for 1000 steps: {remedy}" if path else ""
            raise ValueError(
                "cycle_momentum: the momentum is a field of the recipe, and schedulers change only the lr; pass "
                f"cycle_momentum=False{remedy}"
            )
        return super().__contains__(key)


def own_keys(group: Mapping[str, Any], recipe: str, follows_peak: bool) -> dict[str, Any]:
    """Check a param group. Return it without options of torch's optimizers that groups do not keep, such as `foreach`.

    recipe: JSON text of the optimizer's recipe.
    follows_peak: True if the recipe depends on the peak of the learning rate, the larger of `max_lr` and `lr`.

    Raises:
        ValueError: the group has a different recipe, or a key that would have no effect although the user expects one:
            another option of torch's optimizers, a field of recipes, or a misspelled key.
        TypeError: the group is not a mapping.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"param group: it must be a mapping with 'params', got {type(group).__name__}")
    options = {key: group[key] for key in (*_HOW, *_OFF) if key in group}
    check_options(options, "param group")
    for key in group:
        if key in _KEYS or key in options or (follows_peak and key == "max_lr"):
            continue
        if key == "overrides" and "recipe" in group:
            continue
        # `weight_decay_mult` is no misspelling of `weight_decay`: a key that contains a known name is the user's own
        known = [name for name in _MEANT if name not in key]
        hint = did_you_mean(key, known, 0.75)
        if hint or key in _elsewhere():
            advice = "" if hint else _for_some(key, group[key], recipe)
            raise ValueError(
                f"param group: '{key}' is not a key of a group{hint} (the keys are params, lr and weight_decay; the "
                f"recipe declares all else){advice}"
            )
        why = ": no part of the recipe depends on the peak of the learning rate" if key == "max_lr" else ""
        warn_user(f"param group: '{key}' stays in the group, but has no effect on steps{why}")
    if "params" not in group:
        raise ValueError(f"param group: 'params' is missing, got the keys {[*group]}")
    given = group.get("recipe", recipe)
    # Wrappers (SAM) copy all arguments of the optimizer that they wrap into groups. The `recipe` of a group may thus be
    # a name, with `overrides` in the group. Both are accepted if they make the recipe of the optimizer.
    if given != recipe and load_recipe(given, group.get("overrides", ())).to_json() != recipe:
        raise ValueError(
            "param group: 'recipe' cannot differ between groups; an optimizer has one recipe, whose `routes` send "
            "parameters to different updates"
        )
    return {key: plain(value) if key in _NUMBERS else value for key, value in group.items() if key not in options}


def _for_some(key: str, value: Any, recipe: str) -> str:
    """Return the end of an error about a key of a param group: how a route gives this option to some parameters.
    Return "" if a route cannot replace the key.

    key, value: the key, and its value in the param group.
    recipe: JSON text of the optimizer's recipe.
    """
    meant = {} if key in Recipe.model_fields else translated({key: value}, load_recipe(recipe))[key]
    if not meant and key not in Route.model_fields and key not in _OF_STAGES:
        return ""
    everywhere = f"for all parameters pass overrides={meant}; " if meant else ""
    return (
        f"; {everywhere}for some parameters give the recipe a route, whose `match` selects them and whose `update` has "
        "the stages with other values (docs/guide/routes-and-blocking.md)"
    )


def require_names(group: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if some parameters of an optimizer would have names and others none. Torch refuses this too.

    The error begins with torch's sentence, and says how parameters with names, and parameters without, are passed.

    group: the param group to add. If `params` is an iterator, the function replaces it by a list.
    groups: param groups that the optimizer already has.
    """
    if isinstance(group["params"], Iterator):
        group["params"] = list(group["params"])
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    if not params or not all(isinstance(one, (Tensor, tuple)) for one in params):
        return
    named, pairs = [isinstance(one, tuple) for one in params], "[(name, parameter), ...], as module.named_parameters()"
    if any(named) and not all(named):
        raise ValueError(
            f"all optimizer params should be with/without names: the parameter at position {named.index(False)} has "
            f"none, and others have one; pass {pairs} yields them"
        )
    has_names, known = any(named) or "param_names" in group, any("param_names" in own for own in groups)
    if groups and has_names != known:
        fault = f"no names, and those of the other groups have names; pass {pairs} yields them"
        if has_names:
            fault = "names, and those of the other groups have none; pass [parameter, ...], without names"
        raise ValueError(
            f"all optimizer param groups should be with/without names: the parameters of the new group have {fault}"
        )


def require_leaves(group: Mapping[str, Any]) -> None:
    """Raise TypeError for an entry of `params` that is no tensor, and ValueError for a parameter that is the result of
    an operation, as torch does. The errors begin with torch's sentences, and say what to pass.
    """
    params = group["params"] if isinstance(group["params"], list) else []
    for place, one in enumerate(params):
        name, value = one if isinstance(one, tuple) and len(one) == 2 else (f"the one at position {place}", one)
        if isinstance(one, (list, Iterator)) or callable(one):
            raise TypeError(
                f"optimizer can only optimize Tensors, but one of the params is {torch.typename(one)}, at "
                f"position {place}; pass model.named_parameters() or model.parameters() itself, not in a list"
            )
        if isinstance(value, Tensor) and not (value.is_leaf or value.retains_grad):
            raise ValueError(
                f"can't optimize a non-leaf Tensor: {name} is the result of an operation; pass the nn.Parameter from "
                "which it was computed"
            )


def warn_of_options(groups: Iterable[Mapping[str, Any]], recipe: Recipe) -> None:
    """Warn of keys in param groups that have no effect because the recipe declares the values.

    Such a key is an option of torch's optimizers (`group["momentum"] = 0.5`), a field of recipes, or a field of one of
    this recipe's stages (`group["beta"] = 0.5`). Any other key is the user's own and causes no warning.
    """
    for group in groups:
        for key in sorted(group.keys() - KNOWN_KEYS):
            stages = [found for at, rule in recipe.rules().items() for found in rule.stages(at)]
            paths = [f"{path}.{key}" for path, stage in stages if key in type(stage).model_fields]
            if paths or key in _elsewhere():
                there = f"change {', '.join(paths)} in the recipe" if paths else "change the recipe instead"
                warn_user(f"param group: '{key}' has no effect on steps; {there}")


@cache
def _elsewhere() -> frozenset[str]:
    """Return the names of all fields of recipes and of all options of torch's optimizers.

    Apart from `_KEYS`, such as `lr`, a key with one of these names has no effect in a param group here. The keys that
    wrappers write (`_OF_WRAPPERS`) are left out.
    """
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type)]
    options = [key for cls in classes if issubclass(cls, torch.optim.Optimizer) for key in signature(cls).parameters]
    return (frozenset(options) - _OF_WRAPPERS) | Recipe.model_fields.keys()


def check_values(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a learning rate, weight decay or parameter that cannot be used.

    Integer parameters, such as quantized base weights, are accepted and stay frozen, because they have no gradients.
    """
    for key in ("lr", "weight_decay", *(["peak_lr"] if "peak_lr" in group else [])):
        value = number(group, key)
        if not math.isfinite(value):
            raise ValueError(f"{key}: it must be a finite number >= 0, got {float(value)}")
    names, first = group.get("param_names", ()), dict[int, str]()
    for position, parameter in enumerate(group["params"]):
        name = names[position] if names else f"parameter {position}"
        if parameter.is_inference():
            raise ValueError(
                f"params: {name} was made in torch.inference_mode, so it has no gradient and cannot be updated; make "
                "or load the model outside of torch.inference_mode"
            )
        if id(parameter) in first:
            raise ValueError(
                f"params: {first[id(parameter)]} and {name} are the same parameter; pass every parameter once, as "
                "model.named_parameters() does"
            )
        first[id(parameter)] = name


class _Span(NamedTuple):
    """The memory of a parameter: the bytes from address `start` up to, not including, `end`. If the parameter is not
    contiguous, some of these bytes belong to none of its entries.

    entries: array whose entries have the same addresses as the parameter's. They are never read, and may be on a
        device.
    """

    device: str
    start: int
    end: int
    name: str
    entries: NDArray[Any]


def require_own_memory(rows: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for parameters that share memory with each other, or that cannot be written in place.

    rows: names and plain tensors of the parameters.
    """
    near: list[_Span] = []  # parameters before this one whose ranges of addresses may overlap with its range
    for span in sorted((span for row in rows for span in _span(*row)), key=lambda span: span[:3]):
        near = [other for other in near if other.device == span.device and other.end > span.start]
        if other := next((other for other in near if np.shares_memory(other.entries, span.entries)), None):
            raise ValueError(
                f"params: {other.name} and {span.name} share memory, so a step would overwrite the update of one by "
                "that of the other; make them one parameter (`second.weight = first.weight`), or copy the values"
            )
        near.append(span)


def _span(name: str, tensor: Tensor) -> Iterator[_Span]:
    """Yield the memory of a parameter, or nothing if it has no memory or no strides, as a meta or nested tensor.

    Raise ValueError for a tensor that cannot be updated in place, such as an expanded one.
    """
    strided = tensor.layout is torch.strided and not tensor.is_nested
    if not strided or not tensor.numel() or tensor.is_meta or fake_mode(tensor) is not None:
        return
    if tensor.is_conj() or tensor.is_neg():
        sort, call = ("conjugate", "resolve_conj") if tensor.is_conj() else ("negative", "resolve_neg")
        raise ValueError(
            f"{name}: the parameter is a {sort} view, which cannot be updated in place; make the parameter of "
            f"tensor.{call}()"
        )
    size = tensor.element_size()
    length = size * (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
    if length < size * tensor.numel():
        raise ValueError(
            f"{name}: several entries of the parameter share memory, as in an expanded tensor, so it cannot be "
            "updated in place; make the parameter of tensor.clone()"
        )
    if start := tensor.data_ptr():
        array = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (start, False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
        }
        entries = np.asarray(SimpleNamespace(__array_interface__=array))
        yield _Span(str(tensor.device), start, start + length, name, entries)


def flat_piece(parameter: Tensor) -> str:
    """Return an error text if a tensor is a flat shard of FSDP1 or of DeepSpeed's ZeRO-3, else "".

    Both libraries mark their tensors by attributes. ZeRO-3 marks parameters of the model by `ds_shape`, and its other
    tensors by `ds_id`.
    """
    if getattr(parameter, "_fsdp_flattened", False):
        return f"a flat one of FullyShardedDataParallel (FSDP1); {WHOLE_SHARDS}"
    if hasattr(parameter, "ds_shape"):
        return f"one of shape {tuple(parameter.ds_shape)} in flat pieces of DeepSpeed (ZeRO stage 3); {WHOLE_SHARDS}"
    return f"a flat piece of DeepSpeed (ZeRO stage 3); {WHOLE_SHARDS}" if hasattr(parameter, "ds_id") else ""


def require_facts(recipe: Recipe, infos: Iterable[ParamInfo]) -> None:
    """Raise ValueError for a parameter of two or more axes without a name, if a route needs to know the name.

    Routes that select by name, role, module or pair need it: without a name it is unknown whether a matrix is an
    embedding, an output head or neither. Vectors and scalars need no name.
    """
    matches = {route.name: route.match for route in recipe.routes}
    telling = [name for name, m in matches.items() if m.role or m.name or m.module or m.pair is not None]
    unknown = next((info for info in infos if info.name is None and not info.modules and len(info.shape) > 1), None)
    if telling and unknown is not None:
        raise ValueError(
            f"params: a parameter of shape {unknown.shape} has no name, and routes.{telling[0]} of the recipe selects "
            "parameters by name, role or module; pass the model to eigengraft.compose, or pass "
            "model.named_parameters(), or param groups as eigengraft.optimizers.grouped(model, groups), or set "
            "`routes` (`[]` updates all parameters alike)"
        )


def require_matches(recipe: Recipe, infos: Iterable[ParamInfo]) -> None:
    """Raise ValueError for a route that is not optional and matches no parameter."""
    taken = {recipe.route(info)[0] for info in infos}
    for route in recipe.routes:
        if not route.optional and f"routes.{route.name}" not in taken:
            raise ValueError(
                f"routes.{route.name}: no parameter reaches this route. Perhaps an earlier route matches all of its "
                "parameters, or parameters have no names (pass named_parameters); set `optional: true` if the route "
                "may be without parameters"
            )


def require_partners(recipe: Recipe, infos: Iterable[ParamInfo]) -> None:
    """Raise ValueError if the update of a parameter needs a partner that is missing or has a wrong shape.

    The partner is the other factor of a product of two parameters, as in LoRA.
    """
    infos, rules = list(infos), recipe.rules()
    named = {info.name: info for info in infos if info.name is not None}
    asked = {path: asking(rule.stages(path)).keys() & PARTNER for path, rule in rules.items()}
    for info in infos:
        path = recipe.route(info)[0]
        rule, factor, where = rules[path], info.facts.factor, f"{path}: " if path else ""
        if not asked[path]:
            continue
        if not isinstance(rule.view, Pairs) or rule.blocking != Blocking():
            got = f"{rule.view!r} and {rule.blocking!r}"
            raise ValueError(
                f"{where}view: the signal '{min(asked[path])}' needs `view: pairs` and no blocking, but the update has "
                f"{got}; set `view: pairs` and remove `blocking`"
            )
        partner = None if factor is None else named.get(factor.partner)
        if factor is None or partner is None:
            why = f"there is no parameter {factor.partner}" if factor else "the parameter belongs to no pair"
            raise ValueError(
                f"{info.name}: the signal '{min(asked[path])}' needs the partner of the parameter, but {why}; "
                "pairs are found by the names lora_A and lora_B or by a module's `parameter_pairs()`"
            )
        pair = (info, partner) if factor.side == "inputs" else (partner, info)
        if len(partner.shape) != 2 or pair[0].shape[0] != pair[1].shape[1]:
            shapes = f"{pair[0].shape} and {pair[1].shape}"
            raise ValueError(f"{info.name}: the shapes of a pair must be (r, n) and (m, r), got {shapes}")


def unclear_heads(recipe: Recipe, rows: Sequence[tuple[Tensor, ParamInfo]], names_only: bool) -> Iterator[str]:
    """Yield a warning if the recipe has a route for output heads, but no route matches the model's last layer.

    The last layer may be a head that was not recognized, and would be updated like hidden layers. There is no warning
    if the layer is frozen, or if the model has adapters.

    rows: all parameters with their descriptions.
    names_only: True if only names and shapes of the parameters are known, but not their model.
    """
    if not any("head" in route.match.role for route in recipe.routes) or any(info.facts.factor for _, info in rows):
        return
    give, why = "compose the recipe with its model", "names and shapes do not show a head"
    if not names_only:
        give = "return its module from a method `get_output_embeddings()` of the model"
        why = "other layers may consume its outputs"
    for parameter, info in rows:
        if info.unclear and parameter.requires_grad and not recipe.route(info)[0]:
            yield (
                f"{info.name}: the last layer goes to the recipe's own update with the hidden layers, because no "
                f"output head is found and {why}; if it is the head, {give}, or put a route with "
                f"`match: {{name: '^{re.escape(info.name or '')}$'}}` before 'default'"
            )
