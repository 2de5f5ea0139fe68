"""Measure the sizes of the updates of SOAP's matrices, and the losses, with two transports: the runs of rates.yaml.

Legend: m and v are the moments of a matrix in the basis. u = m / sqrt(v) is its update divided by the learning rate,
without decay. Two sizes are sums over steps and means over matrices: even sums lr * sqrt(mean u^2), and energy sums
lr * sqrt(sum w u^2 / sum w) with w = sqrt(v), in which entries with large gradients have large weights.

    python sizes.py OUT     trains, and writes OUT/rates.json, one row a run, and OUT/sizes.svg
    python sizes.py OUT --drawn     draws OUT/sizes.svg from OUT/rates.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.optim.optimizer import register_optimizer_step_post_hook

from eigengraft.experiments.reports.figures import LIGHT, MARKERS, save_figure, style_axes
from eigengraft.experiments.studies.plan import PlannedRun, plan_runs
from eigengraft.experiments.studies.study import load_study
from eigengraft.experiments.training.train import train

Row = dict[str, Any]
STUDY = Path(__file__).with_name("rates.yaml")
INNER = "0/update.eigenbasis.inner."
BETA = 0.95
"""Decay of both moments."""


def update_sizes(m: torch.Tensor, v: torch.Tensor, step: int) -> tuple[float, float]:
    """Return sqrt(mean u^2) and sqrt(sum w u^2 / sum w) for u = m / sqrt(v) and w = sqrt(v).

    m, v: running means after `step` steps, which are not yet corrected for bias.
    """
    squares, w = m.square() / (v * (1 - BETA**step)).clamp_min(1e-30), v.sqrt()
    return float(squares.mean().sqrt()), float(((w * squares).sum() / w.sum().clamp_min(1e-30)).sqrt())


def measure(run: PlannedRun) -> Row:
    """Train one run, and return its row with the loss and the sizes of its updates."""
    sums = {"even": 0.0, "energy": 0.0}
    matrices: set[int] = set()

    def add(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        lr = optimizer.param_groups[0]["lr"]
        for parameter, state in optimizer.state.items():
            if INNER + "rms/v" not in state:
                continue
            matrices.add(id(parameter))
            even, energy = update_sizes(state[INNER + "momentum/m"], state[INNER + "rms/v"], int(state["step"]))
            sums["even"] += lr * even
            sums["energy"] += lr * energy

    handle = register_optimizer_step_post_hook(add)
    try:
        with tempfile.TemporaryDirectory() as directory:
            result = train(run.experiment, Path(directory) / "run")
    finally:
        handle.remove()
    sizes = {key: round(value / len(matrices), 5) for key, value in sums.items()}
    return {**run.labels, "seed": run.seed, "diverged": result.diverged, "val_loss": result.val_loss, **sizes}


def means(rows: list[Row]) -> list[tuple[str, str, float, float, float]]:
    """Return (case, transport, loss, even, energy) for each case and transport, in the order of the rows.

    The three numbers are means over seeds.
    """
    cells = dict.fromkeys((row["case"], row["transport"]) for row in rows)
    own = {cell: [row for row in rows if (row["case"], row["transport"]) == cell] for cell in cells}
    keys = ("val_loss", "even", "energy")
    found = []
    for (case, transport), some in own.items():
        loss, even, energy = (fmean(row[key] for row in some) for key in keys)
        found.append((case, transport, loss, even, energy))
    return found


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a table, with a row for each learning rate of the matrices and each transport."""
    lines = ["| rate of the matrices | transport | loss | size, even | size, by energy |", "|" + " --- |" * 5]
    for case, transport, *numbers in means(rows):
        cells = [case.removeprefix("matrices-"), transport, *(f"{x:.3f}" for x in numbers)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Draw the loss against the size of updates, by both definitions of this size."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    titles = ("RMS of the update, every entry alike", "RMS of the update, entries by √v")
    for index, title in enumerate(titles):
        axes = figure.add_subplot(1, 2, index + 1)
        for style, rule in enumerate(("permute", "marginals"), start=2):
            cells = [cell for cell in means(rows) if cell[1] == rule]
            x, y = [cell[3 + index] for cell in cells], [cell[2] for cell in cells]
            axes.plot(x, y, label=rule, color=LIGHT[style], marker=MARKERS[style], linewidth=1.7, markersize=5)
        axes.set_title(title, fontsize=9.5)
        axes.set_xlabel("sum over steps, times the learning rate")
        style_axes(axes)
    figure.axes[0].set_ylabel("validation loss")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8.5, framealpha=0)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sizes of updates and losses by transport.")
    parser.add_argument("out", type=Path, help="where the files go")
    parser.add_argument("--drawn", action="store_true", help="draw the rows that are there")
    given = parser.parse_args()
    if not given.drawn:
        rows = [measure(run) for run in plan_runs(load_study(STUDY))]
        text = ",\n".join(json.dumps(row) for row in rows)
        (given.out / "rates.json").write_text(f"[\n{text}\n]\n")
    rows = json.loads((given.out / "rates.json").read_text())
    draw(rows, given.out / "sizes.svg")
    sys.stdout.write("\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main()
