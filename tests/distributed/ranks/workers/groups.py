"""Process groups of an optimizer whose parameter sets are made anew again and again."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import eigengraft

from .models import LENGTH, TOKENS
from .release import shards
from .trajectories import values

STEPS, EARLY = 8, "distribution.overlap_backward=true"


def run(job: dict[str, list[str]]) -> dict[str, Any]:
    """job: {name: overrides}."""
    return {name: follow(overrides) for name, overrides in job.items()}


def follow(overrides: list[str]) -> dict[str, Any]:
    """The number of process groups after each step, the parameters at the end, and those that have hooks.

    Between backward and step, when messages are under way, the state of a parameter is removed at every other step.
    """
    module, before, counts, hooks = shards(), groups(), list[int](), list[int]()
    optimizer = eigengraft.compose("muon", module, lr=0.02, overrides=overrides)
    weight = module.up.weight  # type: ignore[union-attr]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, TOKENS, (4, LENGTH), generator=generator)
        nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
        if step % 2:
            del optimizer.state[weight]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        counts.append(groups() - before)
        hooks.append(max(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()))
    return {"groups": counts, "hooks": hooks, "parameters": values(module)}


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)
