"""One gradient 1e4 times too large in the training of a small language model, and how large the updates after it are.

size(t) = max over the matrices W of the transformer blocks of  RMS((W_t - W_(t+1)) / lr_t),  without weight decay.
ratio   = max of size over the spike's step and the `WINDOW` after it / max of size over the `WINDOW` steps before it.

The largest size is compared with the largest, over windows of equal length. Rows also hold the ratios to the median
before, which is stricter (it exceeds 1 without any spike), and to the last step before. A gradient that outweighs all
others makes every entry of Adam's update sqrt(1 - b), 0.224 for b = 0.95, in any fixed basis: larger updates come from
changes of the basis. `eigengraft bench spike` makes rows and figure; `results/` holds those of a CPU with one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

import eigengraft
from eigengraft.optimizers.recipe.loading import load_recipe

from ...files import make_directory
from ...tasks import Batch
from ...training.experiment import Experiment
from ...training.loading import load_experiment
from ...training.train import isolated_run
from ..common.results import write_rows
from .figure import draw_spike
from .rows import FACTOR, LEARNING_RATES, LINES, SPIKE, WINDOW, SpikeRow

SEEDS = (0, 1, 2)
TASK: Mapping[str, Any] = {"kind": "byte_lm", "max_bytes": 2**20}
SMALL: Mapping[str, Any] = {**TASK, "layers": 1, "width": 32, "heads": 2, "context": 32, "batch_size": 16}


def recipe_for(line: str) -> eigengraft.Recipe:
    """The recipe of a line: `published`, or `soap_fitted` with the transport that the line begins with."""
    if line == "published":
        return load_recipe("reference/soap")
    transport, _, more = line.partition(", ")
    recipe = load_recipe("soap_fitted", [f"update.eigenbasis.transport={transport}"])
    if not more:
        return recipe
    declared = recipe.declaration()
    (basis,) = declared["update"]
    momentum, rms = basis["inner"]
    return load_recipe({**declared, "update": [momentum, {**basis, "inner": [rms]}]})


def spike_run(
    line: str, lr: float, seed: int, *, task: Mapping[str, Any] = TASK, spike: int = SPIKE, factor: float = FACTOR
) -> SpikeRow:
    """Train with one spike; the row depends on the arguments alone."""
    steps = spike + WINDOW
    experiment = load_experiment(
        {"task": task, "recipe": recipe_for(line), "lr": lr, "weight_decay": 0.0, "steps": steps, "seed": seed}
    )
    with isolated_run(experiment):
        sizes, losses = _train(experiment, spike, factor)
    before, after = sizes[spike - 1 - WINDOW : spike - 1], sizes[spike - 1 :]
    return SpikeRow(
        line=line,
        lr=lr,
        seed=seed,
        spike=spike,
        factor=factor,
        ratio=max(after) / max(before),
        ratio_to_median=max(after) / median(before),
        ratio_to_last=max(after) / before[-1],
        before=max(before),
        largest=max(after),
        largest_after=after.index(max(after)),
        loss_before=fmean(losses[spike - 5 : spike]),
        loss_end=fmean(losses[-5:]),
        sizes=[float(f"{size:.4g}") for size in sizes[max(0, spike - 1 - 2 * WINDOW) :]],
    )


def _train(experiment: Experiment, spike: int, factor: float) -> tuple[list[float], list[float]]:
    """size(t) and the training loss of every step."""
    dataset, model = experiment.task.load(), experiment.task.new_model(experiment.seed)
    lr = experiment.lr
    assert lr is not None
    optimizer = eigengraft.compose(experiment.run_recipe, model, lr=lr, weight_decay=experiment.weight_decay)
    watched = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    sizes, losses = [], []
    for step in range(1, experiment.steps + 1):
        losses.append(_backward(experiment, model, dataset.batch(experiment.seed, step - 1)))
        if step == spike:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], factor)
        old = [p.detach().clone() for p in watched]
        optimizer.step()
        sizes.append(max(_rms(a - b.detach()) for a, b in zip(old, watched, strict=True)) / lr)
    return sizes, losses


def _backward(experiment: Experiment, model: nn.Module, batch: Batch) -> float:
    model.zero_grad()
    loss = experiment.task.loss(model(batch.inputs), batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def ratio_lines(rows: Sequence[SpikeRow]) -> list[tuple[str, str, str, str]]:
    """One line of a table per learning rate and line: ratios of all seeds, to the largest and to the median before."""
    found = []
    for lr, line in dict.fromkeys((row.lr, row.line) for row in rows):
        here = [row for row in rows if (row.lr, row.line) == (lr, line)]
        largest = " ".join(f"{row.ratio:.2f}" for row in here)
        medians = " ".join(f"{row.ratio_to_median:.2f}" for row in here)
        found.append((f"{lr:g}", line, largest, medians))
    return found


def spike_grid(quick: bool = False) -> list[dict[str, Any]]:
    """The arguments of all runs: 36 runs, or with `quick` six short runs of a smaller model."""
    if quick:
        return [{"line": line, "lr": LEARNING_RATES[0], "seed": 0, "task": SMALL, "spike": 64} for line in LINES]
    cells = product(LEARNING_RATES, LINES, SEEDS)
    return [{"line": line, "lr": lr, "seed": seed} for lr, line, seed in cells]


def write_results(rows: Sequence[SpikeRow], directory: Path) -> None:
    """Write `spike.jsonl` and `spike.svg`."""
    make_directory(directory)
    write_rows(rows, directory / "spike.jsonl")
    draw_spike(rows, directory / "spike.svg")
