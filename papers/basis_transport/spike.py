"""Multiply one gradient in the training of a small language model by 1e4, and measure the updates after it.

size(t) = max over the matrices W of the transformer blocks of  RMS((W_t - W_(t+1)) / lr_t),  without weight decay.
ratio   = max of size over the spike's step and the `WINDOW` after it / max of size over the `WINDOW` steps before it.

The two maxima are over windows of about equal length. Rows also have two other ratios: that to the median size before
the spike, which is stricter (it exceeds 1 without any spike), and that to the size of the last step before the spike.
After a gradient that outweighs all others, every entry of Adam's update is sqrt(1 - b) in any fixed basis: 0.224 for
b = 0.95. Larger updates result from changes of the basis.

    python papers/basis_transport/spike.py DIRECTORY          36 runs; writes spike.jsonl and spike.svg
    python papers/basis_transport/spike.py DIRECTORY --quick  six short runs of a smaller model

`spike.jsonl` and `spike.svg` beside this file were measured on a CPU with one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from torch import Tensor, nn

import eigengraft
from eigengraft.experiments.files import JsonLines, make_directory, write_text
from eigengraft.experiments.reports.figures import INK, LIGHT, MARKERS, save_figure, style_axes
from eigengraft.experiments.tasks import Batch
from eigengraft.experiments.training.experiment import Experiment, load_experiment
from eigengraft.experiments.training.train import isolated_run
from eigengraft.optimizers.recipe.loading import load_recipe

RESULTS = Path(__file__).with_name("spike.jsonl")
SPIKE = 104
"""Step of the spike, counted from 1. It is between two refreshes."""
FACTOR = 1e4
"""Factor by which the gradients of the spike's step are multiplied."""
WINDOW = 20
"""Steps before and after the spike whose updates are compared."""
BOUND = (1 - 0.95) ** 0.5
"""Size of Adam's update after one dominant gradient, sqrt(1 - beta) with beta = 0.95."""
LINES = ("exact", "marginals", "permute", "none", "none, momentum outside", "published")
LEARNING_RATES = (3e-3, 3.2e-2)
"""Learning rates: the recipe's own, and the best of the demo's grid on this kind of task."""
SEEDS = (0, 1, 2)
TASK: Mapping[str, Any] = {"kind": "byte_lm", "max_bytes": 2**20}
SMALL: Mapping[str, Any] = {**TASK, "layers": 1, "width": 32, "heads": 2, "context": 32, "batch_size": 16}


@dataclass(frozen=True)
class SpikeRow:
    """One run; size(t) is defined at the top of this file.

    ratio: largest size after the spike over the largest before it.
    ratio_to_median, ratio_to_last: largest size after the spike over the median and over the last before it.
    before, largest: largest size before and after the spike.
    largest_after: steps from the spike to the largest size.
    loss_before, loss_end: mean training loss of the last five steps before the spike and of the run.
    sizes: size(t) of the steps `spike - 2 WINDOW .. spike + WINDOW`.
    """

    line: str
    lr: float
    seed: int
    spike: int
    factor: float
    ratio: float
    ratio_to_median: float
    ratio_to_last: float
    before: float
    largest: float
    largest_after: int
    loss_before: float
    loss_end: float
    sizes: list[float]


def read_spike_rows(path: Path = RESULTS) -> list[SpikeRow]:
    """Read rows that were written before."""
    return [SpikeRow(**row) for row in JsonLines(path).rows()]


def recipe_for(line: str) -> eigengraft.Recipe:
    """Return the recipe of a line: `published`, or `soap_fitted` with the transport that the line begins with."""
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
    """Train with one spike. The row depends on the arguments alone."""
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
    """Return size(t) and the training loss of every step."""
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
    """Return a line of a table for each learning rate and line: ratios of all seeds, to the largest and the median."""
    found = []
    for lr, line in dict.fromkeys((row.lr, row.line) for row in rows):
        here = [row for row in rows if (row.lr, row.line) == (lr, line)]
        largest = " ".join(f"{row.ratio:.2f}" for row in here)
        medians = " ".join(f"{row.ratio_to_median:.2f}" for row in here)
        found.append((f"{lr:g}", line, largest, medians))
    return found


