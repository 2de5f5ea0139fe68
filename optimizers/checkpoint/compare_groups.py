"""Comparison of the param groups of a state dict with an optimizer's: parameters, recipe and mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from eigengraft.errors import name_some

from ..param_groups import check_values
from ..recipe.param_names import canonical_names
from ..recipe.routing import ParamInfo
from ..write.averaging import MODES, Mode
from .compare_recipes import RecipeChange, compare_recipes


def compare_groups(
    groups: Sequence[Mapping[str, Any]], infos: Sequence[Sequence[ParamInfo]], saved: Any
) -> tuple[list[list[Any]], RecipeChange]:
    """For each group, the saved key of each of its parameters, and what differs between the recipes.

    Raises ValueError for what forbids loading the saved groups.

    infos: of the parameters of each group. Where their names are known on both sides the order plays no role.
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
        raise ValueError(f"state_dict: param groups of sizes {sizes[0]} are required, got {sizes[1]}")
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if "recipe" not in other:
            raise ValueError(f"state_dict: group {index} has no recipe, it was not saved by eigengraft.Optimizer")
        missing = [key for key in ("lr", "weight_decay") if key not in other]
        if missing:
            raise ValueError(f"state_dict: group {index} must have '{missing[0]}', got {sorted(other)}")
        check_values({**other, "params": []})
        if str(other["recipe"]) not in changes:
            changes[str(other["recipe"])] = compare_recipes(
                group["recipe"], other["recipe"], [*chain.from_iterable(infos)]
            )
    if len(changes) > 1:
        raise ValueError("state_dict: one recipe for all param groups is required, got several")
    change = next(iter(changes.values()), RecipeChange())
    if change.meaning:
        raise ValueError(change.refusal([]))
    return keys, change


def saved_mode(groups: Sequence[Mapping[str, Any]], averages: bool) -> Mode:
    """The mode that saved groups agree on; ValueError if they do not, or if it is impossible without averaging."""
    found = [group.get("iterate", "train") for group in groups]
    for index, mode in enumerate(found):
        if mode not in MODES or mode != found[0]:
            wanted = "'train' or 'eval', the same in all groups,"
            raise ValueError(f"state_dict: group {index}: 'iterate': {wanted} is required, got {mode!r}")
        if mode == "eval" and not averages:
            raise ValueError(f"state_dict: group {index}: 'iterate': 'train' is required without averaging, got 'eval'")
    return "eval" if "eval" in found else "train"


def _saved_names(saved: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Canonical names of the parameters of each saved group; an empty list where they are not known.

    Keys that torch.distributed.checkpoint has made names of count before `param_names`, which it does not reorder.
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
    """The saved key of each parameter of a group: by name, or by order where a name is unknown or not unique."""
    keys, here, there = list(other["params"]), {*own}, {*got}
    if None in here or not got or len(here) < len(own) or len(there) < len(got):
        return keys
    missing, unexpected = [name for name in own if name not in there], [name for name in got if name not in here]
    if not missing and not unexpected:
        place = dict(zip(got, keys, strict=True))
        return [place[str(name)] for name in own]
    if _texts(keys) and len(keys) == len(own):  # names of a model, in the optimizer's order: torch has put them there
        return keys
    raise ValueError(
        f"state_dict: {where}: parameters are missing: {_listed(missing)}, unexpected: {_listed(unexpected)}"
    )


def _listed(names: Sequence[str | None]) -> str:
    return name_some([f"'{name}'" for name in names], 8) or "none"
