"""Steps far above those before, as ranks that share parameters decide about them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import eigengraft

from .models import lay_out, model
from .trajectories import give, values

STEPS, LARGE = 10, {6: 30.0, 8: 50.0}
"""Number of steps, and factors of the gradients and losses of some of them."""


def run(job: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """job: {name: arguments of `follow`}."""
    return {name: follow(**case) for name, case in job.items()}


def follow(recipe: str, place: str, then: str, measure: str) -> dict[str, Any]:
    """All steps of one case. Each rank has another loss; their mean is that of one process."""
    module = lay_out(model(), place)
    spike = {"window": 4, "sigmas": 3.0, "then": then, "measure": measure}
    optimizer = eigengraft.compose({"base": recipe, "failure": {"spike": spike}}, module, lr=0.02)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(STEPS):
        give(module, step, gaps=False)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(LARGE.get(step, 1.0))
        if measure == "loss":
            optimizer.provide("loss", (1 + step % 2) * LARGE.get(step, 1.0) * 2 * (rank + 1) / (size + 1))
        optimizer.step()
        if step == 6:  # through a checkpoint
            saved = optimizer.full_state_dict()
            optimizer = eigengraft.compose({"base": recipe, "failure": {"spike": spike}}, module, lr=0.02)
            optimizer.load_state_dict(saved)
    counts = optimizer.spikes
    assert counts is not None
    return {
        "parameters": values(module),
        "counts": tuple(counts),
        "steps": [int(x["step"]) for x in optimizer.state.values()],
    }
