"""Comparison of the param groups of a state dict with an optimizer's: sizes, names, recipe and mode."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..apply.mode import MODES, Mode
from ..param_groups import check_values
from ..recipe.overrides import differences
from ..recipe.recipe import SCHEMA_VERSION


def compare_groups(groups: Sequence[Mapping[str, Any]], saved: Any) -> None:
    """Raises ValueError for the first difference that forbids loading the saved groups."""
    if not isinstance(saved, list) or not all(isinstance(other, Mapping) and "params" in other for other in saved):
        raise ValueError("state_dict: 'param_groups' must be a list of groups with 'params'")
    sizes = [len(group["params"]) for group in groups], [len(other["params"]) for other in saved]
    if sizes[0] != sizes[1]:
        raise ValueError(f"state_dict: param groups of sizes {sizes[0]} are required, got {sizes[1]}")
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if "recipe" not in other:
            raise ValueError(f"state_dict: group {index} has no recipe, it was not saved by eigengraft.Optimizer")
        missing = [key for key in ("lr", "weight_decay", "peak_lr") if key not in other]
        if missing:
            raise ValueError(f"state_dict: group {index} must have '{missing[0]}', got {sorted(other)}")
        check_values({**other, "params": []})
        _compare_names(group.get("param_names"), other.get("param_names"))
        _compare_recipes(group["recipe"], other["recipe"])


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


def _compare_names(own: list[str] | None, got: list[str] | None) -> None:
    for mine, other in zip(own or [], got or [], strict=False):
        if mine != other:
            raise ValueError(f"state_dict: the parameters are in another order, '{mine}' is required, got '{other}'")


def _compare_recipes(own: str, got: Any) -> None:
    try:
        mine, other = json.loads(own), json.loads(got)
    except (TypeError, ValueError):
        raise ValueError("state_dict: the recipe in a param group must be JSON text, got something else") from None
    if not isinstance(other, dict) or other.get("schema") != SCHEMA_VERSION:
        got_version = other.get("schema") if isinstance(other, dict) else None
        raise ValueError(f"state_dict: a recipe of schema {SCHEMA_VERSION} is required, got {got_version}")
    for label in ("name", "about", "distribution"):  # they do not change what a recipe computes
        mine.pop(label, None)
        other.pop(label, None)
    changed = differences(other, mine)
    if changed:
        raise ValueError(
            "state_dict was saved by another recipe (saved -> this optimizer's):\n" + "\n".join(changed[:8])
        )
