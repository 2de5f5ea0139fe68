"""Trajectories in every layout along given gradients, compared on the spot with one process: those of every recipe, and
those that stop in one layout and go on in another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import eigengraft
from eigengraft import Optimizer, Recipe, load_recipe
from eigengraft.numerics import local
from eigengraft.optimizers import submodel

from .layouts import LAYOUTS, gradient, lay_gradient, plain_name, small, stack

STEPS = 5
HALF, ALL = 2, 4
"""Steps before and after which a trajectory stops that goes on elsewhere; a refresh is in each half."""


def alone(job: dict[str, Any]) -> None:
    """job: {path, recipes: {recipe: overrides}}. Saves the parameters after all steps, by recipe."""
    found = {}
    for recipe, overrides in job["recipes"].items():
        module = stack()
        follow(module, recipe, overrides)
        found[recipe] = {name: p.detach() for name, p in module.named_parameters()}
    found["start"] = {name: p.detach() for name, p in stack().named_parameters()}
    torch.save(found, job["path"])


def run(job: dict[str, Any]) -> dict[str, dict[str, list[float]] | str]:
    """job: {path, recipes, cells: [(layout, recipe)]}. For each "layout recipe" what `compare` finds of each parameter,
    or an error."""
    expected, recipes = torch.load(job["path"], weights_only=True), job["recipes"]
    return {f"{layout} {recipe}": cell(layout, recipe, recipes[recipe], expected) for layout, recipe in job["cells"]}


def cell(
    layout: str, recipe: str, overrides: list[str], expected: dict[str, dict[str, Tensor]]
) -> dict[str, list[float]] | str:
    """One recipe in one layout. A layout that is refused is so on all ranks: they go on together."""
    try:
        module = laid(layout, stack)
        follow(module, recipe, overrides, part=layout == "pp_fsdp")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    values = expected[recipe]
    found = {plain_name(name): p.detach() for name, p in module.named_parameters()}
    assert found.keys() == values.keys() or (layout == "pp_fsdp" and found.keys() < values.keys())
    return {name: compare(p, values[name]) for name, p in found.items()}


@cache
def _laid(layout: str, make: Callable[[], nn.Module]) -> tuple[nn.Module, list[Tensor]]:
    module = make() if layout == "plain" else LAYOUTS[layout](make())  # type: ignore[arg-type]
    return module, [local(p).clone() for p in module.parameters()]


def laid(layout: str, make: Callable[[], nn.Module]) -> nn.Module:
    """The model in a layout, wrapped once: its parameters have their first values again, and no gradients."""
    module, start = _laid(layout, make)
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), start, strict=True):
            local(parameter).copy_(value)
            parameter.grad = None
    return module


def follow(module: nn.Module, recipe: str, overrides: list[str], part: bool = False) -> None:
    """All steps of one optimizer; part: the module has some layers of the model, which the optimizer is told."""
    given: Any = module
    if part:
        with torch.device("meta"):
            given = submodel(module, full=stack())
    go_on(module, eigengraft.compose(loaded(json.dumps(recipe), tuple(overrides)), given), range(STEPS))


def go_on(module: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Some steps."""
    for step in steps:
        for full, parameter in module.named_parameters():
            name = plain_name(full)
            whole = gradient(name, parameter.shape, step)
            parameter.grad = lay_gradient(whole, parameter, name, step) if parameter.requires_grad else None
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


# stopped in one layout, gone on with in another


FLAGS = {
    "flat": "flatten_optimizer_state_dict",
    "full": "full_state_dict",
    "offload": "cpu_offload",
    "broadcast": "broadcast_from_rank0",
    "trained": "ignore_frozen_params",
}


def start(layout: str, recipe: Any, overrides: list[str]) -> tuple[nn.Module, Optimizer]:
    """The small model in a layout; plain: as it is."""
    module = laid(layout, small)
    return module, eigengraft.compose(loaded(json.dumps(recipe), tuple(overrides)), module)


@cache
def loaded(recipe: str, overrides: tuple[str, ...]) -> Recipe:
    """A recipe of this JSON with overrides."""
    return load_recipe(json.loads(recipe), overrides)


def uninterrupted(job: dict[str, Any]) -> None:
    """job: {path, recipe, overrides}. Saves the parameters after all steps."""
    module, optimizer = start("plain", job["recipe"], job["overrides"])
    go_on(module, optimizer, range(ALL))
    torch.save({name: p.detach() for name, p in module.named_parameters()}, job["path"])


def state_of(module: nn.Module, optimizer: Optimizer, kind: str) -> tuple[dict[str, Any], StateDictOptions]:
    """What torch's functions read; kind: the flags that are set, apart from those that only loading has."""
    flags = [] if kind == "tree" else kind.split()
    options = StateDictOptions(strict="trained" not in flags, **{FLAGS[flag]: True for flag in flags})
    model, state = get_state_dict(module, optimizer, options=options)
    return {"model": model, "optimizer": state}, options


def save(job: dict[str, Any]) -> None:
    """job: {folder, kinds, layout, recipe, overrides}. Files of every kind after half of the steps."""
    folder, kinds = Path(job.pop("folder")), job.pop("kinds")
    module, optimizer = start(**job)
    go_on(module, optimizer, range(HALF))
    for kind in kinds:
        if kind == "whole":
            model = state_of(module, optimizer, "full")[0]["model"]
            state = {"model": model, "optimizer": optimizer.full_state_dict()}
        else:
            state, _ = state_of(module, optimizer, kind)
        if "full" in kind or kind == "whole":
            if dist.get_rank() == 0:
                torch.save(state, folder / f"{kind}.pt")
        else:
            dcp.save(state, checkpoint_id=folder / kind)


def load(job: dict[str, Any]) -> dict[str, dict[str, list[float]] | str]:
    """job: {path, folders, layout, recipe, overrides}; folders: {"source, kind": folder}. What `compare` finds of each
    parameter after the other half of the steps, or an error."""
    expected, folders = torch.load(job.pop("path"), weights_only=True), job.pop("folders")
    found: dict[str, dict[str, list[float]] | str] = {}
    for name, folder in folders.items():
        module, optimizer = start(**job)
        try:
            resume(module, optimizer, Path(folder), name.partition(", ")[2])
            go_on(module, optimizer, range(HALF, ALL))
            found[name] = {
                plain_name(n): compare(p.detach(), expected[plain_name(n)]) for n, p in module.named_parameters()
            }
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def resume(module: nn.Module, optimizer: Optimizer, folder: Path, kind: str) -> None:
    """Loads what was saved; with broadcast, the first rank alone has read it."""
    saved = folder / kind.replace("broadcast", "offload")
    if kind == "whole":
        state = torch.load(saved.with_suffix(".pt"), weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        set_model_state_dict(module, state["model"], options=StateDictOptions(full_state_dict=True))
        return
    if "full" in kind:
        options = StateDictOptions(**{FLAGS[flag]: True for flag in kind.split()})
        alone = "broadcast" in kind and dist.get_rank() > 0
        state = {"model": {}, "optimizer": {}} if alone else torch.load(saved.with_suffix(".pt"), weights_only=True)
    else:
        state, options = state_of(module, optimizer, kind)
        dcp.load(state, checkpoint_id=saved)
    # not `set_state_dict`: it takes a rank that has read nothing for one that has no model
    set_model_state_dict(module, state["model"], options=options)
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=options)
