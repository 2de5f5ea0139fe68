"""Conversion of a state dict to another `storage`.

A state dict is never converted implicitly, because a different rounding of state gives a different trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eigengraft.distributed.distribution import Distribution
from eigengraft.slots import State, StateKey, Storage

from .checkpoint.compare import without_silent
from .isolation import isolation
from .optimizer import Optimizer
from .recipe.loading import load_recipe
from .recipe.overrides import differences
from .recipe.recipe import Recipe
from .recipe.routing import DescribedParameters
from .state.shown_state import is_host_key


def convert_storage(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Convert a state dict to the `storage` of an optimizer.

    Every slot is decoded from its saved storage and encoded, rounding to nearest, in the optimizer's storage.

    Args:
        state_dict: state dict of a run whose recipe differs from the optimizer's only in `storage`. The function does
            not change it.
        optimizer: an optimizer of the same parameters. The function does not change it.

    Returns:
        A state dict for `optimizer.load_state_dict`.

    Raises:
        ValueError: the recipes differ in more than `storage`, the trained parameters differ, or the state dict was
            saved in evaluation mode.
    """
    with isolation(optimizer):
        return _converted(state_dict, optimizer)


def _converted(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    groups = list(state_dict["param_groups"])
    texts = {str(group.get("recipe")) for group in groups}
    modes = {group.get("iterate", "train") for group in groups}
    if len(texts) != 1 or modes != {"train"}:
        raise ValueError(
            "state_dict: cannot be converted, because its groups have different recipes or it was not saved in "
            "training mode; call optimizer.train() before state_dict()"
        )
    recipe = load_recipe(texts.pop())
    _require_alike(recipe, optimizer.recipe)
    source, target = _fresh_copy(optimizer, recipe), _fresh_copy(optimizer, optimizer.recipe)
    source.load_state_dict(dict(state_dict))
    saved, wanted = source.stack_states(), target.stack_states()
    if [old.stack.grids for old in saved] != [new.stack.grids for new in wanted]:
        raise ValueError(
            "state_dict: the parameters trained in the saved run differ from those that this optimizer trains; freeze "
            "the same parameters as in the saved run"
        )
    for old, new in zip(saved, wanted, strict=True):
        for key, _ in old.slots():
            there, here = (
                State(one.tensors, one.stack.block, key.stage, storage=Storage(one.encoded)) for one in (new, old)
            )
            there[key.slot] = here[key.slot]
    for parameter, state in source.state.items():
        for key, value in state.items():
            if is_host_key(key):
                target.state[parameter][key] = value
            elif StateKey.parse(key).block is None:  # counts and iterates, which belong to no block
                target.state[parameter][key].copy_(value)
    converted = target.state_dict()
    own = [
        {key: group[key] for key in ("params", "param_names") if key in group} for group in converted["param_groups"]
    ]
    text = optimizer.recipe.to_json()
    merged = [{**old, **new, "recipe": text} for old, new in zip(groups, own, strict=True)]
    return {**converted, "param_groups": merged}


def _require_alike(saved: Recipe, wanted: Recipe) -> None:
    plain = (without_silent(json.loads(recipe.replace(storage={}).to_json())) for recipe in (saved, wanted))
    changed = differences(*plain)
    if changed:
        raise ValueError(
            "state_dict: the recipes differ in more than storage (saved -> wanted):\n" + "\n".join(changed)
        )


def _fresh_copy(optimizer: Optimizer, recipe: Recipe) -> Optimizer:
    """Return an optimizer of the same parameters with another recipe and new state."""
    infos, groups = {}, []
    for group, made in zip(optimizer.param_groups, optimizer.param_sets.groups, strict=True):
        names = group.get("param_names")
        params = list(zip(names, group["params"], strict=True)) if names else group["params"]
        groups.append({"params": params, "lr": group["lr"], "weight_decay": group["weight_decay"]})
        infos.update({id(p): info for p, info in zip(group["params"], made.infos, strict=True)})
    return Optimizer(DescribedParameters(groups, infos), recipe.replace(distribution=Distribution(mode="local")))
