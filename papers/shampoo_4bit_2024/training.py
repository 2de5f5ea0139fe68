"""Compare training runs that differ in storage alone, seed by seed.

    d_s = loss of seed s - loss of seed s in 32 bits,   spread = max - min over the seeds in 32 bits
Loss is that on the validation data at the end of a run, in nats. Equal seeds mean equal initial weights and batches.

    eigengraft ablate training.yaml --out RUNS
    python training.py RUNS OUT        writes OUT/training.json, one row a run, and OUT/training.md (see --name)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from eigengraft.experiments.reports.records import Run, learning_rate, read_records

Row = dict[str, Any]


def same_but_storage(config: dict[str, Any]) -> str:
    """Return a key that is equal for two experiments if they differ in storage and seed alone."""
    recipe = {key: value for key, value in config["recipe"].items() if key not in ("name", "about", "storage")}
    return json.dumps({**config, "recipe": recipe, "seed": None, "name": None}, sort_keys=True)


def collect(directory: Path) -> list[Row]:
    """One row per run of a study; `than` names the method in 32 bits that differs in storage alone.

    Raises ValueError where a run is not finished. A run that diverged has no loss.
    """
    runs = read_records(directory).runs
    missing = [str(run.directory) for run in runs if not run.result]
    if missing:
        raise ValueError(f"{directory}: finished runs are required, {missing[0]} is not one of {len(missing)}")
    plain = {same_but_storage(run.config): run.labels["method"] for run in runs if not run.config["recipe"]["storage"]}
    return [_row(run, plain.get(same_but_storage(run.config))) for run in runs]


def _row(run: Run, than: str | None) -> Row:
    fields = ("diverged", "val_loss", "val_accuracy", "state_bytes_per_parameter")
    about = {**run.labels, "seed": run.seed, "lr": learning_rate(run.config), "steps": run.config["steps"]}
    return {**about, "than": than if than != run.labels["method"] else None, **{key: run.result[key] for key in fields}}


class Cell(NamedTuple):
    """One method on one task. Differences and spread are None for methods in 32 bits, and if a run diverged."""

    method: str
    row: Row
    losses: list[float | None]
    differences: list[float] | None
    spread: float | None

    @property
    def mean(self) -> str:
        known = [loss for loss in self.losses if loss is not None]
        if len(known) < len(self.losses):
            return f"{len(self.losses) - len(known)} of {len(self.losses)} diverged"
        return f"{fmean(known):.4f} ± {stdev(known):.4f}"

    @property
    def compared(self) -> list[str]:
        """Return two table cells: the mean difference, and the largest difference in units of the spread."""
        if self.differences is None or self.spread is None:
            return ["", ""]
        return [f"{fmean(self.differences):+.4f}", f"{max(map(abs, self.differences)) / self.spread:.2f}"]


def cells(rows: list[Row], task: str) -> list[Cell]:
    """Return a cell for each method of a task, in the order of the rows."""
    losses: dict[str, list[float | None]] = {}
    first: dict[str, Row] = {}
    for row in (row for row in rows if row["task"] == task):
        losses.setdefault(row["method"], []).append(row["val_loss"])
        first.setdefault(row["method"], row)
    return [
        Cell(method, first[method], some, *_against(some, losses.get(first[method]["than"])))
        for method, some in losses.items()
    ]


def _against(some: list[float | None], plain: list[float | None] | None) -> tuple[list[float] | None, float | None]:
    """Return the differences from the runs in 32 bits by seed, and the spread of these runs."""
    known = [loss for loss in plain or [] if loss is not None]
    pairs = [(a, b) for a, b in zip(some, plain or [], strict=False) if a is not None and b is not None]
    if not known or len(pairs) < len(some):
        return None, None
    return [a - b for a, b in pairs], max(known) - min(known)


def summary(rows: list[Row], task: str) -> list[str]:
    """Return the lines of a table with the mean and the largest loss difference of each method of a task."""
    head = ["method", "bytes per parameter", "loss, mean ± s.d.", "mean difference", "largest, in spreads"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cell in cells(rows, task):
        size = f"{cell.row['state_bytes_per_parameter']:.2f}"
        lines.append("| " + " | ".join([f"`{cell.method}`", size, cell.mean, *cell.compared]) + " |")
    return lines


def by_seed(rows: list[Row], task: str) -> list[str]:
    """Return the lines of a table with every run of a task."""
    seeds = sorted({row["seed"] for row in rows if row["task"] == task})
    head = ["method", "learning rate", *(f"loss, seed {s}" for s in seeds), *(f"difference, seed {s}" for s in seeds)]
    lines = ["| " + " | ".join([*head, "spread in 32 bits"]) + " |", "|" + " --- |" * (len(head) + 1)]
    for cell in cells(rows, task):
        losses = ["diverged" if loss is None else f"{loss:.4f}" for loss in cell.losses]
        differences = [""] * len(seeds) if cell.differences is None else [f"{d:+.4f}" for d in cell.differences]
        spread = "" if cell.spread is None else f"{cell.spread:.4f}"
        lines.append(
            "| " + " | ".join([f"`{cell.method}`", f"{cell.row['lr']:g}", *losses, *differences, spread]) + " |"
        )
    return lines


def markdown(rows: list[Row]) -> str:
    """Return the page with both tables of every task."""
    about = "The tables have the validation loss in nats at the end of training, and its difference from the run in 32 "
    text = [about + "bits with the same seed.", ""]
    for task in dict.fromkeys(row["task"] for row in rows):
        [steps] = {row["steps"] for row in rows if row["task"] == task}
        text += [f"## {task}, {steps} steps", "", *summary(rows, task), "", *by_seed(rows, task), ""]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="What fewer bits cost in training.")
    parser.add_argument("runs", type=Path, help="the directory of a finished study")
    parser.add_argument("out", type=Path, help="where the files go")
    parser.add_argument("--name", default="training", help="what they are called")
    given = parser.parse_args()
    rows = collect(given.runs)
    (given.out / f"{given.name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    (given.out / f"{given.name}.md").write_text(markdown(rows))
    sys.stdout.write(markdown(rows))


if __name__ == "__main__":
    main()
