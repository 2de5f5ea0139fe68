"""Checks of param groups: keys, values, and routes that must match."""

from __future__ import annotations

import difflib
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eigengraft.component import RecipeError

from .apply.closures.line_search import SCALE
from .recipe.expect import expected_updates, parse_expectation
from .recipe.recipe import Recipe
from .recipe.routing import ParamInfo, describe_named, describe_parameter

_KEYS = ("params", "param_names", "lr", "weight_decay", "name", "initial_lr", "peak_lr", "recipe", "iterate", SCALE)


def check_keys(group: Mapping[str, Any], recipe: str) -> None:
    """Raises ValueError for an unknown key, or another recipe; recipe: what the optimizer writes into its groups."""
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
    """Raises ValueError for a learning rate, weight decay or parameter that cannot be used."""
    for key in ("lr", "weight_decay"):
        value = number(group, key)
        if not math.isfinite(value):
            raise ValueError(f"{key}: a finite number >= 0 is required, got {float(value)}")
    names, first = group.get("param_names", ()), dict[int, str]()
    for position, parameter in enumerate(group["params"]):
        name = names[position] if names else f"parameter {position}"
        if not parameter.is_floating_point():
            raise ValueError(f"params: real floating-point tensors are required, got {parameter.dtype}")
        if parameter.is_meta:
            raise ValueError(
                f"{name}: a parameter with values is required, got one on the meta device; call "
                "model.to_empty(device=...) and initialise the model before it gets an optimizer"
            )
        if id(parameter) in first:
            raise ValueError(
                f"params: each parameter once is required, got {first[id(parameter)]} again as {name}; "
                "model.named_parameters() lists a shared parameter once"
            )
        first[id(parameter)] = name


def group_infos(
    group: Mapping[str, Any], known: Mapping[int, ParamInfo] | None, taken: Container[str]
) -> list[ParamInfo]:
    """Descriptions of a group's parameters; known: by id, what was found before; taken: names of other parameters."""
    if known is None:
        known = describe_named(list(zip(group.get("param_names", ()), group["params"], strict=False)), taken)
    return [known.get(id(parameter)) or describe_parameter(None, parameter) for parameter in group["params"]]


def require_facts(recipe: Recipe, infos: Iterable[ParamInfo]) -> None:
    """Raises ValueError for a parameter with two axes or more of which routes ask what nobody has told.

    What has fewer axes is a vector or a scalar under any name; a matrix may be an embedding, a head or neither.
    """
    asking = [route.name for route in recipe.routes if route.match.role or route.match.name or route.match.module]
    unknown = next((info for info in infos if info.name is None and not info.modules and len(info.shape) > 1), None)
    if asking and unknown is not None:
        raise ValueError(
            f"params: names are required, because routes.{asking[0]} of the recipe takes parameters by what they are, "
            f"got a parameter of shape {unknown.shape} without a name; pass the model to eigengraft.compose, or pass "
            "model.named_parameters(), or set `routes` (`[]` updates all parameters alike)"
        )


def number(group: Mapping[str, Any], key: str) -> float | Tensor:
    """The value of a group as a float; a tensor on a device is returned unread, so that the host never waits for it."""
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
    """Raises ValueError for a route that must match a parameter and matches none."""
    taken = {recipe.route(info)[0] for info in infos}
    for route in recipe.routes:
        if not route.optional and f"routes.{route.name}" not in taken:
            raise ValueError(
                f"routes.{route.name}: a rule must match at least one parameter, got none "
                "(earlier rules match first; names need named_parameters; set `optional: true` if that is meant)"
            )


@dataclass(frozen=True)
class Reached:
    """What reaches a stage or a route of which the recipe expects something.

    key, text: the expectation.
    found: parameters, by entries, or tensors that reach it.
    total: all there are.
    holds: whether the expectation is met.
    """

    key: str
    text: str
    found: int
    total: int
    holds: bool

    @property
    def share(self) -> str:
        """What was found, in percent and in numbers."""
        return f"{100 * self.found / max(self.total, 1):.3g}% ({self.found:,} of {self.total:,})"

    def __str__(self) -> str:
        return f"{self.key} {self.text}: {self.share}"


def reached(recipe: Recipe, infos: Iterable[ParamInfo]) -> list[Reached]:
    """What the routes make of each expectation of a recipe."""
    if not recipe.expect:
        return []
    rows, updates = [(recipe.route(info)[0], info.numel) for info in infos], recipe.updates()
    found_rows = []
    for key, text in recipe.expect.items():
        expected, paths = parse_expectation(text), expected_updates(key, updates)
        sizes = [(path in paths, size if expected.unit == "parameters" else 1) for path, size in rows]
        found, total = sum(size for there, size in sizes if there), sum(size for _, size in sizes)
        found_rows.append(Reached(key, text, found, total, expected.holds(found, total)))
    return found_rows


def require_expected(recipe: Recipe, infos: Iterable[ParamInfo]) -> None:
    """Raises RecipeError, with the largest tensors that went elsewhere, if routes do not do what the recipe expects."""
    infos = list(infos)
    faults = [
        f"expect.{row.key}: {row.text} is required, got {row.share}; {_astray(recipe, row.key, infos)}"
        for row in reached(recipe, infos)
        if not row.holds
    ]
    if faults:
        raise RecipeError("\n".join(faults))


def _astray(recipe: Recipe, key: str, infos: Iterable[ParamInfo]) -> str:
    """The largest tensors that do not reach a stage; those that do, where too much of them may be the fault."""
    paths, upper = expected_updates(key, recipe.updates()), parse_expectation(recipe.expect[key]).upper
    rows = [(info, *recipe.route(info)) for info in infos]
    chosen = sorted((row for row in rows if (row[1] in paths) == upper), key=lambda row: -row[0].numel)
    named = [f"{info.name or info.shape} to {path or 'update'} ({why})" for info, path, why in chosen[:3]]
    more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
    return f"{'there' if upper else 'elsewhere'} went {', '.join(named) or 'nothing'}{more}"
