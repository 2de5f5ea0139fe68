"""Real training over ranks, with `DistributedDataParallel` or `fully_shard`: the losses of the whole batch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import eigengraft
from eigengraft import load_recipe

from .models import LENGTH, TOKENS, lay_out, model

STEPS, BATCH = 6, 12
SPREAD = ["update.eigenbasis.refresh.steps=3", "update.eigenbasis.refresh.min_wave_work=1"]
OVERRIDES = ["blocking.size=8", "blocking.merge=8", *SPREAD, "lr=0.003", "update.eigenbasis.inner.rms.eps=1e-6"]
"""The eps is far above the rounding of gradients, about 1e-9: directions without gradient would follow rounding."""


def run(job: dict[str, Any]) -> list[float]:
    """The mean loss of every batch before each step; a rank sees an equal share of it."""
    place = job["place"]
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    inner = lay_out(model(), "plain" if place == "ddp" else place)
    module = DistributedDataParallel(inner) if place == "ddp" else inner
    declared = job.get("recipe", "soap_fitted")
    overrides = [*(OVERRIDES if declared == "soap_fitted" else []), *job["overrides"]]
    recipe = load_recipe(declared, overrides).replace(sam=job.get("sam"))
    optimizer = eigengraft.compose(recipe, module)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step % 2))
        share = tokens.chunk(ranks)[rank]

        def closure(own: Tensor = share) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(module, own)
            loss.backward()
            return loss

        total = optimizer.step(closure).detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(float(total) / ranks)
    return losses


def interrupted(job: dict[str, Any]) -> dict[str, list[float]]:
    """The mean loss of every batch before each step, with what loops do between steps: a batch is thrown away, two
    micro-batches are accumulated, and losses are scaled.

    job["recipes"]: overrides of each recipe, each of which is run twice: once gradients are thrown away as None and
    only the second micro-batch is reduced over ranks, once they are made zero and both are reduced.
    """
    found = {}
    for recipe, overrides in job["recipes"].items():
        found[f"{recipe} none"] = _interrupted(job["place"], recipe, overrides, none=True)
        found[f"{recipe} zero"] = _interrupted(job["place"], recipe, overrides, none=False)
    return found


def _interrupted(place: str, recipe: str, overrides: list[str], none: bool) -> list[float]:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    inner = lay_out(model(), "plain" if place == "ddp" else place)
    module = DistributedDataParallel(inner, gradient_as_bucket_view=none) if place == "ddp" else inner
    optimizer = eigengraft.compose(load_recipe(recipe, overrides), module)
    losses, scaler = [], torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step % 2))
        scaler.scale(100 * loss_of(module, tokens.flip(0).chunk(ranks)[rank][:3])).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad(set_to_none=none)
        total = torch.zeros(())
        for last, share in enumerate(tokens.chunk(ranks)[rank].chunk(2)):
            with module.no_sync() if place == "ddp" and none and not last else contextlib.nullcontext():
                if place == "fsdp":
                    module.set_requires_gradient_sync(bool(last) or not none)
                loss = loss_of(module, share) / 2
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=none)
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(float(total) / ranks)
    return losses


def tensor_parallel(job: dict[str, list[str]]) -> dict[str, list[float]]:
    """The losses of two layers, divided by columns and by rows where there are ranks; job: {recipe: overrides}."""
    found = {}
    for recipe, overrides in job.items():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 6, bias=False))
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
            parallelize_module(module, mesh, plan)
        optimizer = eigengraft.compose(recipe, module, lr=0.05, overrides=[*overrides, "routes=[]"])
        found[recipe] = []
        for step in range(STEPS):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            found[recipe].append(float(loss.detach()))
    return found


def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    return nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