def spike_grid(quick: bool = False) -> list[dict[str, Any]]:
    """Return the arguments of all runs: 36 runs, or with `quick` six short runs of a smaller model."""
    if quick:
        return [{"line": line, "lr": LEARNING_RATES[0], "seed": 0, "task": SMALL, "spike": 64} for line in LINES]
    cells = product(LEARNING_RATES, LINES, SEEDS)
    return [{"line": line, "lr": lr, "seed": seed} for lr, line, seed in cells]


def write_results(rows: Sequence[SpikeRow], directory: Path) -> None:
    """Write `spike.jsonl` and `spike.svg`."""
    make_directory(directory)
    write_text(directory / "spike.jsonl", "".join(f"{json.dumps(asdict(row))}\n" for row in rows))
    draw_spike(rows, directory / "spike.svg")


_LABELS = {
    "exact": "exact",
    "marginals": "marginals",
    "permute": "permute",
    "none": "none",
    "none, momentum outside": "none, momentum outside the basis",
    "published": "reference/soap, as published",
}
_RATES = dict(zip(LEARNING_RATES, (", the recipe's own", ", ten times that"), strict=True))
_STYLES = {line: index + 1 for index, line in enumerate(LINES)}


def draw_spike(rows: Sequence[SpikeRow], path: Path) -> None:
    """Draw medians of seeds with their range, a panel for each learning rate, and save the figure."""
    rates = list(dict.fromkeys(row.lr for row in rows))
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    axes: list[Axes] = []
    for index, lr in enumerate(rates):
        one = figure.add_subplot(1, len(rates), index + 1, sharey=axes[0] if axes else None)
        axes.append(one)
        _panel(one, [row for row in rows if row.lr == lr])
        one.set_title(f"learning rate {lr:g}{_RATES.get(lr, '')}", fontsize=9.5, color=INK)
    axes[0].set_ylabel("update RMS / learning rate, largest matrix")
    handles, labels = axes[0].get_legend_handles_labels()
    style = {"fontsize": 8.5, "labelcolor": INK, "framealpha": 0, "handlelength": 2.6}
    figure.legend(handles, labels, loc="outside lower center", ncols=3, **style)
    save_figure(figure, path)


def _panel(axes: Axes, rows: Sequence[SpikeRow]) -> None:
    axes.axvline(0, color=LIGHT[0], linewidth=0.9, zorder=1)
    axes.axhline(
        BOUND,
        color=LIGHT[0],
        linewidth=1.1,
        linestyle=(0, (4, 3)),
        zorder=1,
        label="Adam after one dominant gradient, $\\sqrt{1-\\beta}$",
    )
    for line in LINES:
        here = [row.sizes for row in rows if row.line == line]
        if here:
            _line(axes, line, list(zip(*here, strict=True)))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("steps after the spike")
    style_axes(axes)


def _line(axes: Axes, line: str, sizes: Sequence[Sequence[float]]) -> None:
    """Draw one line. `sizes` has those of all seeds for each step; the last step is `WINDOW` steps after the spike."""
    steps, style = range(WINDOW + 1 - len(sizes), WINDOW + 1), _STYLES[line]
    axes.fill_between(steps, [*map(min, sizes)], [*map(max, sizes)], color=LIGHT[style], alpha=0.22, linewidth=0)
    axes.plot(
        steps,
        [median(seeds) for seeds in sizes],
        color=LIGHT[style],
        linewidth=1.7,
        marker=MARKERS[style],
        markersize=4,
        markevery=(style, 8),
        label=_LABELS[line],
        zorder=4 if line in ("exact", "marginals") else 3,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the ratios, and write rows and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    rows = [spike_run(**cell) for cell in spike_grid(given.quick)]
    write_results(rows, given.directory)
    headings = ("learning rate", "transport", "largest update after / before", "/ median before")
    sys.stdout.write("".join(f"{' | '.join(line)}\n" for line in (headings, *ratio_lines(rows))))


if __name__ == "__main__":
    main()
