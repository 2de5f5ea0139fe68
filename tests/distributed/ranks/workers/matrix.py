"""Trajectories of every recipe in every layout along given gradients, compared on the spot with one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import eigengraft
from eigengraft import load_recipe

from .layouts import LAYOUTS, gradient, lay_gradient, plain_name, pruned, stack

STEPS = 8


def alone(job: dict[str, Any]) -> None:
    """job: {path, recipes: {recipe: overrides}}. Saves the parameters after all steps, by recipe and place: `whole`,
    and the two stages of a pipeline with an optimizer each."""
    places = {"whole": stack, "stage 0": lambda: pruned(stack(), 0), "stage 1": lambda: pruned(stack(), 1)}
    found = {}
    for recipe, overrides in job["recipes"].items():
        for place, make in places.items():
            module = make()
            follow(module, recipe, overrides)
            found[f"{recipe} {place}"] = {name: p.detach() for name, p in module.named_parameters()}
    found["start"] = {name: p.detach() for name, p in stack().named_parameters()}
    torch.save(found, job["path"])


def run(job: dict[str, Any]) -> dict[str, dict[str, list[float]] | str]:
    """job: {path, recipes, layouts}. For each "layout recipe" what `compare` finds of each parameter, or an error."""
    expected = torch.load(job["path"], weights_only=True)
    return {
        f"{layout} {recipe}": cell(layout, recipe, overrides, expected)
        for layout in job["layouts"]
        for recipe, overrides in job["recipes"].items()
    }


def cell(
    layout: str, recipe: str, overrides: list[str], expected: dict[str, dict[str, Tensor]]
) -> dict[str, list[float]] | str:
    """One recipe in one layout. A layout that is refused is so on all ranks: they go on together."""
    try:
        module = LAYOUTS[layout](stack())
        follow(module, recipe, overrides)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    place = "whole"
    if layout == "pp_fsdp":
        place = f"stage {2 * dist.get_rank() // dist.get_world_size()}"
    values = expected[f"{recipe} {place}"]
    found = {plain_name(name): p.detach() for name, p in module.named_parameters()}
    assert found.keys() == values.keys()
    return {name: compare(p, values[name]) for name, p in found.items()}


def follow(module: nn.Module, recipe: str, overrides: list[str]) -> None:
    """All steps of one optimizer."""
    optimizer = eigengraft.compose(load_recipe(recipe, overrides), module)
    for step in range(STEPS):
        for full, parameter in module.named_parameters():
            name = plain_name(full)
            whole = gradient(name, parameter.shape, step)
            parameter.grad = lay_gradient(whole, parameter, name, step)
        optimizer.step()


def compare(parameter: Tensor, expected: Tensor) -> list[float]:
    """[largest distance of what this rank holds, largest entry of it all, number of entries held]."""
    local, box = parameter, tuple(slice(0, n) for n in expected.shape)
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        box = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
    apart = (local - expected[box]).abs()
    return [float(apart.max()) if apart.numel() else 0.0, float(expected.abs().max()), local.numel()]
