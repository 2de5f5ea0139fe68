"""Runs of a study, compared: panels of equal conditions with one row and one pair of curves per label compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .figures import Curve
from .records import Metric, Records, Run
from .seed_statistics import Paired, Summary, paired, reaches, summarize


@dataclass(frozen=True)
class ComparisonRow:
    """All runs of one label in one panel; `baseline` is the row to compare with, None for the baseline itself."""

    label: str
    style: int
    runs: tuple[Run, ...]
    metric: Metric
    baseline: ComparisonRow | None

    @cached_property
    def finals(self) -> dict[int, float]:
        """The metric at the end, by seed, of the runs that ended."""
        return {run.seed: run.final(self.metric) for run in self.runs if run.result}

    @property
    def diverged(self) -> int:
        return sum(run.status(self.metric) == "diverged" for run in self.runs)

    @property
    def ended(self) -> bool:
        """Whether all runs have ended and none diverged."""
        return len(self.finals) == len(self.runs) and not self.diverged

    @cached_property
    def final(self) -> Summary | None:
        return summarize(list(self.finals.values()))

    @cached_property
    def difference(self) -> Paired | None:
        """This row minus the baseline over the seeds both have; None where a run of one of them diverged."""
        if self.baseline is None or self.diverged or self.baseline.diverged:
            return None
        return paired(self.finals, self.baseline.finals)

    def reached(self, axis: int) -> dict[int, float | None]:
        """By seed, the step (axis 0) or second (1) at which the baseline's final metric with that seed is reached."""
        levels = self.baseline.finals if self.baseline else self.finals
        found = {}
        for run in self.runs:
            if run.result and math.isfinite(levels.get(run.seed, math.inf)):
                curve = run.curve(self.metric)
                values = [self.metric.sign * value for value in curve[2]]
                found[run.seed] = reaches(curve[axis], values, self.metric.sign * levels[run.seed])
        return found

    def mean(self, field: str) -> float | None:
        """Mean over seeds of a number in result.json."""
        values = [run.result[field] for run in self.runs if run.result.get(field) is not None]
        summary = summarize(values)
        return summary.mean if summary else None

    def curve(self, axis: int) -> Curve | None:
        """The metric against steps (axis 0) or seconds (1) over the evaluations that all begun runs have."""
        curves = [curve for run in self.runs if (curve := run.curve(self.metric))[0]]
        common = sorted(set.intersection(*(set(curve[0]) for curve in curves))) if curves else []
        if not common:
            return None
        points = [[(curve[axis][i], curve[2][i]) for curve in curves for i in [curve[0].index(s)]] for s in common]

        def over(choose: Callable[[Sequence[float]], float], coordinate: int) -> list[float]:
            return [choose([pair[coordinate] for pair in point]) for point in points]

        return Curve(self.label, self.style, over(_mean, 0), over(_mean, 1), over(min, 1), over(max, 1))


@dataclass(frozen=True)
class ComparisonPanel:
    """Rows that differ only along the axis compared."""

    title: str
    labels: tuple[str, ...]
    """Labels on the axes that are not compared."""
    rows: tuple[ComparisonRow, ...]
    metric: Metric
    baseline: ComparisonRow | None

    @cached_property
    def best(self) -> ComparisonRow | None:
        """The row with the best mean among those whose runs have all ended and none diverged."""
        means = [(self.metric.sign * row.final.mean, row) for row in self.rows if row.final and row.ended]
        return min(means, key=lambda pair: pair[0])[1] if means else None

    @property
    def begun(self) -> bool:
        """Whether there is anything to draw."""
        return any(run.rows for row in self.rows for run in row.runs)

    @property
    def reports_accuracy(self) -> bool:
        """Whether there is an accuracy to show beside another metric."""
        return self.metric.key != "val_accuracy" and any(row.mean("val_accuracy") is not None for row in self.rows)

    @property
    def configs(self) -> dict[str, Mapping[str, Any]]:
        """One resolved configuration for each label that has any."""
        found = {row.label: next((run.config for run in row.runs if run.config), None) for row in self.rows}
        return {label: config for label, config in found.items() if config}


def compare(records: Records) -> list[ComparisonPanel]:
    """Group the runs: one panel for each combination of labels on the axes that are not compared."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in records.runs:
        others = tuple(label for axis, label in run.labels.items() if axis != records.compare)
        groups.setdefault(others, []).append(run)
    labels = list(dict.fromkeys(run.labels[records.compare] for run in records.runs))
    # The baseline has the first colour wherever it stands.
    styles = {label: i for i, label in enumerate(dict.fromkeys([records.baseline, *labels]))}
    return [_panel(others, runs, styles, records) for others, runs in groups.items()]


def _panel(
    others: tuple[str, ...], runs: Sequence[Run], styles: Mapping[str, int], records: Records
) -> ComparisonPanel:
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.labels[records.compare], []).append(run)
    chosen = by_label.get(records.baseline)
    baseline = ComparisonRow(records.baseline, 0, tuple(chosen), records.metric, None) if chosen else None
    found = {
        label: ComparisonRow(label, styles[label], tuple(r), records.metric, baseline) for label, r in by_label.items()
    }
    rows = tuple(baseline if baseline and label == baseline.label else row for label, row in found.items())
    return ComparisonPanel(", ".join(others) or records.name, others, rows, records.metric, baseline)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
