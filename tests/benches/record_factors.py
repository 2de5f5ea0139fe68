"""Record factor matrices from the training of a small language model into `recorded.npz` of the benches.

    python tests/benches/record_factors.py [FILE]

The byte-level task with its default model is trained with the shipped recipe `shampoo` (Gram statistics, beta 0.95).
After 10, 100 and 300 steps the factors of order 64 of four layers are recorded, corrected for bias, as the upper
triangles in float32. Equal machines and equal texts give equal files. The file names its text and its torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft import compose
from eigengraft.experiments import load_experiment
from eigengraft.experiments.benches.matrices import FILE
from eigengraft.experiments.training.train import isolated_run
from eigengraft.slots import StateKey

RECORDED_LAYERS = ("blocks.0.attention.query", "blocks.0.attention.mix", "blocks.1.attention.value", "blocks.1.down")
RECORDED_STEPS = (10, 100, 300)
FACTOR_SIZE = 64
RECORDED_EXPERIMENT = {"task": {"kind": "byte_lm", "max_bytes": 2**20}, "recipe": "shampoo", "lr": 8e-3}


def record(
    steps: Iterable[int] = RECORDED_STEPS, layers: Iterable[str] = RECORDED_LAYERS
) -> dict[str, NDArray[np.float32]]:
    """Train for max(steps) steps and return the upper triangle of each factor by its name.

    The entry `made` names torch and the text.
    """
    steps, layers = sorted(steps), tuple(layers)
    experiment = load_experiment(RECORDED_EXPERIMENT)
    task, seed = experiment.task, experiment.seed
    found: dict[str, NDArray[np.float32]] = {}
    with isolated_run(experiment):
        dataset, model = task.new_data(), task.new_model(seed)
        optimizer = compose(experiment.run_recipe, model, lr=experiment.lr)
        for step in range(1, steps[-1] + 1):
            batch = dataset.batch(seed, step)  # the recorded file begins with the second batch
            optimizer.zero_grad()
            task.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for layer in layers if step in steps else ():
                state = optimizer.state[model.get_parameter(f"{layer}.weight")]
                found.update({f"{step:04}/{layer}/{name}": t for name, t in _triangles(state, step).items()})
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
    """Write the recording. The file contains no time, so that equal recordings give equal files."""
    np.savez_compressed(path, **recorded)  # type: ignore[arg-type]


if __name__ == "__main__":
    save_recording(record(), Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
