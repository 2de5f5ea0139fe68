"""Comparison of a state dict with an optimizer, before anything is loaded: recipes, param groups, parameters, mode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from eigengraft.component import Component
from eigengraft.errors import RecipeError, name_some
from eigengraft.preconditioners import Stage
from eigengraft.preconditioners.statistics import Statistic
from eigengraft.slots import dotted

from ..param_groups import check_values
from ..recipe.loading import load_recipe
from ..recipe.overrides import differences, first_differences
from ..recipe.recipe import SCHEMA_VERSION, Recipe
from ..recipe.routing import ParamInfo, canonical_names
from ..write import Averaging
from ..write.averaging import MODES, Mode

_SILENT = ("schema", "name", "about", "distribution", "expect", "compile", "graph")
"""Fields of a recipe that change no result of a step, so that differences in these fields are ignored."""
_OF_GROUPS = ("lr", "weight_decay.rate")
"""Fields that are only defaults of param groups. A load restores the saved values of the groups, as in torch."""


@dataclass(frozen=True)
class RecipeChange:
    """Differences between the recipe of a checkpoint and that of an optimizer, as lines "path: old -> new".

    meaning: differences that give the numbers in slots another meaning, so that the state must not be loaded.
    settings: other differences, such as a decay. The optimizer's settings apply after the load.
    of_groups: differences in defaults of param groups. The saved values apply after the load.
    names: names of both recipes; None for a recipe without a name.
    """

    meaning: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    of_groups: tuple[str, ...] = ()
    names: tuple[str | None, str | None] = (None, None)

    def refusal(self, faults: list[str]) -> str:
        """Return the text of the error that refuses a checkpoint.

        faults: a line for each state that does not fit; [] if only the recipes differ.
        """
        lines = [*self.meaning, *(self.settings if faults else ())]
        remedy = "compose with the recipe of the checkpoint, `state_dict['param_groups'][0]['recipe']`, to load it"
        if all(line.startswith("storage.") for line in lines):
            remedy = "eigengraft.optimizers.convert_storage(state_dict, optimizer) makes a state dict that fits"
        saved, own = self.names
        other = f"the recipe '{saved}', not '{own}'" if saved and own and saved != own else "another recipe"
        return "\n".join(
            [
                f"state_dict was saved with {other}, and its state does not fit; {remedy}. Saved -> this optimizer's:",
                *first_differences(lines),
                *faults,
            ]
        )

    def warning(self) -> str:
        """Return the warning about differing settings, or "" if all settings are equal."""
        found = list[str]()
        if self.settings:
            # every changed setting is listed, because a change without notice would mislead the user
            found += ["other settings than the checkpoint's apply from now on (saved -> now):", *self.settings]
        if self.of_groups:
            found += ["param groups keep the saved values, not the recipe's (saved -> recipe):", *self.of_groups]
        return "\n".join(["state_dict: " + found[0], *found[1:]]) if found else ""


def compare_recipes(own: str, got: Any, infos: Sequence[ParamInfo]) -> RecipeChange:
    """Return the differences between an optimizer's recipe and a saved recipe.

    own: JSON text of the optimizer's recipe.
    got: JSON text of the saved recipe.
    infos: descriptions of the optimizer's parameters.

    Raises:
        ValueError: the saved recipe is no JSON text, has another schema, or cannot be loaded here.
    """
    try:
        mine, other = json.loads(own), json.loads(got)
    except (TypeError, ValueError):
        raise ValueError(f"state_dict: the recipe in a param group must be JSON text, got {got!r:.60}") from None
    if not isinstance(other, dict) or other.get("schema") != SCHEMA_VERSION:
        got_version = other.get("schema") if isinstance(other, dict) else None
        raise ValueError(
            f"state_dict: the saved recipe has schema {got_version}; this version of eigengraft reads schema "
            f"{SCHEMA_VERSION}; resume the run with the version that saved it, or load the weights alone"
        )
    names = other.get("name"), mine.get("name")
    mine, other = without_silent(mine), without_silent(other)
    changed = differences(other, mine)
    if not changed:
        return RecipeChange()
    try:
        recipes = load_recipe(got), load_recipe(own)
    except RecipeError as error:
        raise ValueError(f"state_dict was saved with another recipe, which cannot be loaded here:\n{error}") from error
    if not differences(*(without_silent(json.loads(_without_locations(one).to_json())) for one in recipes)):
        return RecipeChange()
    before, after = map(_meanings, recipes)
    paths = _views(*recipes, infos)
    pairs = [(before[at], after[at]) for at in before.keys() & after.keys()]
    paths += [key for old, new in pairs for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    found: dict[str, list[str]] = {"meaning": [], "settings": [], "of_groups": []}
    for line in changed:
        path = line.partition(": ")[0]
        refused = any(path == key or path.startswith(f"{key}.") for key in paths)
        found["meaning" if refused else "of_groups" if path in _OF_GROUPS else "settings"].append(line)
    return RecipeChange(tuple(found["meaning"]), tuple(found["settings"]), tuple(found["of_groups"]), names=names)


def without_silent(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's plain data without the fields that change no result of a step."""
    found = {key: value for key, value in recipe.items() if key not in _SILENT}
    if "routes" in found:
        found["routes"] = [{key: one for key, one in own.items() if key != "compile"} for own in found["routes"]]
    return found


