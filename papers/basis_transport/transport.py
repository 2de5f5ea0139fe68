"""Compare the losses of three transports of second moments, from the runs of study.yaml.

Loss is that on the validation data at the end of a run, in nats. Differences are between runs of one seed.

    eigengraft ablate study.yaml --out RUNS
    python transport.py RUNS OUT     writes OUT/transport.json, one row a run, OUT/transport.md and OUT/transport.svg
    python transport.py RUNS OUT --rows NAME     writes OUT/NAME.json alone, of the other studies
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from eigengraft.experiments.reports.figures import LIGHT, MARKERS, save_figure, style_axes
from eigengraft.experiments.reports.records import read_records
from eigengraft.experiments.reports.seed_statistics import paired

Row = dict[str, Any]
RULES = ("exact", "permute", "marginals")
RATE = "lr-"
"""First letters of the cases that are a learning rate."""
TRAINING = "train_loss"
"""The number of a row that is its training loss at the end; a run with one row of metrics has none."""


def collect(directory: Path) -> list[Row]:
    """Return a row for each run of a study. Raises ValueError if a run is not finished."""
    rows = []
    for run in read_records(directory).runs:
        if not run.result:
            raise ValueError(f"{directory}: finished runs are required, {run.directory} is not one")
        labels = {key: run.labels[key] for key in ("task", "transport", "case")}
        kept = ["diverged", "val_loss", *([TRAINING] if run.config["log_every"] < run.config["steps"] else [])]
        rows.append({**labels, "seed": run.seed, **{key: run.result[key] for key in kept}})
    return rows


def losses(rows: list[Row], task: str, transport: str, case: str, key: str = "val_loss") -> list[float]:
    """Return the losses of the runs by ascending seed. The loss of a run that diverged is infinite."""
    wanted = (task, transport, case)
    found = {row["seed"]: row[key] for row in rows if (row["task"], row["transport"], row["case"]) == wanted}
    return [math.inf if found[seed] is None else found[seed] for seed in sorted(found)]


def names(rows: list[Row], key: str) -> list[str]:
    """Return the values of the label `key`, in the order of the study."""
    return list(dict.fromkeys(row[key] for row in rows))


def table(rows: list[Row], task: str) -> list[str]:
    """Return the lines of a table of mean losses by case, with the differences of marginals from the other rules.

    Differences are between runs with the same seed. The table has their mean, the least and the largest.
    """
    heads = ["case", *RULES, "marginals - exact", "marginals - permute"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for case in names(rows, "case"):
        by_rule = {rule: losses(rows, task, rule, case) for rule in RULES}
        least = min(fmean(seeds) for seeds in by_rule.values())
        cells = [case.replace("-", " ")]
        for seeds in by_rule.values():
            told = f"{fmean(seeds):.3f}" if math.isfinite(fmean(seeds)) else "diverged"
            cells.append(f"**{told}**" if fmean(seeds) == least else told)
        for rule in RULES[:2]:
            apart = [ours - theirs for ours, theirs in zip(by_rule["marginals"], by_rule[rule], strict=True)]
            cells.append(f"{fmean(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def training_table(rows: list[Row], task: str) -> list[str]:
    """Mean training losses at the end by case, in thousandths of a nat, and the ratios of marginals, seed by seed:
    geometric mean, least and largest."""
    heads = ["case", *RULES, "marginals / exact", "marginals / permute"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for case in names([row for row in rows if row["task"] == task], "case"):
        by_rule = {rule: losses(rows, task, rule, case, TRAINING) for rule in RULES}
        cells = [case.replace("-", " "), *(f"{1e3 * fmean(seeds):.3g}" for seeds in by_rule.values())]
        for rule in RULES[:2]:
            apart = [ours / theirs for ours, theirs in zip(by_rule["marginals"], by_rule[rule], strict=True)]
            cells.append(f"{geometric_mean(apart):.2f} ({min(apart):.2f} to {max(apart):.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def paired_table(rows: list[Row]) -> list[str]:
    """Return the lines of a table of the differences of marginals from the other rules that were run.

    Differences are between runs with the same seed. The table has their mean and its 95 % interval (Student).
    """
    rules = [rule for rule in RULES if rule in names(rows, "transport")]
    heads = ["case", "seeds", *rules, *(f"marginals - {rule}" for rule in rules[:-1])]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for task, case in itertools.product(names(rows, "task"), names(rows, "case")):
        by_rule = {rule: dict(enumerate(losses(rows, task, rule, case))) for rule in rules}
        cells = [f"{task}, {case.replace('-', ' ')}", str(len(by_rule["marginals"]))]
        cells += [f"{fmean(seeds.values()):.3f}" for seeds in by_rule.values()]
        for rule in rules[:-1]:
            apart = paired(by_rule["marginals"], by_rule[rule])
            assert apart is not None and apart.half is not None
            cells.append(f"{apart.mean:+.3f} ± {apart.half:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def markdown(rows: list[Row]) -> str:
    """Return the page with a table for each task."""
    text = [
        "The tables have the mean validation loss over the seeds at the end of training, in nats. Differences are "
        "those of runs with the same seed: mean (least to largest).",
        "",
    ]
    for task in names(rows, "task"):
        text += [f"## {task}", "", *table(rows, task), ""]
        if any(TRAINING in row for row in rows if row["task"] == task):
            text += [
                "The next table has the training loss at the end of training, in thousandths of a nat, and its ratios:",
                "",
                *training_table(rows, task),
                "",
            ]
    return "\n".join(text)


def draw(rows: list[Row], path: Path) -> None:
    """Draw loss against learning rate, with a panel for each task. Lines are means over seeds, and points are seeds."""
    tasks = names(rows, "task")
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    for index, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), index + 1)
        for style, rule in enumerate(RULES, start=1):
            cases = [case for case in names(rows, "case") if case.startswith(RATE)]
            rates = [float(case.removeprefix(RATE)) for case in cases]
            seeds = [losses(rows, task, rule, case) for case in cases]
            axes.plot(rates, [fmean(own) for own in seeds], label=rule, color=LIGHT[style], linewidth=1.7)
            for rate, own in zip(rates, seeds, strict=True):
                axes.plot([rate] * len(own), own, linestyle="", marker=MARKERS[style], markersize=4, color=LIGHT[style])
        axes.set_xscale("log", base=2)
        axes.set_title(task, fontsize=9.5)
        axes.set_xlabel("learning rate")
        axes.set_xticks(rates)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        style_axes(axes)
    figure.axes[0].set_ylabel("validation loss")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8.5, framealpha=0)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Losses by transport of second moments.")
    parser.add_argument("runs", type=Path, help="the directory of a finished study")
    parser.add_argument("out", type=Path, help="where the files go")
    parser.add_argument("--rows", help="the name of another study, whose rows alone are written")
    given = parser.parse_args()
    rows = collect(given.runs)
    text = ",\n".join(json.dumps(row) for row in rows)
    (given.out / f"{given.rows or 'transport'}.json").write_text(f"[\n{text}\n]\n")
    if given.rows:
        tables = paired_table(rows)
        if len(names(rows, "transport")) == len(RULES):
            tables += ["", *(line for task in names(rows, "task") for line in table(rows, task))]
        sys.stdout.write("\n".join(tables) + "\n")
        return
    (given.out / "transport.md").write_text(markdown(rows))
    draw(rows, given.out / "transport.svg")
    sys.stdout.write(markdown(rows))


if __name__ == "__main__":
    main()
