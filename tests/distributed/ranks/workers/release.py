"""Gradient release under FSDP2: gradients of shards are released during backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import eigengraft

from .models import LENGTH, TOKENS, Model, model
from .trajectories import values

STEPS = 5


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: {name: recipe}."""
    found: dict[str, Any] = {"refused": refused(), "parts": parts_of_ranks()}
    for name, recipe in job.items():
        found[name] = {"plain": follow(recipe, False), "released": follow(recipe, True)}
        found[f"stacks, {name}"] = {"plain": follow_stacks(recipe, False), "released": follow_stacks(recipe, True)}
    return found


def shards() -> Model:
    """A model whose layers are sharded one by one, so that their gradients are complete one after the other."""
    module = model()
    for layer in (module.conv, module.qkv, module.out, module.up, module.down, module):
        fully_shard(layer)
    return module


def follow(recipe: Any, released: bool) -> dict[str, Any]:
    """Follow the model of layers with two micro-batches in each step."""

    def backward(module: nn.Module, generator: torch.Generator, release: Any) -> None:
        for last in (False, True):
            tokens = torch.randint(0, TOKENS, (4, LENGTH), generator=generator)
            with release.accumulate() if release is not None and not last else nullcontext():
                nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()

    return _followed(shards(), recipe, released, backward, weight_decay=0.1)


def _followed(
    module: nn.Module, recipe: Any, released: bool, backward: Callable[..., None], **options: Any
) -> dict[str, Any]:
    """Return the parameters after some steps, how many parameters stepped during backward, and all step counts.

    backward: function of the model, a generator of numbers and the release or None, which computes the gradients.
    """
    optimizer = eigengraft.compose(recipe, module, lr=0.02, **options)
    release = eigengraft.release(module, optimizer) if released else None
    stepped = 0
    for step in range(STEPS):
        backward(module, torch.Generator().manual_seed(100 * step + dist.get_rank()), release)
        stepped += 0 if release is None else len(release.stepped)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "parameters": values(module),
        "stepped": stepped,
        "steps": [int(x["step"]) for x in optimizer.state.values()],
    }


def stacks() -> nn.Sequential:
    """A model of equal layers, whose blocks have several owners, and of vectors that few ranks own."""
    torch.manual_seed(0)
    layers = [*(nn.Linear(8, 8) for _ in range(6)), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 3)]
    module = nn.Sequential(*layers)
    for layer in (*module, module):
        fully_shard(layer)
    return module


def follow_stacks(recipe: Any, released: bool) -> dict[str, Any]:
    """Follow the model of equal layers."""

    def backward(module: nn.Module, generator: torch.Generator, _: object) -> None:
        module(torch.randn(4, 8, generator=generator)).square().mean().backward()

    return _followed(stacks(), recipe, released, backward)


def parts_of_ranks() -> str:
    """Return the error of `release` for ranks with different numbers of parts."""
    module = stacks()
    try:
        eigengraft.release(module, eigengraft.compose("muon", module), parts=2 + dist.get_rank())
    except ValueError as error:
        return str(error)
    return ""


def refused() -> list[str]:
    """Return the errors of `release` for models whose gradients are averaged after they are complete."""
    said = []
    for wrapped in (False, True):
        module: nn.Module = model()
        optimizer = eigengraft.compose("adamw", module)
        if wrapped:
            module = nn.parallel.DistributedDataParallel(module)
        try:
            eigengraft.release(module, optimizer)
        except ValueError as error:
            said.append(str(error))
    return said
