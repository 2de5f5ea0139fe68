"""Copies of a distributed optimizer: what they are, and whether they go on as the original does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer, load_recipe

from .models import lay_out, model, whole
from .trajectories import give


def run(place: str) -> dict[str, Any]:
    """By kind of copy: the original's parameters after two more steps, and the copy's."""
    return {kind: go_on(place, kind) for kind in ("deepcopy", "pickle")}


def go_on(place: str, kind: str) -> tuple[list[Tensor], list[Tensor], int]:
    """(parameters of the original, of the copy, gradients that the copy has seen)."""
    module = lay_out(model(), place)
    recipe = load_recipe("soap_fitted", ["blocking.size=8", "blocking.merge=8", "update.eigenbasis.refresh.steps=2"])
    optimizer = eigengraft.compose(recipe, module)
    step(optimizer, module, 0)
    twin: Optimizer = copy.deepcopy(optimizer) if kind == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    for number in (1, 2, 3):
        step(optimizer, module, number)
        for group, other in zip(optimizer.param_groups, twin.param_groups, strict=True):
            for parameter, own in zip(group["params"], other["params"], strict=True):
                own.grad = parameter.grad
        twin.step()
    found = [[whole(p) for group in one.param_groups for p in group["params"]] for one in (optimizer, twin)]
    return found[0], found[1], max(int(state["step"]) for state in twin.state.values())


def step(optimizer: Optimizer, module: nn.Module, number: int) -> None:
    """One step of the original."""
    give(module, number, gaps=False)
    optimizer.step()
