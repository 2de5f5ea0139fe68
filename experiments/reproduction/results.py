"""The runs of a study as compact rows, which a folder of papers/ keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..files import make_directory, read_json, write_text
from ..reports.records import METRICS, Run, learning_rate, read_records
from ..studies.axes import as_label
from ..studies.plan import cells
from ..studies.study import Study

RESULT_NUMBERS = (
    "val_loss",
    "val_accuracy",
    "train_loss",
    "steps",
    "seconds",
    "step_ms",
    "optimizer_ms",
    "state_bytes_per_parameter",
)
"""Numbers of a finished run that are stored, by their names in result.json."""


@dataclass(frozen=True)
class ResultRow:
    """One run.

    labels: label by axis.
    numbers: numbers by name; None for a number that the run does not have.
    """

    labels: Mapping[str, str]
    seed: int
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class StudyResults:
    """The runs of a study.

    rows: one row for each run.
    made: date, machine and versions, as far as they were recorded.
    timed: True if the cells train for equal seconds, each with its own number of steps.
    compare: axis whose labels are compared; "" if it is not known.
    """

    rows: tuple[ResultRow, ...]
    made: Mapping[str, str]
    timed: bool = False
    compare: str = ""

    def row(self, labels: Mapping[str, str], seed: int) -> ResultRow:
        """Return the run of a cell with a seed. Raises ValueError if there is none."""
        for row in self.rows:
            if row.labels == labels and row.seed == seed:
                return row
        raise ValueError(f"results: there is no run of {dict(labels)} with seed {seed}")


def collect_results(directory: Path) -> dict[str, Any]:
    """Return the compact results of the finished runs under `directory`.

    Raises ValueError if a run is not finished, or if runs of one cell differ in configuration, code or data.
    """
    records = read_records(directory)
    if records.apart:
        raise ValueError(f"results: {records.apart[0]}; keep runs of one kind in {directory}, and run the study again")
    rows = [_row(run, records.rate_edge(run.labels)) for run in records.runs]
    last = max((run.directory / "result.json").stat().st_mtime for run in records.runs)
    seen = [run.environment for run in records.runs]
    made = {"date": datetime.fromtimestamp(last, UTC).date().isoformat()}
    for key in ("cpu", "device", "threads", "python", "torch", "eigengraft"):
        made[key] = ", ".join(dict.fromkeys(str(one.get(key, "")) for one in seen))
    return {"study": records.name, "made": made, "rows": rows}


def keep_results(content: Mapping[str, Any], path: Path) -> None:
    """Write the result of `collect_results`, one run a line."""
    make_directory(path.parent)
    rows = ",\n".join(json.dumps(row) for row in content["rows"])
    head = f'"study": {json.dumps(content["study"])},\n"made": {json.dumps(content["made"])}'
    write_text(path, f'{{{head},\n"rows": [\n{rows}\n]}}\n')


def read_results(path: Path, study: Study) -> StudyResults:
    """Return the runs in a file of results of this study.

    A file of older runs may be a list of rows without `made`, and its rows may have labels among their numbers. Raises
    ValueError if the runs are not those that the study plans.
    """
    if not path.is_file():
        raise ValueError(f"reproduce: the file of results '{path}' does not exist; run the study first")
    content = read_json(path)
    listed = content if isinstance(content, list) else content["rows"]
    made = {} if isinstance(content, list) else content["made"]
    found = StudyResults(tuple(_read(row, study) for row in listed), made, study.equal == "seconds", study.compared[0])
    planned = {(tuple(cell.labels.values()), seed) for cell in cells(study) for seed in study.seeds}
    measured = [(tuple(row.labels.values()), row.seed) for row in found.rows]
    if len(measured) != len(planned) or set(measured) != planned:
        odd = sorted(planned.symmetric_difference(measured))[:1]
        raise ValueError(
            f"{path}: must have one run for each cell and seed of {study.name}; missing or unexpected is {odd}"
        )
    return found


def _row(run: Run, edge: str) -> dict[str, Any]:
    if not run.result:
        raise ValueError(f"reproduce: the run in '{run.directory}' is not finished; give the same command again")
    steps, _, losses = run.curve(METRICS["val_loss"])
    rate = {"lr": learning_rate(run.config), **({"edge": edge} if edge else {})}
    numbers = {key: _short(run.result.get(key)) for key in RESULT_NUMBERS}
    return {"labels": run.labels, "seed": run.seed, **rate, **numbers, "curve": [steps, list(map(_short, losses))]}


def _read(row: Mapping[str, Any], study: Study) -> ResultRow:
    """Return a run. An older row has its labels among its numbers, by the axis or by the last part of its path."""
    known = row.get("labels", row)
    labels = {axis: as_label(known[axis if axis in known else axis.rpartition(".")[2]]) for axis in study.axes}
    return ResultRow(labels, row["seed"], row)


def _short(value: Any) -> Any:
    """Return a float rounded to seven digits, the precision of float32, or None if the float is not finite.

    Return a value that is no float unchanged.
    """
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if abs(value) < float("inf") else None
