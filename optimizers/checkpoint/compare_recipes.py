"""Comparison of the recipe of a checkpoint with an optimizer's: what the numbers in slots mean, and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eigengraft.component import Component
from eigengraft.errors import RecipeError, first_lines
from eigengraft.preconditioners import Stage
from eigengraft.preconditioners.statistics import Statistic

from ..recipe.loading import load_recipe
from ..recipe.overrides import differences
from ..recipe.recipe import SCHEMA_VERSION, Recipe
from ..recipe.routing import ParamInfo
from ..write import Averaging

_SILENT = ("schema", "name", "about", "distribution", "expect", "compile")
"""Fields by which no number differs."""
_OF_GROUPS = ("lr", "weight_decay.rate")
"""Fields that param groups were made with. The saved groups are loaded, as with torch's optimizers."""
_RENAMED = {"soap": "soap_fitted"}
"""Shipped names under which another recipe was shipped before, with the present name of that recipe."""


@dataclass(frozen=True)
class RecipeChange:
    """How the recipe of an optimizer differs from that of a checkpoint, as lines "path: old -> new".

    meaning: differences by which numbers in slots mean something else.
    settings: all others, which apply from the load on.
    of_groups: defaults of param groups, whose saved values stay.
    renamed: the present name of the saved recipe, if its old name is that of this optimizer's recipe now.
    """

    meaning: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    of_groups: tuple[str, ...] = ()
    renamed: str | None = None

    def refusal(self, faults: list[str]) -> str:
        """The error for state that does not fit; faults: lines that name the state."""
        lines = [*self.meaning, *(self.settings if faults else ())]
        remedy = "compose with the recipe of the checkpoint, `state_dict['param_groups'][0]['recipe']`, to load it"
        if self.renamed is not None:
            remedy = f"it is shipped as '{self.renamed}' now, and its earlier name is another recipe's; {remedy}"
        if all(line.startswith("storage.") for line in lines):
            remedy = "eigengraft.convert_storage(state_dict, optimizer) makes a state dict that fits"
        return "\n".join(
            [
                f"state_dict was saved by another recipe, whose state does not fit; {remedy}. "
                "Saved -> this optimizer's:",
                *first_lines(lines),
                *faults,
            ]
        )

    def word(self) -> str:
        """The warning about settings that differ; empty if there are none."""
        found = list[str]()
        if self.settings:
            found += [
                "other settings than the checkpoint's apply from now on (saved -> now):",
                *first_lines(self.settings),
            ]
        if self.of_groups:
            found += ["param groups keep the saved values, not the recipe's (saved -> recipe):", *self.of_groups]
        return "\n".join(["state_dict: " + found[0], *found[1:]]) if found else ""


def compare_recipes(own: str, got: Any, infos: Sequence[ParamInfo]) -> RecipeChange:
    """The difference between an optimizer's recipe and a saved one, both as JSON text; ValueError for no such text.

    infos: the optimizer's parameters.
    """
    try:
        mine, other = json.loads(own), json.loads(got)
    except (TypeError, ValueError):
        raise ValueError("state_dict: the recipe in a param group must be JSON text, got something else") from None
    if not isinstance(other, dict) or other.get("schema") != SCHEMA_VERSION:
        got_version = other.get("schema") if isinstance(other, dict) else None
        raise ValueError(f"state_dict: a recipe of schema {SCHEMA_VERSION} is required, got {got_version}")
    same_name = mine.get("name") == other.get("name")
    mine, other = _of_numbers(mine), _of_numbers(other)
    changed = differences(other, mine)
    if not changed:
        return RecipeChange()
    try:
        recipes = load_recipe(got), load_recipe(own)
    except RecipeError as error:
        raise ValueError(f"state_dict was saved by another recipe, which does not load here:\n{error}") from error
    if same_name and (renamed := _renamed(mine, other)) is not None:
        return RecipeChange(meaning=tuple(changed), renamed=renamed)
    before, after = map(_meanings, recipes)
    paths = _views(*recipes, infos)
    paths += [key for update in before.keys() & after.keys() for key in _differing(before[update], after[update])]
    found: dict[str, list[str]] = {"meaning": [], "settings": [], "of_groups": []}
    for line in changed:
        path = line.partition(": ")[0]
        refused = any(path == key or path.startswith(f"{key}.") for key in paths)
        found["meaning" if refused else "of_groups" if path in _OF_GROUPS else "settings"].append(line)
    return RecipeChange(tuple(found["meaning"]), tuple(found["settings"]), tuple(found["of_groups"]))


def _of_numbers(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's plain data without the fields by which no number differs."""
    found = {key: value for key, value in recipe.items() if key not in _SILENT}
    if "routes" in found:
        found["routes"] = [{key: one for key, one in own.items() if key != "compile"} for own in found["routes"]]
    return found


def _renamed(own: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Return the present name of the shipped recipe that a saved one was made of, if `own` was made of its successor.

    Overrides are not known apart from the recipe: each of the two counts as made of the shipped recipe from which it
    differs in fewer fields.
    """
    for name, now in _RENAMED.items():
        successor, former = (_of_numbers(json.loads(load_recipe(one).to_json())) for one in (name, now))
        excess = [len(differences(one, successor)) - len(differences(one, former)) for one in (own, saved)]
        if excess[0] < 0 < excess[1]:
            return now
    return None


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]


def _meanings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What numbers in slots mean, by update and dotted path of the field that says so."""
    found = {}
    for at, rule in recipe.updates().items():
        own: dict[str, Any] = {}
        for path, stage in rule.stages(at):
            chain = path.rpartition(".")[0]
            own.setdefault(chain, []).append(stage.label)
            own.update(_of_component(stage, path))
        found[at] = own
    if recipe.averaging is not None:
        found["averaging"] = dict(_of_component(recipe.averaging, "averaging"))
    return found


def _views(before: Recipe, after: Recipe, infos: Sequence[ParamInfo]) -> list[str]:
    """Paths of views by which other entries of a parameter form a matrix; where entries are not mixed none matters."""
    found = dict[str, None]()
    for info in infos:
        at = after.route(info)[0]
        rule = before.updates().get(at)
        if rule is None or rule.entrywise() or before.route(info)[0] != at:
            continue
        try:
            same = before.view_of(info).matrices == after.view_of(info).matrices
        except ValueError:
            same = False
        if not same:
            found[f"{at}.view" if at else "view"] = None
    return [*found]


def _of_component(component: Component, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(component, Stage | Statistic | Averaging):
        yield f"{path}.kind", getattr(component, "kind")  # noqa: B009  every member has a kind, the families have none
    yield from ((f"{path}.{field}", value) for field, value in component.state_meaning().items())
    for name, value in component:
        if isinstance(value, Component) and not isinstance(value, Stage):
            yield from _of_component(value, f"{path}.{name}")
