"""Write the table of a study of this folder: losses without a delay, and differences from them for each delay.

    python papers/late_refreshes/table.py runs/late-refreshes papers/late_refreshes/text.json

writes the loss of each run, and prints the table of README.md. Differences are between runs with the same seed. Cells
in which the runs of some seeds have not ended are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev

from eigengraft.experiments.reports.number_format import number_format
from eigengraft.experiments.reports.records import read_records

DELAYS = ("0", "1", "2", "5", "10")
METHODS = {"soap": "SOAP", "shampoo": "Shampoo", "kl": "SOAP, KL statistics"}
Losses = dict[str, dict[str, dict[str, float]]]
"""Validation loss by method with its interval, delay and seed."""


def losses(folder: Path) -> Losses:
    """Return the validation losses of all runs of a study that have ended."""
    found: Losses = {}
    for run in read_records(folder).runs:
        if run.result:
            by_seed = found.setdefault(run.labels["method"], {}).setdefault(run.labels["delay"], {})
            by_seed[str(run.seed)] = float(run.result["val_loss"])
    return found


def table(found: Losses) -> list[str]:
    """Return the lines of the table. The standard error is that of the mean of paired differences."""
    lines = [
        "| method | interval | delay 0 | " + " | ".join(f"delay {k}" for k in DELAYS[1:]) + " |",
        "| --- " * 7 + "|",
    ]
    for method, by_delay in found.items():
        if any(len(by_delay.get(delay, ())) != 3 for delay in DELAYS):
            continue
        name, _, interval = method.partition("-")
        before = by_delay["0"]
        changes = [[by_delay[delay][seed] - loss for seed, loss in before.items()] for delay in DELAYS[1:]]
        errors = [stdev(change) / len(change) ** 0.5 for change in changes]
        form = number_format([fmean(before.values())], [(error, fmean(before.values())) for error in errors])
        cells = [format(fmean(before.values()), form)]
        for change, error in zip(changes, errors, strict=True):
            cells.append(f"{fmean(change):+{form}} ± {error:{form}}")
        lines.append(f"| {METHODS[name]} | {interval} | {' | '.join(cells)} |")
    return lines


def main(folder: str, rows: str) -> None:
    """Write the losses of a study, and print its table."""
    found = losses(Path(folder))
    Path(rows).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write("\n".join(table(found)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
