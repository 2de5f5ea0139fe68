"""Record factor matrices from the training of a small language model into `recorded.npz` beside this file.

    python -m eigengraft.experiments.benches.problems.record_factors [FILE]

The byte-level task with its default model is trained with the shipped recipe `shampoo` (Gram statistics, beta 0.95).
After 10, 100 and 300 steps the factors of four layers that are at most 64 long are recorded, corrected for bias, as the
upper triangles in float32. Equal machines and equal texts give equal files; the file names its text and its torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import eigengraft
from eigengraft.state_key import StateKey

from ...training.loading import load_experiment
from .recorded import FILE

RECORDED_LAYERS = ("blocks.0.attention.query", "blocks.0.attention.mix", "blocks.1.attention.value", "blocks.1.down")
RECORDED_STEPS = (10, 100, 300)
FACTOR_SIZE = 64
RECORDED_EXPERIMENT = {"task": {"kind": "byte_lm", "max_bytes": 2**20}, "recipe": "shampoo", "lr": 8e-3}


def record(
    steps: Iterable[int] = RECORDED_STEPS, layers: Iterable[str] = RECORDED_LAYERS
) -> dict[str, NDArray[np.float32]]:
    """Train for max(steps) steps; name -> upper triangle of a factor. The entry `made` names torch and the text."""
    experiment = load_experiment(RECORDED_EXPERIMENT)
    steps, layers = sorted(steps), tuple(layers)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        dataset = experiment.task.load()
        model = experiment.task.new_model(experiment.seed)
        optimizer = eigengraft.compose(experiment.run_recipe, model, lr=experiment.lr)
        found: dict[str, NDArray[np.float32]] = {}
        for step in range(1, steps[-1] + 1):
            batch = dataset.batch(experiment.seed, step)
            optimizer.zero_grad()
            experiment.task.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step in steps:
                for layer in layers:
                    state = optimizer.state[model.get_parameter(f"{layer}.weight")]
                    found.update({f"{step:04}/{layer}/{name}": t for name, t in _triangles(state, step).items()})
    finally:
        torch.set_num_threads(threads)
    text = f"torch {torch.__version__}, text sha256 {dataset.fingerprint.sha256}"
    return {"made": np.array(text), **found}


def _triangles(state: dict[str, Tensor], step: int) -> dict[str, NDArray[np.float32]]:
    found = {}
    for key, value in state.items():
        name = StateKey.parse(key).slot
        if name.startswith("factor.") and len(value) == FACTOR_SIZE:
            rows, columns = torch.triu_indices(FACTOR_SIZE, FACTOR_SIZE)
            found[name] = (value[rows, columns] / (1 - 0.95**step)).float().numpy()
    return found


def save_recording(recorded: dict[str, NDArray[np.float32]], path: Path = FILE) -> None:
    """Write the recording; the file holds no time, so that equal recordings give equal files."""
    np.savez_compressed(path, **recorded)  # type: ignore[arg-type]


if __name__ == "__main__":
    save_recording(record(), Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
