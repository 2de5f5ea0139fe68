"""The runs of a directory as a CSV file, one row per run."""

from __future__ import annotations

import csv
from pathlib import Path

from .records import Records

_COLUMNS = ("val_loss", "val_accuracy", "steps", "seconds", "step_ms", "optimizer_ms", "state_bytes_per_parameter")


def write_runs_csv(records: Records, path: Path) -> None:
    """Write labels, seed, status and the numbers of result.json to six digits; numbers that a run lacks are empty."""
    axes = list(dict.fromkeys(axis for run in records.runs for axis in run.labels))
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*axes, "seed", "status", *_COLUMNS])
        for run in records.runs:
            numbers = [run.result.get(column) for column in _COLUMNS]
            texts = ["" if number is None else f"{number:.6g}" for number in numbers]
            writer.writerow(
                [*(run.labels.get(axis, "") for axis in axes), run.seed, run.status(records.metric), *texts]
            )