def _without_locations(recipe: Recipe) -> Recipe:
    """Return a copy of a recipe without offloading, which changes no result of a step. Slots keep their formats."""
    return recipe.replace(storage={k: own.codec for k, own in recipe.storage.items() if own.codec is not None})


def _meanings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the fields of a recipe that determine the meaning of the numbers in state.

    Examples are the kinds of stages, and the decay of a mean if the state stores the sum from which the mean is
    computed. The result is {path of the update rule: {path of the field: value}}.
    """
    found = {}
    for at, rule in recipe.rules().items():
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
    """Return the paths of the fields `view` that differ in effect between two recipes.

    A field differs in effect if some parameter has the same path of its update in both recipes, but the two views make
    different matrices of it. Views of entry-wise updates are ignored, because these updates use no matrices.

    infos: descriptions of the parameters.
    """
    found = dict[str, None]()
    for info in infos:
        at = after.route(info)[0]
        rule = before.rules().get(at)
        if rule is None or rule.entrywise() or before.route(info)[0] != at:
            continue
        try:
            same = before.view_of(info).matrices == after.view_of(info).matrices
        except ValueError:
            same = False
        if not same:
            found[dotted(at, "view")] = None
    return [*found]


def _of_component(component: Component, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(component, Stage | Statistic | Averaging):
        yield f"{path}.kind", getattr(component, "kind")  # noqa: B009  every member has a kind, the families have none
    yield from ((f"{path}.{field}", value) for field, value in component.state_meaning().items())
    for name, value in component:
        if isinstance(value, Component) and not isinstance(value, Stage):
            yield from _of_component(value, f"{path}.{name}")


def compare_groups(
    groups: Sequence[Mapping[str, Any]], infos: Sequence[Sequence[ParamInfo]], saved: Any
) -> tuple[list[list[Any]], RecipeChange]:
    """Match the parameters of an optimizer with those of a state dict: by name if names are known, else by order.

    Return a pair: for each group the keys of its parameters in the saved state, and the differences of the recipes.

    groups: the optimizer's param groups.
    infos: descriptions of the parameters of each group.
    saved: the 'param_groups' of the state dict.

    Raises:
        ValueError: the groups, their parameters or the meaning of their state differ.
    """
    names = [[info.name for info in own] for own in infos]
    if not isinstance(saved, list) or not all(isinstance(other, Mapping) and "params" in other for other in saved):
        raise ValueError("state_dict: 'param_groups' must be a list of groups with 'params'")
    sizes = [len(group["params"]) for group in groups], [len(other["params"]) for other in saved]
    keys, changes = list[list[Any]](), dict[Any, RecipeChange]()
    if len(groups) == len(saved):
        for index, (own, other, got) in enumerate(zip(names, saved, _saved_names(saved), strict=True)):
            keys.append(_matched(f"group {index}", own, other, got))
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"state_dict: the saved param groups have {sizes[1]} parameters, and those of the optimizer {sizes[0]}; "
            "give the optimizer the same groups"
        )
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if "recipe" not in other:
            raise ValueError(
                f"state_dict: group {index} has no recipe, so this is not the state dict of an eigengraft.Optimizer; "
                "eigengraft.optimizers.convert_adamw(state_dict, optimizer) converts one of torch.optim.AdamW; after "
                "any other optimizer, begin with fresh state"
            )
        missing = [key for key in ("lr", "weight_decay") if key not in other]
        if missing:
            raise ValueError(
                f"state_dict: group {index} must have '{missing[0]}', got the keys {sorted(other)}; load a state dict "
                "as optimizer.state_dict() returned it"
            )
        check_values({**other, "params": []})
        if str(other["recipe"]) not in changes:
            changes[str(other["recipe"])] = compare_recipes(
                group["recipe"], other["recipe"], [*chain.from_iterable(infos)]
            )
    if len(changes) > 1:
        raise ValueError("state_dict: its param groups have different recipes, but an optimizer has one recipe")
    change = next(iter(changes.values()), RecipeChange())
    if change.meaning:
        raise ValueError(change.refusal([]))
    return keys, change


def saved_mode(groups: Sequence[Mapping[str, Any]], averages: bool) -> Mode:
    """Return the iterate that the saved parameters held, "train" or "eval".

    groups: the param groups of the state dict.
    averages: True if the optimizer averages iterates.

    Raises:
        ValueError: the groups name different or unknown iterates, or the iterate is "eval" and the optimizer averages
            no iterates.
    """
    found = [group.get("iterate", "train") for group in groups]
    for index, mode in enumerate(found):
        if mode not in MODES:
            raise ValueError(f"state_dict: group {index}: 'iterate' must be 'train' or 'eval', got {mode!r}")
        if mode != found[0]:
            raise ValueError(
                f"state_dict: group {index}: 'iterate', which says whether the saved parameters hold the training or "
                f"the evaluated iterate, must be the same in all groups, got {mode!r} here and {found[0]!r} in group "
                "0; load a state dict as optimizer.state_dict() returned it"
            )
        if mode == "eval" and not averages:
            raise ValueError(
                f"state_dict: group {index}: 'iterate' is 'eval', so it was saved after optimizer.eval(), but this "
                "optimizer averages no iterates; save after optimizer.train(), or compose with the averaging of the "
                "checkpoint"
            )
    return "eval" if "eval" in found else "train"


def _saved_names(saved: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return canonical names of the parameters of each saved group, or an empty list if names are unknown.

    Names in 'params' are preferred, because torch.distributed.checkpoint replaces the indices in 'params' by names, but
    leaves `param_names` in the order of the save.
    """
    names: list[list[str]] = []
    for other in saved:
        written = other["params"] if _texts(other["params"]) else other.get("param_names", ())
        known = _texts(written) and len(written) == len(other["params"])
        names.append(list(written) if known else [])
    canonical = iter(canonical_names([name for own in names for name in own]))
    return [[next(canonical) for _ in own] for own in names]


