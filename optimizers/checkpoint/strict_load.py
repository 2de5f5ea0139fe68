"""Checkpoints: strict, exact, and without casts (torch's own loading casts state to the parameter's dtype)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..apply.mode import MODES, Mode
from ..param_groups import check_values
from ..recipe.overrides import differences
from ..recipe.recipe import SCHEMA_VERSION
from .sharded_state import full_tensor, local_state, manifest

if TYPE_CHECKING:
    from ..engine.param_set import ParamSet


def take_state(optimizer: Any, state_dict: Any) -> dict[str, Any]:
    """Load pre-hook: checks a state dict against the optimizer, keeps its raw state, and hands torch the rest."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"state_dict: a mapping with 'state' and 'param_groups' is required, got a {type(state_dict).__name__}"
        )
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    _compare_groups(groups, saved)
    mode = saved_mode(saved, optimizer.recipe.averaging is not None)
    known = {index for group in saved for index in group["params"]}
    faults = [f"state for an unknown parameter {index!r}" for index in state_dict["state"] if index not in known]
    loaded = []
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        pairs = zip(group["params"], other["params"], strict=True)
        values = {parameter: state_dict["state"].get(key, {}) for parameter, key in pairs}
        param_sets = optimizer._param_sets[index]
        if any(values[p] and p not in optimizer.state for p in values):  # frozen here, but it was trained there
            wanted = {id(p) for p in values if values[p] or p in optimizer.state}
            param_sets = optimizer._build(index, wanted)
        for param_set in param_sets:
            wanted_state = param_set.views(mode) if param_set.rank_sync is None else manifest(param_set, mode)
            for name, parameter, own in zip(param_set.names, param_set.parameters, wanted_state, strict=True):
                faults += [f"{name}: {fault}" for fault in _faults(own, values[parameter])]
        loaded.append((param_sets, values))
    optimizer._loaded = []
    _refuse(faults, [param_set for param_sets, _ in loaded for param_set in param_sets])
    optimizer._loaded = [(param_sets, _own(param_sets, values, mode)) for param_sets, values in loaded]
    return {**state_dict, "state": {}}


def _own(param_sets: list[ParamSet], values: Mapping[Any, Any], mode: Mode) -> dict[Any, Any]:
    """What this rank keeps of the state of a group that fits; the formats of what is stored are checked too."""
    kept = dict(values)
    for param_set in param_sets:
        if param_set.rank_sync is None:
            kept.update(
                {p: {key: full_tensor(value) for key, value in values[p].items()} for p in param_set.parameters}
            )
            continue
        kept.update(local_state(param_set, values, mode))
        faults = []
        for name, parameter, own in zip(param_set.names, param_set.parameters, param_set.views(mode), strict=True):
            faults += [f"{name}: {fault}" for fault in _faults(own, kept[parameter])]
        _refuse(faults, [param_set])
    return kept


def _refuse(faults: list[str], param_sets: list[ParamSet]) -> None:
    """Raises if there are faults, here or on another rank."""
    more = f"\n... and {len(faults) - 8} more" if len(faults) > 8 else ""
    message = "state_dict: it does not fit, nothing was loaded:\n" + "\n".join(faults[:8]) + more if faults else None
    for rank_group in {
        id(c.rank_sync.rank_group): c.rank_sync.rank_group for c in param_sets if c.rank_sync is not None
    }.values():
        rank_group.raise_on_any(message, "agreement on a state dict")
    if message is not None:
        raise ValueError(message)


def _compare_groups(groups: list[dict[str, Any]], saved: Any) -> None:
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


def _faults(own: Mapping[str, Any], got: Any) -> list[str]:
    if not isinstance(got, Mapping):
        return [f"a mapping of slots is required, got {type(got).__name__}"]
    faults = [f"missing '{key}'" for key in own if key not in got]
    faults += [f"unexpected '{key}'" for key in got if key not in own]
    for key in own.keys() & got.keys():
        mine, other = own[key], got[key]
        if not isinstance(other, Tensor) or other.shape != mine.shape or other.dtype != mine.dtype:
            kind = f"{other.dtype} {tuple(other.shape)}" if isinstance(other, Tensor) else type(other).__name__
            faults.append(f"'{key}' of {mine.dtype} {tuple(mine.shape)} is required, got {kind}")
        elif key.endswith("/format") and isinstance(mine, Tensor) and not torch.equal(mine.cpu(), other.cpu()):
            faults.append(f"'{key.removesuffix('/format')}' is stored in another format or with another code book")
    return sorted(faults)
