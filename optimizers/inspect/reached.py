"""Checks of routes against a model: rules that must match, partners that must exist, expectations of a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from eigengraft.blocking import Blocking, Pairs
from eigengraft.errors import RecipeError, name_some
from eigengraft.signals import PARTNER, asking

from ..recipe.expect import expected_updates, parse_expectation
from ..recipe.recipe import Recipe
from ..recipe.routing import ParamInfo
from ..state.param_sets import ParamSets


def require_matches(recipe: Recipe, infos: Iterable[ParamInfo]) -> None:
    """Raise ValueError for a route that is not optional and matches no parameter."""
    taken = {recipe.route(info)[0] for info in infos}
    for route in recipe.routes:
        if not route.optional and f"routes.{route.name}" not in taken:
            raise ValueError(
                f"routes.{route.name}: the rule matches no parameter. Earlier rules match first, and rules about names "
                "need named_parameters; set `optional: true` if no match is intended"
            )


def require_partners(recipe: Recipe, infos: Iterable[ParamInfo]) -> None:
    """Raise ValueError for a parameter whose update needs a partner that is missing or has a wrong shape."""
    infos, updates = list(infos), recipe.updates()
    named = {info.name: info for info in infos if info.name is not None}
    asked = {path: asking(update.stages(path)).keys() & PARTNER for path, update in updates.items()}
    for info in infos:
        path = recipe.route(info)[0]
        rule, factor, where = updates[path], info.facts.factor, f"{path}: " if path else ""
        if not asked[path]:
            continue
        if not isinstance(rule.view, Pairs) or rule.blocking != Blocking():
            got = f"{rule.view!r} and {rule.blocking!r}"
            raise ValueError(f"{where}view: '{min(asked[path])}' needs `view: pairs` without blocking, got {got}")
        partner = None if factor is None else named.get(factor.partner)
        if factor is None or partner is None:
            why = f"there is no parameter {factor.partner}" if factor else "the parameter belongs to no pair"
            raise ValueError(
                f"{info.name}: '{min(asked[path])}' needs the partner of the parameter, but {why}; "
                "pairs are found by the names lora_A and lora_B or by a module's `parameter_pairs()`"
            )
        pair = (info, partner) if factor.side == "inputs" else (partner, info)
        if len(partner.shape) != 2 or pair[0].shape[0] != pair[1].shape[1]:
            shapes = f"{pair[0].shape} and {pair[1].shape}"
            raise ValueError(f"{info.name}: the shapes of a pair must be (r, n) and (m, r), got {shapes}")


@dataclass(frozen=True)
class Reached:
    """How much of a model a stage or a route receives, beside an expectation of the recipe.

    key: the stage or route, as in `expect`.
    text: the expected bound, such as ">= 90% of parameters".
    found: number of entries, or of tensors, that the stage or route receives.
    total: number of entries, or of tensors, of the model.
    holds: True if the expectation is met.
    """

    key: str
    text: str
    found: int
    total: int
    holds: bool

    @property
    def share(self) -> str:
        """Return `found` as a percentage of `total`, and both numbers."""
        return f"{100 * self.found / max(self.total, 1):.3g}% ({self.found:,} of {self.total:,})"

    def __str__(self) -> str:
        return f"{self.key} {self.text}: {self.share}"


def reached(recipe: Recipe, infos: Iterable[ParamInfo]) -> list[Reached]:
    """Return, for each expectation of a recipe, how much of the model its stage or route receives."""
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
    """Raise RecipeError if an expectation is not met, and name the largest tensors that went elsewhere."""
    infos = list(infos)
    faults = [
        f"expect.{row.key}: the recipe expects {row.text}, got {row.share}; {_astray(recipe, row.key, infos)}"
        for row in reached(recipe, infos)
        if not row.holds
    ]
    if faults:
        raise RecipeError("\n".join(faults))


def _astray(recipe: Recipe, key: str, infos: Iterable[ParamInfo]) -> str:
    """Name the largest tensors that do not reach a stage, or that do reach it if the expectation is an upper bound."""
    paths, upper = expected_updates(key, recipe.updates()), parse_expectation(recipe.expect[key]).upper
    rows = [(info, *recipe.route(info)) for info in infos]
    chosen = sorted((row for row in rows if (row[1] in paths) == upper), key=lambda row: -row[0].numel)
    named = [f"{info.name or info.shape} to {path or 'update'} ({why})" for info, path, why in chosen]
    return f"{'there' if upper else 'elsewhere'} went {name_some(named, 3) or 'nothing'}"


def unclear_heads(recipe: Recipe, param_sets: ParamSets, names_only: bool) -> Iterator[str]:
    """Yield a warning if the recipe routes output heads, and the last layer, perhaps a head, goes to its main update.

    There is none if the head is found, frozen or tied, nor for adapters and stacks of equal blocks.

    names_only: True if only names and shapes of the parameters are known, but not their model.
    """
    sets = zip(param_sets.parameters, param_sets.infos, strict=True)
    rows = [row for own, infos in sets for row in zip(own, infos, strict=True)]
    if not any("head" in route.match.role for route in recipe.routes) or any(info.facts.factor for _, info in rows):
        return
    give = (
        "compose the recipe with its model"
        if names_only
        else ("return its module from a method `get_output_embeddings()` of the model")
    )
    why = "names and shapes do not show a head" if names_only else "other layers may consume its outputs"
    for parameter, info in rows:
        if info.unclear and parameter.requires_grad and not recipe.route(info)[0]:
            yield (
                f"{info.name}: the last layer goes to the recipe's own update with the hidden layers, because no "
                f"output head is found and {why}; if it is the head, {give}, or put a route with "
                f"`match: {{name: '^{re.escape(info.name or '')}$'}}` before 'default'"
            )
