"""What a param group may say, and the parameter sets that it is made of."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .engine.param_set import ParamSet
from .recipe.recipe import Recipe
from .recipe.routing import ParamInfo
from .sharding.assignment import Assignments

_KEYS = ("params", "param_names", "lr", "weight_decay", "name", "initial_lr", "peak_lr", "recipe", "iterate")


def check_keys(group: Mapping[str, Any], recipe: str) -> None:
    """Refuses keys that nobody reads; `recipe` is what the optimizer itself writes there."""
    for key in group:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f", did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"param group: the keys are params, lr and weight_decay, got '{key}'{hint}; the recipe says the rest"
            )
    if group.get("recipe", recipe) != recipe:
        raise ValueError(
            "param group: one recipe for all groups is required (its `routes` tell parameters apart), got 'recipe'"
        )


def check_values(group: Mapping[str, Any]) -> None:
    """Refuses a learning rate, weight decay or parameter that cannot be used."""
    for key in ("lr", "weight_decay"):
        value = number(group, key)
        if not math.isfinite(value):
            raise ValueError(f"{key}: a finite number >= 0 is required, got {float(value)}")
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise ValueError(f"params: real floating-point tensors are required, got {parameter.dtype}")


def number(group: Mapping[str, Any], key: str) -> float | Tensor:
    """A group's value as a float where reading it costs nothing; a tensor on a device stays there, unread."""
    value = group.get(key)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{key}: a number or a tensor with one element is required, got shape {tuple(value.shape)}")
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise ValueError(f"{key}: a number is required, got {value!r}")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value
    if not float(value) >= 0:
        raise ValueError(f"{key}: a finite number >= 0 is required, got {float(value)}")
    return float(value)


def require_matches(recipe: Recipe, infos: Iterable[ParamInfo]) -> None:
    """Raises ValueError for a route that must match a parameter and takes none."""
    taken = {recipe.route(info)[0] for info in infos}
    for route in recipe.routes:
        if not route.optional and f"routes.{route.name}" not in taken:
            raise ValueError(
                f"routes.{route.name}: a rule must match at least one parameter, got none "
                "(earlier rules match first; names need named_parameters; set `optional: true` if that is meant)"
            )


def make_param_sets(
    rows: Sequence[tuple[Tensor, ParamInfo, str]], recipe: Recipe, assignments: Assignments, index: int
) -> list[ParamSet]:
    """Fresh parameter sets for (parameter, facts, name) of the group with that index, one for each device and set of
    ranks."""
    rank_sync: dict[Any, list[Any]] = {}
    for row in rows:
        rank_sync.setdefault((row[0].device, assignments.place(row[0])), []).append(row)
    found = []
    for (_, where), own in rank_sync.items():
        parameters, facts, names = zip(*own, strict=True)
        found.append(ParamSet(parameters, facts, names, recipe, assignments.of(index, where)))
    return found


def inherit(param_sets: Iterable[ParamSet], before: Iterable[ParamSet]) -> None:
    """New parameter sets go on with what was counted of their parameters before."""
    counts = {param_set: dict(param_set.skipped) for param_set in before}
    for param_set in param_sets:
        for other, skipped in counts.items():
            if other is not param_set:
                param_set.skipped.update({name: count for name, count in skipped.items() if name in param_set.names})
