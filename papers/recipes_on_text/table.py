"""Rank recipes by validation loss, each at its own best learning rate, from the runs of a study beside this file.

Loss is that on the validation data at the end of a run, in nats. Steps to the baseline's loss are counted against the
baseline's run with the same seed, on the straight line between evaluations.

    eigengraft ablate study.yaml --out RUNS
    python steps.py study.yaml OUT
    python table.py RUNS OUT     writes OUT/runs.json, one row a run, OUT/searches.json, one row a recipe, OUT/table.md

Rows that OUT has of recipes that RUNS does not have are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from eigengraft.experiments.reports.comparison import compare
from eigengraft.experiments.reports.records import Records, learning_rate, read_records

Row = dict[str, Any]


def collect(records: Records) -> list[Row]:
    """Return a row for each run. A run that ended with an error has no loss. Raises ValueError if a run is not
    finished.
    """
    [panel] = compare(records)
    rows = []
    for own in panel.rows:
        reached = own.reached("steps")
        for run in own.runs:
            if not run.result and not run.directory.with_suffix(".error.txt").exists():
                raise ValueError(f"finished runs are required, {run.directory} is not one")
            numbers = {key: run.result.get(key) for key in ("val_loss", "state_bytes_per_parameter")}
            rows.append(
                {"recipe": own.label, "lr": learning_rate(run.config), "seed": run.seed}
                | {"steps_to_base": reached.get(run.seed)}
                | numbers
            )
    return rows


def searches(records: Records) -> list[Row]:
    """Return a row for each recipe, with the learning rates that its search tried and their losses."""
    return [
        {
            "recipe": one.cell.removeprefix("recipe="),
            "lr": one.values["lr"],
            "edge": one.edges.get("lr"),
            "tried": [[some.values["lr"], some.mean] for some in one.tried],
        }
        for one in records.tuned
    ]


def losses(rows: list[Row], recipe: str) -> list[float]:
    """Return the losses of a recipe by ascending seed. The loss of a run that diverged is infinite."""
    own = sorted((row for row in rows if row["recipe"] == recipe), key=lambda row: int(row["seed"]))
    return [math.inf if row["val_loss"] is None else row["val_loss"] for row in own]


def failures(losses: list[float]) -> str:
    """Return a text with the number of runs that ended without a loss, and with the mean loss of the other runs."""
    left = [loss for loss in losses if math.isfinite(loss)]
    return f"{len(losses) - len(left)} of {len(losses)} failed" + (f", {fmean(left):.3f}" if left else "")


def line(rows: list[Row], recipe: str, base: str, edge: str | None, cost: float) -> str:
    """Return the row of one recipe in the table."""
    own = [row for row in rows if row["recipe"] == recipe]
    seeds = losses(rows, recipe)
    apart = [a - b for a, b in zip(seeds, losses(rows, base), strict=True)]
    steps = [row["steps_to_base"] for row in own]
    finite = all(map(math.isfinite, seeds))
    cells = [
        f"`{recipe}`",
        f"{own[0]['lr']:g}" + (f" ({edge} tried)" if edge else ""),
        f"{fmean(seeds):.3f} ± {stdev(seeds):.3f}" if finite else failures(seeds),
        f"{fmean(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})" if finite and recipe != base else "",
        f"{fmean(steps):.0f}" if all(step is not None for step in steps) else "not reached",
        f"{cost:.1f}",
        f"{max(row['state_bytes_per_parameter'] or 0 for row in own):.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def markdown(rows: list[Row], found: list[Row], costs: list[Row], base: str) -> str:
    """Return the table, with the lowest mean loss first."""
    heads = ["recipe", "learning rate", "loss, mean ± s.d.", f"minus {base}", f"steps to {base}'s loss"]
    heads += [f"step, in steps of {base}", "bytes per parameter"]
    edges = {row["recipe"]: row["edge"] for row in found}
    cost = {row["recipe"]: row["of_base"] for row in costs}
    order = sorted(edges, key=lambda recipe: fmean(losses(rows, recipe)))
    lines = [line(rows, recipe, base, edges[recipe], cost[recipe]) for recipe in order]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), *lines, ""])


def merged(path: Path, rows: list[Row]) -> list[Row]:
    """Return the new rows, and the rows of the file `path` whose recipes were not run again."""
    again = {row["recipe"] for row in rows}
    before = json.loads(path.read_text()) if path.is_file() else []
    return [row for row in before if row["recipe"] not in again] + rows


def written(rows: list[Row]) -> str:
    """Return rows as JSON, with one row in each line."""
    text = ",\n".join(json.dumps(row) for row in rows)
    return f"[\n{text}\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Recipes by validation loss, each at its best learning rate.")
    parser.add_argument("runs", type=Path, help="the directory of a finished study")
    parser.add_argument("out", type=Path, help="where steps.json is and the files go")
    given = parser.parse_args()
    records = read_records(given.runs)
    rows = merged(given.out / "runs.json", collect(records))
    found = merged(given.out / "searches.json", searches(records))
    table = markdown(rows, found, json.loads((given.out / "steps.json").read_text()), records.baseline)
    for name, text in (("runs.json", written(rows)), ("searches.json", written(found)), ("table.md", table)):
        (given.out / name).write_text(text)
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
