"""Models whose parameters are swapped between steps, as `model.to` does with DTensors, and integer base weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import eigengraft

from .models import lay_out, model
from .trajectories import give, values

OVERRIDES = ["blocking.size=8", "blocking.merge=8"]


def run(place: str) -> dict[str, dict[str, Tensor]]:
    """Parameters after four steps, by "<recipe> <what happens to the model>"."""
    return {
        f"{recipe} {change}": steps(place, recipe, change)
        for recipe in ("adamw", "soap_fitted")
        for change in ("nothing", "early", "late", "integers")
    }


def steps(place: str, recipe: str, change: str) -> dict[str, Tensor]:
    """early, late: convert the model to float64 and back before the first step, or after two. integers: quantize the
    frozen weight before the model is laid out."""
    module = model()
    if change == "integers":
        module.frozen = nn.Linear(10, 10)
        module.frozen.weight = nn.Parameter(torch.zeros(50, 1, dtype=torch.uint8), requires_grad=False)
        module.frozen.bias.requires_grad_(False)
    module = lay_out(module, place)  # type: ignore[assignment]
    optimizer: Any = eigengraft.compose(recipe, module, overrides=OVERRIDES)
    for step in range(4):
        if (change, step) in (("early", 0), ("late", 2)):
            module.to(torch.float64).to(torch.float32)
        give(module, step, gaps=False)
        optimizer.step()
        optimizer.zero_grad()
    del module.frozen  # the same in all runs, and integers have no nan, with which `values` marks what no rank holds
    return values(module)
