"""One run directory, read from its files, and the metrics that runs are compared by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ..files import read_object, read_rows
from ..provenance import provenance_of

Status = Literal["complete", "diverged", "failed", "unfinished", "missing"]


MetricName = Literal["val_loss", "val_accuracy"]


@dataclass(frozen=True)
class Metric:
    """The metric of a comparison: a column of metrics.jsonl and field of result.json; `sign` -1: larger is better."""

    key: MetricName
    title: str
    sign: int

    @property
    def worst(self) -> float:
        """The value of a run that diverged."""
        return self.sign * math.inf


METRICS = {
    "val_loss": Metric("val_loss", "validation loss", 1),
    "val_accuracy": Metric("val_accuracy", "validation accuracy", -1),
}


@dataclass(frozen=True)
class Run:
    """One run directory.

    labels: label by axis of its study.
    variant: how it differs from other runs with these labels in its configuration or provenance; empty: it does not.
    """

    labels: dict[str, str]
    seed: int
    directory: Path
    variant: str = ""

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_object(self.directory / "config.json")

    @cached_property
    def environment(self) -> dict[str, Any]:
        return read_object(self.directory / "env.json")

    @cached_property
    def provenance(self) -> dict[str, str]:
        """Versions, code and data that made the numbers; empty before the run has begun."""
        return provenance_of(self.environment)

    @cached_property
    def result(self) -> dict[str, Any]:
        return read_object(self.directory / "result.json")

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
        return read_rows(self.directory / "metrics.jsonl")

    @cached_property
    def diagnostics(self) -> list[dict[str, Any]]:
        """The lines of diagnostics.jsonl, which many runs do not have."""
        return read_rows(self.directory / "diagnostics.jsonl")

    @cached_property
    def error(self) -> str:
        path = fault_file(self.directory)
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def status(self, metric: Metric) -> Status:
        if self.result:
            return "complete" if math.isfinite(self.final(metric)) else "diverged"
        if self.error:
            return "failed"
        return "unfinished" if self.config else "missing"

    def final(self, metric: Metric) -> float:
        """The metric at the end of a complete run; the worst value where the run diverged."""
        return _number(self.result.get(metric.key), metric)

    @property
    def data(self) -> tuple[str, str]:
        """The kind of the task and the sha256 of its data."""
        return str(self.config.get("task", {}).get("kind", "")), self.provenance.get("data", "")

    @cached_property
    def median_step(self) -> float | None:
        """Median over rows of the median milliseconds of a step; None without rows that have it."""
        found = [float(row["step_ms"]) for row in self.rows if row.get("step_ms")]
        return median(found) if found else None

    @property
    def busy(self) -> bool:
        """Whether in a tenth of the rows the median step took 1.5 times as long as in the others."""
        found = sorted(float(row["step_ms"]) for row in self.rows if row.get("step_ms"))
        return len(found) >= 4 and found[-(-9 * len(found) // 10) - 1] > 1.5 * (self.median_step or math.inf)

    def seconds(self) -> list[float]:
        """Training seconds at every row, as they were if the median step took as long in all of them.

        The seconds of a row, rare expensive steps included, are divided by its median step and multiplied by that of
        the run, so that what else the machine did is left out.
        """
        total, before, found = 0.0, 0.0, []
        for row in self.rows:
            own = row.get("step_ms")
            total += (float(row["seconds"]) - before) * ((self.median_step or 1.0) / float(own) if own else 1.0)
            before = float(row["seconds"])
            found.append(total)
        return found

    def curve(self, metric: Metric) -> tuple[list[int], list[float], list[float]]:
        """Steps, training seconds and metric at every evaluation."""
        rows = [
            (row, time) for row, time in zip(self.rows, self.seconds(), strict=True) if row.get(metric.key) is not None
        ]
        return (
            [int(row["step"]) for row, _ in rows],
            [time for _, time in rows],
            [_number(row[metric.key], metric) for row, _ in rows],
        )


def fault_file(run: Path) -> Path:
    """The file beside the directory `run` in which a study records why the run failed."""
    return run.with_name(f"{run.name}.error.txt")


def _number(value: object, metric: Metric) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else metric.worst
