"""Gradients of single layers of a small language model: samples of a realistic distribution."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

import eigengraft

from ...training.loading import load_experiment

GRADIENT_LAYERS = (
    "blocks.0.attention.query",
    "blocks.0.attention.value",
    "blocks.0.attention.mix",
    "blocks.1.attention.query",
    "blocks.1.attention.value",
    "blocks.1.attention.mix",
)


@lru_cache(maxsize=4)
def layer_gradients(width: int, samples: int, seed: int = 0, steps: int = 100) -> Tensor:
    """`[samples, layers, width, width]`, float64, at the weights after `steps` steps of AdamW, each of a new batch.

    Every layer is scaled so that its gradients have the mean squared norm 1.
    The result is cached: do not write into it.
    """
    task = {"kind": "byte_lm", "width": width, "heads": 2, "context": 32, "batch_size": 8, "max_bytes": 2**20}
    experiment = load_experiment({"task": task, "recipe": "adamw", "lr": 5e-3, "seed": seed})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # another number of threads may change the last bits
    try:
        dataset, model = experiment.task.load(), experiment.task.new_model(seed)
        optimizer = eigengraft.compose(experiment.run_recipe, model, lr=experiment.lr)
        for step in range(steps):
            batch = dataset.batch(seed, step)
            optimizer.zero_grad()
            experiment.task.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        weights = [model.get_parameter(f"{layer}.weight") for layer in GRADIENT_LAYERS]
        found = []
        for step in range(steps, steps + samples):
            batch = dataset.batch(seed, step)
            loss = experiment.task.loss(model(batch.inputs), batch.targets)
            found.append(torch.stack(torch.autograd.grad(loss, weights)).double())
    finally:
        torch.set_num_threads(threads)
    gradients = torch.stack(found)
    return gradients / gradients.square().sum((2, 3), keepdim=True).mean(0, keepdim=True).sqrt()
