"""Trajectories of distributed optimizers along given gradients: `run` on each rank, for many cases in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import load_recipe

from .hosts import prepare
from .models import divided, lay_out, model, wholes

STEPS = 16
EVALUATED, EMPTY, SPOILT, THAWED = (5, 11), 6, 8, 7
"""Steps after which the other iterate is looked at, without gradients, with one that is not finite, and of thawing."""


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: {name: case}; case: see `follow`."""
    return {name: follow(**case) for name, case in job.items()}


def follow(recipe: Any, place: str, overrides: Sequence[str] = (), gaps: bool = False, **of_model: Any) -> Any:
    """All steps of one case; what is common to all ranks, and what is this rank's own.

    place: where `lay_out` puts the parameters; late: a host shards them after the optimizer was made.
    gaps: whether some parameters miss a step that others take. of_model: what `build` takes.
    """
    looks = range(STEPS) if of_model.pop("always", False) else EVALUATED
    module = lay_out(build(**of_model), "plain" if place == "late" else place)
    # a model's frozen parameters are left out, those of a list may be thawed
    parameters = module.named_parameters() if gaps else module
    optimizer = eigengraft.compose(load_recipe(recipe, list(overrides)), parameters)
    if place == "late":
        prepare(module, optimizer)
    evaluated = []
    for step in range(STEPS):
        if gaps and step == THAWED:
            module.frozen.requires_grad_(True)  # type: ignore[union-attr]
        give(module, step, gaps)
        optimizer.step()
        if step in looks:
            optimizer.eval()
            evaluated.append(values(module))
            optimizer.train()
    return {
        "start": values(build(**of_model)),
        "parameters": values(module),
        "evaluated": evaluated,
        "bytes": optimizer.state_bytes(),
        # routes are for entry-wise updates, which every rank computes some rows of
        "blocks": sum(len(unit.stack.param_ids) for unit in optimizer.stack_states() if not unit.path),
        "skipped": dict(optimizer.skipped),
        "steps": {n: int(optimizer.state[p]["step"]) for n, p in module.named_parameters() if p in optimizer.state},
    }


def build(dtype: str = "float32", sizes: Sequence[int] = (10, 13), only: str = "") -> nn.Module:
    """The model; only: a prefix of the parameters that are trained."""
    module = model(*sizes, getattr(torch, dtype))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name.startswith(only))
    return module


def give(module: nn.Module, step: int, gaps: bool) -> None:
    """The same gradients on every rank, each rank holding its part: none at all at one step; with gaps, none for some
    parameters at every fifth, and one with a NaN."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in module.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        missing = step == EMPTY or (gaps and step % 5 == 3 and name.startswith("up"))
        if gaps and step == SPOILT and name == "down.weight":
            gradient[3, 4] = float("nan")
        parameter.grad = divided(gradient, parameter) if parameter.requires_grad and not missing else None


def values(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name."""
    named = dict(module.named_parameters())
    return dict(zip(named, wholes(named.values()), strict=True))
