"""Checkpoints: strict, exact, and without casts (torch's own loading casts state to the parameter's dtype)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .overrides import differences

if TYPE_CHECKING:
    from .optimizer import Optimizer


def take_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Load pre-hook: checks a state dict against the optimizer, keeps its raw state, and hands torch the rest."""
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    _compare_groups(groups, saved)
    ours = [parameter for group in groups for parameter in group["params"]]
    theirs = [index for group in saved for index in group["params"]]
    incoming = {p: state_dict["state"].get(index, {}) for p, index in zip(ours, theirs, strict=True)}
    facts = [fact for facts in optimizer._facts for fact in facts]
    faults = []
    for position, (parameter, fact) in enumerate(zip(ours, facts, strict=True)):
        own, got = optimizer.state.get(parameter), incoming[parameter]
        if own is not None:  # frozen parameters have no state of their own; what is saved for them thaws them
            faults += [f"{fact.name or f'parameter {position}'}: {fault}" for fault in _faults(own, got)]
    if faults:
        more = f"\n... and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError("state_dict does not fit, nothing was loaded:\n" + "\n".join(faults[:8]) + more)
    optimizer._incoming = incoming
    return {**state_dict, "state": {}}


def _compare_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if sizes[0] != sizes[1]:
        raise ValueError(f"state_dict: param groups of sizes {sizes[0]} are required, got {sizes[1]}")
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if "recipe" not in other:
            raise ValueError(f"state_dict: group {index} has no recipe, it was not saved by eigengraft.Optimizer")
        own, got = json.loads(group["recipe"]), json.loads(other["recipe"])
        if own.get("schema") != got.get("schema"):
            raise ValueError(f"state_dict: schema {own.get('schema')} is required, got {got.get('schema')}")
        changed = differences(got, own)
        if changed:
            raise ValueError(
                "state_dict was saved by another recipe (saved -> this optimizer's):\n" + "\n".join(changed[:8])
            )


def _faults(own: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    faults = [f"missing '{key}'" for key in own if key not in got]
    faults += [f"unexpected '{key}'" for key in got if key not in own]
    for key in own.keys() & got.keys():
        mine, other = own[key], got[key]
        if not isinstance(other, Tensor) or other.shape != mine.shape or other.dtype != mine.dtype:
            kind = f"{other.dtype} {tuple(other.shape)}" if isinstance(other, Tensor) else type(other).__name__
            faults.append(f"'{key}' of {mine.dtype} {tuple(mine.shape)} is required, got {kind}")
    return sorted(faults)


def install(optimizer: Optimizer, incoming: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Copies checked state into the optimizer's own tensors;

    parameters that are frozen here but have state are thawed.
    """
    for index, group in enumerate(optimizer.param_groups):
        thawed = [p for p in group["params"] if p not in optimizer.state and incoming.get(p)]
        if thawed:
            optimizer._adopt(index, thawed)
    for parameter, saved in incoming.items():
        for key, view in optimizer.state.get(parameter, {}).items():
            view.copy_(saved[key])


def rebuild(optimizer: Optimizer, saved: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Gives a copied or unpickled optimizer cohorts of its own, filled with the state that came along."""
    optimizer._cohorts = [[] for _ in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        optimizer._adopt(index, [parameter for parameter in group["params"] if parameter in saved])
    install(optimizer, saved)
