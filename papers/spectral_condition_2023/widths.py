"""Compare the best learning rates of different widths, from the runs of a study beside this file.

Loss is that on the validation data at the end of a run, in nats, the mean over seeds. A run that diverged has no loss.

    eigengraft ablate study.yaml --out RUNS
    python widths.py RUNS OUT      writes OUT/widths.json, one row a run, OUT/widths.md and OUT/widths.svg (see --name)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from eigengraft.experiments.reports.figures import LIGHT, MARKERS, save_figure, style_axes
from eigengraft.experiments.reports.records import learning_rate, read_records

Row = dict[str, Any]
METHODS = {"adam": "Adam", "muon": "Muon", "soap": "SOAP"}
RULES = {
    "plain": "as they are",
    "scaled": "width_scaling: {base_width: 32}",
    "rates": "width_scaling with the initial weights of torch",
}
HIGHEST = 20
"""The largest loss in the figure, in units of the lowest."""


def collect(directory: Path) -> list[Row]:
    """Return a row for each run of a study. Raises ValueError if a run is not finished."""
    rows = []
    for run in read_records(directory).runs:
        if not run.result:
            raise ValueError(f"{directory}: finished runs are required, {run.directory} is not one")
        labels = {"method": run.labels["method"], "rule": run.labels["rule"], "width": run.config["task"]["width"]}
        lr, result = learning_rate(run.config), {key: run.result[key] for key in ("diverged", "val_loss")}
        rows.append({**labels, "lr": lr, "seed": run.seed, **result})
    return rows


def rules(rows: list[Row]) -> dict[str, str]:
    """Return the names of the rules of a study in figures and headings."""
    return {rule: about for rule, about in RULES.items() if any(row["rule"] == rule for row in rows)}


def losses(rows: list[Row], method: str, rule: str) -> dict[int, dict[float, float]]:
    """Return the mean losses of a method by width and learning rate. A mean is infinite if the run of a seed
    diverged.
    """
    found: dict[int, dict[float, list[float]]] = {}
    for row in rows:
        if (row["method"], row["rule"]) == (method, rule):
            loss = math.inf if row["val_loss"] is None else row["val_loss"]
            found.setdefault(row["width"], {}).setdefault(row["lr"], []).append(loss)
    return {width: {lr: fmean(seeds) for lr, seeds in sorted(found[width].items())} for width in sorted(found)}


def best(by_rate: dict[float, float]) -> float:
    """Return the learning rate with the lowest loss."""
    return min(by_rate, key=by_rate.__getitem__)


def drift(rows: list[Row], method: str, rule: str) -> list[float]:
    """Return for each width the distance of its best learning rate from that of the smallest width.

    Distances are in steps of the grid, which are factors of 2.
    """
    rates = [best(by_rate) for by_rate in losses(rows, method, rule).values()]
    return [math.log2(rate / rates[0]) for rate in rates]


def summary(rows: list[Row]) -> list[str]:
    """Return the lines of a table with the best learning rates by width.

    It also says how much the loss rises at the learning rate that is best for the smallest width.
    """
    widths = sorted({row["width"] for row in rows})
    heads = [f"best lr, width {width}" for width in widths]
    cost = f"loss at width {widths[-1]}: best lr, lr of width {widths[0]}"
    lines = ["| " + " | ".join(["method", "rule", *heads, cost]) + " |", "|" + " --- |" * (len(heads) + 3)]
    for method, name in METHODS.items():
        for rule in rules(rows):
            found = losses(rows, method, rule)
            rates, last = [best(found[width]) for width in widths], found[widths[-1]]
            cells = [power(rate) for rate in rates] + [f"{last[rates[-1]]:.3f}, {last[rates[0]]:.3f}"]
            lines.append("| " + " | ".join([name, rule, *cells]) + " |")
    return lines


def power(rate: float) -> str:
    """Return a learning rate of the grid as the text of a power of 2."""
    return f"2^{round(math.log2(rate))}"


def every_loss(rows: list[Row], method: str, rule: str) -> list[str]:
    """Return the lines of a table with all mean losses of a method. The lowest of each width is bold."""
    found = losses(rows, method, rule)
    rates = list(next(iter(found.values())))
    lines = ["| " + " | ".join(["width", *map(power, rates)]) + " |", "|" + " --- |" * (len(rates) + 1)]
    for width, by_rate in found.items():
        told = [f"{by_rate[rate]:.3f}" if math.isfinite(by_rate[rate]) else "diverged" for rate in rates]
        cells = [f"**{text}**" if rate == best(by_rate) else text for rate, text in zip(rates, told, strict=True)]
        lines.append("| " + " | ".join([str(width), *cells]) + " |")
    return lines


def markdown(rows: list[Row]) -> str:
    """Return the page with the summary and all losses."""
    about = "The tables have the mean validation loss over the seeds at the end of training, in nats."
    text = [about, "", *summary(rows), ""]
    for method, name in METHODS.items():
        for rule, about in rules(rows).items():
            text += [f"## {name}, {about}", "", *every_loss(rows, method, rule), ""]
    return "\n".join(text)


def draw(rows: list[Row], path: Path) -> None:
    """Draw loss against learning rate by width.

    The figure has a column for each method. The upper row is without the rule, the lower row with it.
    """
    known = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    low = min(known)
    there = rules(rows)
    figure = Figure(figsize=(9.6, 2.8 * len(there)), layout="constrained")
    for row, (rule, about) in enumerate(there.items()):
        for column, (method, name) in enumerate(METHODS.items()):
            axes = figure.add_subplot(len(there), 3, 3 * row + column + 1)
            _panel(axes, losses(rows, method, rule), (0.8 * low, min(1.1 * max(known), HIGHEST * low)))
            axes.set_title(f"{name}, {about}", fontsize=9.5)
            if column == 0:
                axes.set_ylabel("validation loss")
            if row == len(there) - 1:
                axes.set_xlabel("learning rate")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8.5, framealpha=0)
    save_figure(figure, path)


def _panel(axes: Axes, found: dict[int, dict[float, float]], limits: tuple[float, float]) -> None:
    for style, (width, by_rate) in enumerate(found.items(), start=1):
        look = {"color": LIGHT[style], "marker": MARKERS[style], "markersize": 4, "linewidth": 1.6}
        axes.plot(list(by_rate), list(by_rate.values()), label=f"width {width}", **look)
        lr = best(by_rate)
        axes.plot([lr], [by_rate[lr]], marker="o", markersize=11, markerfacecolor="none", color=LIGHT[style])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    style_axes(axes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Best learning rates by width.")
    parser.add_argument("runs", type=Path, help="the directory of a finished study")
    parser.add_argument("out", type=Path, help="where the files go")
    parser.add_argument("--name", default="widths", help="what they are called")
    given = parser.parse_args()
    rows = collect(given.runs)
    text = ",\n".join(json.dumps(row) for row in rows)
    (given.out / f"{given.name}.json").write_text(f"[\n{text}\n]\n")
    (given.out / f"{given.name}.md").write_text(markdown(rows))
    draw(rows, given.out / f"{given.name}.svg")
    sys.stdout.write(markdown(rows))


if __name__ == "__main__":
    main()