def _texts(names: Any) -> bool:
    return isinstance(names, (list, tuple)) and len(names) > 0 and all(isinstance(name, str) for name in names)


def _matched(where: str, own: Sequence[str | None], other: Mapping[str, Any], got: Sequence[str]) -> list[Any]:
    """Return, for each parameter of a group, the key of its state in a checkpoint.

    Parameters are matched with saved parameters by name, or by order if a name is unknown or not unique.

    where: name of the group in errors, such as "group 0".
    own: names of the optimizer's parameters in the group; None for an unknown name.
    other: the saved param group. Its entry 'params' has the keys.
    got: names of the saved parameters, in the order of the keys; empty if they are unknown.

    Raises:
        ValueError: the names differ from the saved names.
    """
    keys, here, there = list(other["params"]), {*own}, {*got}
    if None in here or not got or len(here) < len(own) or len(there) < len(got):
        return keys
    missing, unexpected = [name for name in own if name not in there], [name for name in got if name not in here]
    if not missing and not unexpected:
        place = dict(zip(got, keys, strict=True))
        return [place[str(name)] for name in own]
    # torch.distributed.checkpoint has replaced the indices in 'params' by names of its own. Their order is that of
    # this optimizer's parameters, so that the parameters are matched by order.
    if _texts(keys) and len(keys) == len(own):
        return keys
    raise ValueError(
        f"state_dict: {where} was saved for other parameters (missing: {_listed(missing)}, unexpected: "
        f"{_listed(unexpected)}); load it into an optimizer of the same model with the same groups"
    )


def _listed(names: Sequence[str | None]) -> str:
    return name_some([f"'{name}'" for name in names], 8) or "none"
