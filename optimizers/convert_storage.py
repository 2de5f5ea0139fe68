"""Conversion of a state dict to another `storage`: explicit, because another rounding is another trajectory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eigengraft.distributed.distribution import Distribution
from eigengraft.slots import State, StateKey, Storage

from .isolation import isolation
from .optimizer import Optimizer
from .recipe.loading import load_recipe
from .recipe.overrides import differences
from .recipe.recipe import Recipe
from .recipe.routing import DescribedParameters
from .stacks.stack import StackState
from .state.shown_state import is_host_key


def convert_storage(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of a run with another `storage`, as `optimizer.load_state_dict` takes it; nothing is changed.

    Every slot is decoded from the storage that it was saved in and encoded, to nearest, in the optimizer's. The recipes
    must be the same but for `storage`, the parameters the same and trained on both sides, and the checkpoint must have
    been taken in training mode. Raises ValueError otherwise.
    """
    with isolation(optimizer):
        return _converted(state_dict, optimizer)


def _converted(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    groups = list(state_dict["param_groups"])
    texts = {str(group.get("recipe")) for group in groups}
    modes = {group.get("iterate", "train") for group in groups}
    if len(texts) != 1 or modes != {"train"}:
        raise ValueError("state_dict: one recipe for all groups, and iterates to train, are required for a conversion")
    recipe = load_recipe(texts.pop())
    _require_alike(recipe, optimizer.recipe)
    source, target = _twin(optimizer, recipe), _twin(optimizer, optimizer.recipe)
    source.load_state_dict(dict(state_dict))
    pairs = list(zip(source.stack_states(), target.stack_states(), strict=False))
    if len(source.stack_states()) != len(target.stack_states()) or any(
        a.stack.grids != b.stack.grids for a, b in pairs
    ):
        raise ValueError("state_dict: the same parameters must be trained on both sides of a conversion")
    for old, new in pairs:
        _recode(old, new)
    for parameter, state in source.state.items():
        for key, value in state.items():
            if is_host_key(key):
                target.state[parameter][key] = value
            elif StateKey.parse(key).block is None:  # steps and iterates, which belong to no block
                target.state[parameter][key].copy_(value)
    converted = target.state_dict()
    own = [
        {key: group[key] for key in ("params", "param_names") if key in group} for group in converted["param_groups"]
    ]
    wanted = {"recipe": optimizer.recipe.to_json()}
    return {**converted, "param_groups": [{**old, **new, **wanted} for old, new in zip(groups, own, strict=True)]}


def _require_alike(saved: Recipe, wanted: Recipe) -> None:
    plain = [
        json.loads(recipe.replace(storage={}, name=None, about=None, distribution=Distribution()).to_json())
        for recipe in (saved, wanted)
    ]
    changed = differences(*plain)
    if changed:
        raise ValueError("state_dict: another recipe than its storage alone (saved -> wanted):\n" + "\n".join(changed))


def _twin(optimizer: Optimizer, recipe: Recipe) -> Optimizer:
    """An optimizer of the same parameters with fresh state, which is never stepped."""
    infos, groups = {}, []
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        params = list(zip(names, group["params"], strict=True)) if names else group["params"]
        groups.append({"params": params, "lr": group["lr"], "weight_decay": group["weight_decay"]})
        infos.update({id(p): info for p, info in zip(group["params"], optimizer.param_sets.infos[index], strict=True)})
    return Optimizer(DescribedParameters(groups, infos), recipe.replace(distribution=Distribution(mode="local")))


def _recode(old: StackState, new: StackState) -> None:
    block = old.stack.block
    for key, _ in old.slots():
        there = State(new.tensors, block, key.stage, storage=Storage(new.encoded))
        there[key.slot] = State(old.tensors, block, key.stage, storage=Storage(old.encoded))[key.slot]
