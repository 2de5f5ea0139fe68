"""The runs of a study as compact rows, which a folder of papers/ keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..files import make_directory, read_json, write_text
from ..reports.records import learning_rate, read_records
from ..reports.run import METRICS, Run
from ..studies.axes import as_label
from ..studies.plan import cells
from ..studies.study import Study

_NUMBERS = (
    "val_loss",
    "val_accuracy",
    "train_loss",
    "steps",
    "seconds",
    "step_ms",
    "optimizer_ms",
    "state_bytes_per_parameter",
)


@dataclass(frozen=True)
class ResultRow:
    """One run: its labels by axis, its seed, and its numbers by name; a number it does not have is None."""

    labels: Mapping[str, str]
    seed: int
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class StudyResults:
    """The runs of a study, and when, on what and with what they were made, as far as it was recorded.

    timed: whether its cells train for equal seconds, each with steps of its own.
    """

    rows: tuple[ResultRow, ...]
    made: Mapping[str, str]
    timed: bool = False

    def row(self, labels: Mapping[str, str], seed: int) -> ResultRow:
        """The run of a cell with a seed. Raises ValueError where there is none."""
        for row in self.rows:
            if row.labels == labels and row.seed == seed:
                return row
        raise ValueError(f"results: a run of {dict(labels)} with seed {seed} is required, got none")


def collect_results(directory: Path) -> dict[str, Any]:
    """What is kept of the finished runs under `directory`.

    Raises ValueError where a run is not finished, or runs of one cell had other code or data.
    """
    records = read_records(directory)
    if records.notices:
        raise ValueError(f"results: {records.notices[0]}; remove those of one kind from {directory} and run it again")
    rows = [_row(run, records.rate_edge(run.labels)) for run in records.runs]
    last = max((run.directory / "result.json").stat().st_mtime for run in records.runs)
    seen = [run.environment for run in records.runs]
    made = {"date": datetime.fromtimestamp(last, UTC).date().isoformat()}
    for key in ("cpu", "device", "threads", "python", "torch", "eigengraft"):
        made[key] = ", ".join(dict.fromkeys(str(one.get(key, "")) for one in seen))
    return {"study": records.name, "made": made, "rows": rows}


def keep_results(content: Mapping[str, Any], path: Path) -> None:
    """Write what `collect_results` returned, one run a line."""
    make_directory(path.parent)
    rows = ",\n".join(json.dumps(row) for row in content["rows"])
    head = f'"study": {json.dumps(content["study"])},\n"made": {json.dumps(content["made"])}'
    write_text(path, f'{{{head},\n"rows": [\n{rows}\n]}}\n')


def read_results(path: Path, study: Study) -> StudyResults:
    """The runs in a file that was written from this study. Raises ValueError where they are others than it plans.

    A list of rows without what they were made on is read too; a row without `labels` has its labels beside its numbers.
    """
    if not path.is_file():
        raise ValueError(f"reproduce: a file with results is required, run the study first; got no '{path}'")
    content = read_json(path)
    listed = content if isinstance(content, list) else content["rows"]
    made = {} if isinstance(content, list) else content["made"]
    found = StudyResults(tuple(_read(row, study) for row in listed), made, study.equal == "seconds")
    planned = {(tuple(cell.labels.values()), seed) for cell in cells(study) for seed in study.seeds}
    measured = [(tuple(row.labels.values()), row.seed) for row in found.rows]
    if len(measured) != len(planned) or set(measured) != planned:
        odd = sorted(planned.symmetric_difference(measured))[:1]
        raise ValueError(f"{path}: one run of each cell and seed of {study.name} is required, not so for {odd}")
    return found


def _row(run: Run, edge: str) -> dict[str, Any]:
    if not run.result:
        raise ValueError(f"reproduce: finished runs are required, got none in '{run.directory}'")
    steps, _, losses = run.curve(METRICS["val_loss"])
    rate = {"lr": learning_rate(run.config), **({"edge": edge} if edge else {})}
    numbers = {key: _short(run.result.get(key)) for key in _NUMBERS}
    return {"labels": run.labels, "seed": run.seed, **rate, **numbers, "curve": [steps, list(map(_short, losses))]}


def _read(row: Mapping[str, Any], study: Study) -> ResultRow:
    labels = row.get("labels") or _own_labels(row, study)
    return ResultRow({axis: labels[axis] for axis in study.axes}, row["seed"], row)


def _own_labels(row: Mapping[str, Any], study: Study) -> dict[str, str]:
    """Labels that stand beside the numbers of a row, under their axis or the last part of its path."""
    return {axis: as_label(row[axis] if axis in row else row[axis.rpartition(".")[2]]) for axis in study.axes}


def _short(value: Any) -> Any:
    """A float to seven digits, as float32 has them; one that is not finite as None."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if abs(value) < float("inf") else None
