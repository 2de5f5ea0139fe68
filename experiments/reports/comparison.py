"""Runs of a study, compared: panels of equal conditions with one row and one pair of curves per label compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from .figures import Curve, LostRun
from .records import Records
from .run import Metric, Run
from .seed_statistics import Paired, Summary, Target, holm, paired, reaches, summarize


@dataclass(frozen=True)
class ComparisonRow:
    """All runs of one label in one panel; `baseline` is the row to compare with, None for the baseline itself."""

    label: str
    style: int
    runs: tuple[Run, ...]
    metric: Metric
    baseline: ComparisonRow | None
    axis: str = ""
    """The axis compared, which stands before a label that is a number."""

    @property
    def title(self) -> str:
        """The label as figures and sentences have it."""
        return named(self.axis, self.label)

    @property
    def comparable(self) -> bool:
        """Whether all runs, and those of the baseline, are of one task and one provenance, as far as both have it."""
        runs = [run for run in (*self.runs, *(self.baseline.runs if self.baseline else ())) if run.config]
        entries = {entry for run in runs for entry in run.provenance.items()}
        return len({run.data[0] for run in runs}) < 2 and len(entries) == len({name for name, _ in entries})

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
        """This row minus the baseline over the seeds both have; None where a run diverged, or the tasks differ."""
        if self.baseline is None or self.diverged or self.baseline.diverged or not self.comparable:
            return None
        return paired(self.finals, self.baseline.finals)

    def reached(self, axis: int) -> dict[int, float | None]:
        """By seed, the step (axis 0) or second (1) at which the baseline's final metric with that seed is reached."""
        levels = self.baseline.finals if self.baseline else self.finals
        found = {}
        for run in self.runs if self.comparable else ():
            if run.result and math.isfinite(levels.get(run.seed, math.inf)):
                curve = run.curve(self.metric)
                values = [self.metric.sign * value for value in curve[2]]
                found[run.seed] = reaches(curve[axis], values, self.metric.sign * levels[run.seed])
        return found

    def first(self, target: Target) -> int | None:
        """The step at which all runs together reach a target; a run that has not come to a step is not there."""
        curves = (run.curve(self.metric) for run in self.runs)
        return target.first([dict(zip(curve[0], curve[2], strict=True)) for curve in curves], self.metric.sign)

    def mean(self, field: str) -> float | None:
        """Mean over seeds of a number in result.json."""
        values = [run.result[field] for run in self.runs if run.result.get(field) is not None]
        summary = summarize(values)
        return summary.mean if summary else None

    def curve(self, axis: int) -> Curve | None:
        """The metric against steps (axis 0) or seconds (1) over the evaluations that all begun runs have.

        Runs that diverged are lines of their own.
        """
        fine = [run for run in self.runs if run.status(self.metric) != "diverged"]
        curves = [curve for run in fine if (curve := run.curve(self.metric))[0]]
        common = sorted(set.intersection(*(set(curve[0]) for curve in curves))) if curves else []
        lost = [_lost(run, self.metric, axis) for run in self.runs if run not in fine and run.rows]
        if not common and not lost:
            return None
        points = [[(curve[axis][i], curve[2][i]) for curve in curves for i in [curve[0].index(s)]] for s in common]

        def over(choose: Callable[[Sequence[float]], float], coordinate: int) -> list[float]:
            return [choose([pair[coordinate] for pair in point]) for point in points]

        text = f"{self.title}: {len(lost)} of {len(self.runs)} diverged" if lost else ""
        bounds = (over(min, 1), over(max, 1))
        return Curve(self.title, self.style, over(fmean, 0), over(fmean, 1), *bounds, lost=tuple(lost), lost_label=text)


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
        """The row with the best mean among those whose runs have all ended and none diverged; none across tasks."""
        if not all(row.comparable for row in self.rows):
            return None
        means = [(self.metric.sign * row.final.mean, row) for row in self.rows if row.final and row.ended]
        return min(means, key=lambda pair: pair[0])[1] if means else None

    @cached_property
    def corrected(self) -> dict[str, float]:
        """p of every row's difference by its label, corrected for all comparisons of the panel (Holm)."""
        tests = {row.label: row.difference.p for row in self.rows if row.difference is not None}
        return holm({label: p for label, p in tests.items() if p is not None})

    @property
    def busy(self) -> int:
        """Number of runs during which the machine did other things too."""
        return sum(run.busy for row in self.rows for run in row.runs)

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
        others = tuple(named(axis, label) for axis, label in run.labels.items() if axis != records.compare)
        groups.setdefault(others, []).append(run)
    # The baseline has the first colour wherever it stands.
    first = [_row_label(run, records) for run in records.runs if run.labels[records.compare] == records.baseline]
    labels = dict.fromkeys([*first, *(_row_label(run, records) for run in records.runs)])
    styles = {label: i for i, label in enumerate(labels)}
    return [_panel(others, runs, styles, records) for others, runs in groups.items()]


def _panel(
    others: tuple[str, ...], runs: Sequence[Run], styles: Mapping[str, int], records: Records
) -> ComparisonPanel:
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(_row_label(run, records), []).append(run)
    labelled = (_row_label(run, records) for run in runs if run.labels[records.compare] == records.baseline)
    base = next(labelled, None)
    metric, axis, baseline = records.metric, records.compare, None
    if base is not None:
        baseline = ComparisonRow(base, styles[base], tuple(by_label[base]), metric, None, axis)
    found = {
        label: ComparisonRow(label, styles[label], tuple(some), metric, baseline, axis)
        for label, some in by_label.items()
    }
    rows = tuple(baseline if baseline and label == baseline.label else row for label, row in found.items())
    return ComparisonPanel(", ".join(others) or records.name, others, rows, records.metric, baseline)


def _row_label(run: Run, records: Records) -> str:
    """The label of a run on the compared axis, with its variant where runs of one cell differ."""
    label = run.labels[records.compare]
    return f"{label} [{run.variant}]" if run.variant else label


def named(axis: str, label: str) -> str:
    """A label that is a number with the name of its axis, the last two parts of its path; another label as it is."""
    try:
        float(label)
    except ValueError:
        return label
    return f"{'.'.join(axis.split('.')[-2:])} {label}".strip()


def _lost(run: Run, metric: Metric, axis: int) -> LostRun:
    """The evaluations of a run that diverged, as far as they are finite, and where it ended."""
    curve = run.curve(metric)
    points = [(x, y) for x, y in zip(curve[axis], curve[2], strict=True) if math.isfinite(y)]
    end = float(run.rows[-1]["step"]) if axis == 0 else run.seconds()[-1]
    return LostRun([float(x) for x, _ in points], [y for _, y in points], end)
