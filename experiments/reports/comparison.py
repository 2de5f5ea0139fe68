"""Comparison of the runs of a study along one of its axes, the compared axis.

A panel is one comparison, a section of the report. It has all runs with equal labels on all other axes. It has a row
for each label of the compared axis, and each row is drawn as one line in every figure of the panel. For example, a
study with the axes `recipe` and `decay` that compares recipes has a panel for each label of `decay`, and in it a row
for each recipe.

A sweep is a curve of the final metric over labels that are numbers, such as learning rates or intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from .figures import Curve, LostRun, styles_of
from .records import Abscissa, Metric, Records, Run, TunedCell, cell_name, group_by, label_number
from .seed_statistics import Paired, Summary, Target, holm, paired, reaches, summarize


@dataclass(frozen=True)
class ComparisonRow:
    """A row of a panel (`ComparisonPanel`): runs of one label on the compared axis, which differ only in their seeds.

    label: the label. If runs with this label also differ in configuration or provenance, there is a row for each
        variant, and the label ends with the variant (`Run.variant`).
    style: index that chooses the color, the dashes and the marker of the row's curve (`stroke`).
    runs: one run for each seed.
    baseline: row to compare with; None for the baseline itself.
    """

    label: str
    style: int
    runs: tuple[Run, ...]
    metric: Metric
    baseline: ComparisonRow | None
    axis: str = ""
    """Name of the compared axis. Figures and sentences put it before a label that is a number."""
    edge: str = ""
    """The end of the tried numbers, such as learning rates, at which a method is best: "least", "largest" or empty."""
    method: str = ""
    """Name of the method if `label` has both the method and the number at which it is best; else empty."""

    @property
    def title(self) -> str:
        """Label as figures and sentences show it."""
        return named(self.axis, self.label)

    @property
    def comparable(self) -> bool:
        """True if all runs of this row and of the baseline have the same data and the same recorded provenance."""
        runs = [run for run in (*self.runs, *(self.baseline.runs if self.baseline else ())) if run.config]
        entries = {entry for run in runs for entry in run.provenance.items()}
        return len({run.data[0] for run in runs}) < 2 and len(entries) == len({name for name, _ in entries})

    @cached_property
    def finals(self) -> dict[int, float]:
        """Final metric of each run that has ended, by its seed."""
        return {run.seed: run.final(self.metric) for run in self.runs if run.result}

    @property
    def diverged(self) -> int:
        return sum(run.status(self.metric) == "diverged" for run in self.runs)

    @property
    def ended(self) -> bool:
        """True if all runs have ended and none diverged."""
        return len(self.finals) == len(self.runs) and not self.diverged

    @cached_property
    def final(self) -> Summary | None:
        return summarize(list(self.finals.values()))

    @property
    def tested(self) -> bool:
        """True if three or more runs have ended. A t-test of two pairs needs |t| > 12.7, which is rare."""
        return len(self.finals) > 2

    @cached_property
    def rises(self) -> dict[int, tuple[int, float]]:
        """Step and metric of the best evaluation of each ended run whose metric got much worse after it, by seed."""
        return {run.seed: rise for run in self.runs if run.result and (rise := run.rise(self.metric)) is not None}

    @property
    def best_evaluation(self) -> tuple[Summary, str] | None:
        """Mean and spread of the best evaluations of all ended runs, and a text with the range of their steps, such as
        "at steps 100 to 300". None if no run has an evaluation.
        """
        found = [best for run in self.runs if run.result and (best := run.best(self.metric)) is not None]
        summary = summarize([value for _, value in found])
        if summary is None:
            return None
        first, last = min(step for step, _ in found), max(step for step, _ in found)
        return summary, f"at step {last:.0f}" if first == last else f"at steps {first:.0f} to {last:.0f}"

    @cached_property
    def difference(self) -> Paired | None:
        """Final metrics of this row minus those of the baseline, paired by seed.

        None for the baseline itself, if a run diverged, or if the rows are not comparable or have no common seed.
        """
        if self.baseline is None or self.diverged or self.baseline.diverged or not self.comparable:
            return None
        return paired(self.finals, self.baseline.finals)

    def reached(self, along: Abscissa = "steps") -> dict[int, float | None]:
        """Return where each ended run first reaches the final metric of the baseline's run with the same seed.

        The result is a mapping from seeds to values of the quantity `along`, such as the number of steps. A value is
        None if the run never reaches the metric. A seed is left out if the baseline has no finite final metric. The
        result is empty if the rows are not comparable, or if the metric of the baseline got much worse after its best
        evaluation, because the curve of the baseline then passes the final value long before its end.
        """
        base, found = self.baseline or self, dict[int, float | None]()
        levels, sign = base.finals, self.metric.sign
        for run in self.runs if self.comparable and not base.rises else ():
            if run.result and run.abscissas(along) and math.isfinite(levels.get(run.seed, math.inf)):
                points = run.points(self.metric, along).values()
                found[run.seed] = reaches(
                    [x for x, _ in points], [sign * y for _, y in points], sign * levels[run.seed]
                )
        return found

    def at_first_evaluation(self, along: Abscissa = "steps") -> set[int]:
        """Return the seeds whose runs have reached the baseline's metric at their first evaluation.

        They may have reached it earlier. For these seeds the result of `reached` is therefore only an upper bound.
        """
        found = self.reached(along)
        points = {run.seed: run.points(self.metric, along) for run in self.runs if found.get(run.seed) is not None}
        firsts = {seed: next(x for x, y in own.values() if math.isfinite(y)) for seed, own in points.items()}
        return {seed for seed, first in firsts.items() if found[seed] == first > 0}

    def first(self, target: Target) -> int | None:
        """Return the first step at which the row's runs reach a target (see `Target`), None if there is none."""
        return target.first([run.evaluations(self.metric) for run in self.runs], self.metric.sign)

    def summary(self, field: str) -> Summary | None:
        """Return the mean and the spread over seeds of `field`: the name of a number in result.json, or of a metric
        `val.NAME`. Return None if no run has this number.
        """
        found = ({**run.result, **run.metrics}.get(field) for run in self.runs)
        return summarize([value for value in found if value is not None])

    def mean(self, field: str) -> float | None:
        """Return the mean of `field` over seeds, as in `summary`; None if no run has this number."""
        summary = self.summary(field)
        return None if summary is None else summary.mean

    def curve(self, along: Abscissa = "steps", drawn: Metric | None = None) -> Curve | None:
        """Return the mean of a metric against steps, seconds, tokens or FLOPs. Return None if there is nothing to draw.

        The mean is computed at the steps at which all started runs were evaluated. Runs that diverged are left out of
        it, and are separate lines of the curve. The label says how many runs are unfinished, because the curve then
        ends early.

        drawn: metric to draw; None: the metric of the comparison, which always decides which runs diverged.
        """
        drawn = drawn or self.metric
        fine = [run for run in self.runs if run.status(self.metric) != "diverged"]
        curves = [points for run in fine if (points := run.points(drawn, along))]
        common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        ended = [_lost(run, drawn, along) for run in self.runs if run not in fine and run.rows]
        lost = [one for one in ended if one is not None]
        if not common and not lost:
            return None
        pairs = [[curve[step] for curve in curves] for step in common]

        def over(choose: Callable[[Sequence[float]], float], coordinate: int) -> list[float]:
            return [choose([pair[coordinate] for pair in some]) for some in pairs]

        text = f"{self.title}: {len(lost)} of {len(self.runs)} diverged" if lost else ""
        bounds, unfinished = (over(min, 1), over(max, 1)), sum(not run.result for run in fine if run.rows)
        label = f"{self.title}: {unfinished} of {len(self.runs)} unfinished" if unfinished else self.title
        return Curve(label, self.style, over(fmean, 0), over(fmean, 1), *bounds, lost=tuple(lost), lost_label=text)


@dataclass(frozen=True)
class ComparisonPanel:
    """One comparison: rows that differ only along the compared axis. A row has all runs of one label.

    title: the other axes with their labels, as `decay = none`; the name of the study if there are no other axes.
    """

    title: str
    labels: tuple[str, ...]
    """Labels that all runs of the panel have on the axes that are not compared."""
    headings: tuple[str, ...]
    """The same labels, each with its axis, as `decay = none`."""
    rows: tuple[ComparisonRow, ...]
    metric: Metric
    baseline: ComparisonRow | None
    axis: str
    """Name of the axis along which the rows differ."""

    @cached_property
    def best(self) -> ComparisonRow | None:
        """Row with the best mean among the rows whose runs have all ended without divergence. None if there is no such
        row, or if rows are not comparable.
        """
        if not all(row.comparable for row in self.rows):
            return None
        return next(iter(ranked(self.rows, self.metric)), None)

    @cached_property
    def leaders(self) -> list[ComparisonRow]:
        """The row with the best mean, and the rows that are not significantly worse. Empty without a best row."""
        return [] if self.best is None else leaders(self.rows, self.metric)

    @cached_property
    def second(self) -> ComparisonRow | None:
        """Row with the best mean after that of the best row; None if there is no such row."""
        return None if self.best is None else next(iter(ranked(self.rows, self.metric)[1:]), None)

    @cached_property
    def corrected(self) -> dict[str, float]:
        """The p-value of each row's difference from the baseline, by label, corrected for all comparisons of the panel
        (Holm).
        """
        tests = {row.label: row.difference.p for row in self.rows if row.difference is not None}
        return holm({label: p for label, p in tests.items() if p is not None})

    @property
    def risen(self) -> list[ComparisonRow]:
        """Rows with a run whose metric ended much worse than its best evaluation."""
        return [row for row in self.rows if row.rises]

    @property
    def busy(self) -> int:
        """Number of runs during which the machine had other load."""
        return sum(run.busy for row in self.rows for run in row.runs)

    @property
    def begun(self) -> bool:
        """True if a run has started, so that there is something to draw."""
        return any(run.rows for row in self.rows for run in row.runs)

    @property
    def reports_accuracy(self) -> bool:
        """True if the runs have an accuracy that is not the compared metric."""
        return self.metric.key != "val_accuracy" and any(row.mean("val_accuracy") is not None for row in self.rows)

    @cached_property
    def further(self) -> list[str]:
        """Columns `val.NAME` of the task's metrics that any run has, without the compared metric."""
        names = dict.fromkeys(name for row in self.rows for run in row.runs for name in run.metrics)
        return [name for name in names if name != self.metric.key]

    @property
    def configs(self) -> dict[str, Mapping[str, Any]]:
        """For each row, by its label, the configuration of one of its runs. Rows without a started run are left out."""
        found = {row.label: next((run.config for run in row.runs if run.config), None) for row in self.rows}
        return {label: config for label, config in found.items() if config}


def ranked(rows: Iterable[ComparisonRow], metric: Metric) -> list[ComparisonRow]:
    """Return the rows whose runs have all ended without divergence, the best mean first."""
    means = [(metric.sign * row.final.mean, row) for row in rows if row.final and row.ended]
    return [row for _, row in sorted(means, key=lambda pair: pair[0])]


def leaders(rows: Iterable[ComparisonRow], metric: Metric) -> list[ComparisonRow]:
    """Return the row with the best mean, and then the rows that a paired t-test over common seeds does not distinguish
    from it at 5 percent, corrected for all rows (Holm).

    Rows whose runs have not all ended, or diverged, are left out. One seed allows no test: then only the best row is
    returned. [] if no row is left.
    """
    ended = ranked(rows, metric)
    p: dict[str, float] = {}
    for place, row in enumerate(ended[1:], start=1):
        test = paired(row.finals, ended[0].finals)
        if test is not None and test.n > 1:
            # `test.p` is None if all differences are equal. Then p is 1 if they are 0, and 0 otherwise.
            p[str(place)] = test.p if test.p is not None else float(test.mean == 0)
    corrected = holm(p)
    return [row for place, row in enumerate(ended) if not place or corrected.get(str(place), 0.0) > 0.05]


@lru_cache(maxsize=2)
def compare(records: Records) -> Sequence[ComparisonPanel]:
    """Group the runs into panels, one for each combination of labels on the axes that are not compared.

    The row of the baseline is the first of a panel. The other rows have the order of the runs. Tables, legends and
    figures have this order. The result is cached, so that tests and curves of its rows are computed once.
    """

    def others(run: Run) -> tuple[tuple[str, str], ...]:
        return tuple((axis, label) for axis, label in run.labels.items() if axis != records.compare)

    styles = _styles({_row_label(run, records): run.labels[records.compare] for run in records.runs}, records)
    return [_panel(own, runs, styles, records) for own, runs in group_by(records.runs, others).items()]


def _styles(methods: Mapping[str, str], records: Records) -> dict[str, int]:
    """Return the number of the style (color, dashes and marker) of each row or curve, by its label.

    A method usually has the same style in all figures (see `styles_of`). If the names of all methods are numbers, such
    as learning rates, the styles are 0, 1, 2, ... in the order of `methods`.

    methods: label of a row or curve -> name of its method.
    """
    if all(math.isfinite(label_number(name)) for name in methods.values()):
        return {label: place for place, label in enumerate(methods)}
    return styles_of({label: records.originals.get(name, name) for label, name in methods.items()})


def _panel(
    others: Sequence[tuple[str, str]], runs: Sequence[Run], styles: Mapping[str, int], records: Records
) -> ComparisonPanel:
    by_label = group_by(runs, lambda run: _row_label(run, records))

    def row(label: str, baseline: ComparisonRow | None) -> ComparisonRow:
        return ComparisonRow(label, styles[label], tuple(by_label[label]), records.metric, baseline, records.compare)

    base = next((_row_label(run, records) for run in runs if run.labels[records.compare] == records.baseline), None)
    baseline = None if base is None else row(base, None)
    others_of = (row(label, baseline) for label in by_label if label != base)
    rows = (*(() if baseline is None else (baseline,)), *others_of)
    labels, headings = tuple(named(*one) for one in others), tuple(heading(*one) for one in others)
    title = ", ".join(headings) or records.name
    return ComparisonPanel(title, labels, headings, rows, records.metric, baseline, records.compare)


def _row_label(run: Run, records: Records) -> str:
    """Return the label of the row to which a run belongs: its label on the compared axis, then its variant, if any."""
    label = run.labels[records.compare]
    return f"{label} [{run.variant}]" if run.variant else label


def named(axis: str, label: str) -> str:
    """Return a label for readers. A number is written after the name of its axis, as `refresh.steps 10`."""
    return label if math.isnan(label_number(label)) else f"{'.'.join(axis.split('.')[-2:])} {label}".strip()


def heading(axis: str, label: str) -> str:
    """Return a label with its axis, such as `decay = none`. If the name of the axis is a dotted path, only the last two
    parts of the path are shown.
    """
    return f"{'.'.join(axis.split('.')[-2:])} = {label}"


def _lost(run: Run, metric: Metric, along: Abscissa) -> LostRun | None:
    """Return the finite evaluations of a run that diverged, and the step or time at which it ended.

    Returns None if the run has not recorded the quantity `along`.
    """
    ends = run.abscissas(along)
    points = [(x, y) for x, y in run.points(metric, along).values() if math.isfinite(y)]
    return LostRun([x for x, _ in points], [y for _, y in points], ends[-1]) if ends else None


@lru_cache(maxsize=2)
def swept(records: Records) -> Records:
    """Return the records with the axis of learning rates as the compared axis, if the study has such an axis.

    The axis that the study itself compares, such as that of recipes, becomes the axis of methods (`_methods`). The runs
    of the baseline come first. Records without an axis of learning rates, and records that already compare learning
    rates, are returned unchanged.
    """
    rates = records.rates
    if rates in ("", records.compare):
        return records
    axes = [*(axis for axis in records.runs[0].labels if axis not in (records.compare, rates)), records.compare, rates]
    runs = [replace(run, labels={axis: run.labels[axis] for axis in axes}) for run in records.runs]
    runs.sort(key=lambda run: run.labels[records.compare] != records.baseline)
    return replace(records, runs=tuple(runs), compare=rates, baseline=runs[0].labels[rates])


def sweeps(records: Records) -> dict[str, list[Curve]]:
    """Return curves of the final metric against the compared labels if these are numbers, such as learning rates.

    The result is a mapping from titles of figures to their curves. A figure has one curve for each method, which is a
    label on the axis of methods (`_methods`), such as a recipe. There is a figure for each combination of labels on the
    axes other than this one and the compared axis. Diverged runs leave a gap in a curve, and labels without a finished
    run are left out. Return {} if fewer than two labels are compared, or if one of them is not a number.
    """
    panels = compare(records)
    numbers = _numbers(panels)
    styles = _styles({last: last for last in (_last(panel, records) for panel in panels)}, records)
    found: dict[str, list[Curve]] = {}
    for panel in panels if numbers else ():
        outer, last = panel.headings[:-1], _last(panel, records)
        ended = sorted(((numbers[r.label], r) for r in panel.rows if r.finals), key=lambda pair: pair[0])
        values = [[v if math.isfinite(v) else math.nan for v in row.finals.values()] for _, row in ended]
        lost = tuple(LostRun((), (), number) for number, row in ended if row.diverged)
        curve = Curve(
            label=last,
            style=styles[last],
            lost=lost,
            lost_label=f"{last}: a run diverged" if lost else "",
            x=[number for number, _ in ended],
            mean=list(map(fmean, values)),
            low=[min(some) for some in values],
            high=[max(some) for some in values],
        )
        if ended:
            found.setdefault(", ".join(outer) or records.name, []).append(curve)
    return found


def _last(panel: ComparisonPanel, records: Records) -> str:
    """Return the method of a panel: the label of its runs on the axis of methods (`_methods`). Return the name of the
    study if there is no such axis.
    """
    return (panel.labels or (records.name,))[-1]


def _numbers(panels: Sequence[ComparisonPanel]) -> dict[str, float]:
    """Return a mapping from the labels of all rows to these labels as numbers. Return {} if there is only one label, or
    if one of the labels is not a number.
    """
    numbers = {row.label: label_number(row.label) for panel in panels for row in panel.rows}
    return numbers if len(numbers) > 1 and all(map(math.isfinite, numbers.values())) else {}


def _by_conditions(records: Records) -> list[tuple[tuple[str, ...], list[ComparisonPanel]]]:
    """Return groups of panels that compare the same numbers, such as learning rates. Each panel of a group has another
    method, such as "adamw" or "soap".

    A method is a label on the axis of methods (`_methods`). On all other axes but the compared one, the panels of a
    group have equal labels. An item of the result is (headings of these labels, panels of the group). Groups with one
    panel are left out. The result is [] if fewer than two labels are compared, or if one of them is not a number.
    """
    panels = compare(records)
    groups = group_by((panel for panel in panels if panel.labels), lambda panel: panel.headings[:-1])
    return [(outer, group) for outer, group in groups.items() if len(group) > 1] if _numbers(panels) else []


@lru_cache(maxsize=2)
def at_their_best(records: Records) -> Sequence[ComparisonPanel]:
    """Return comparisons of methods, each method at the best number of the compared axis, such as its best learning
    rate.

    A method is a label on the axis of methods (`_methods`). The first method is the baseline, if it has a best number.
    Return [] unless the compared labels are numbers and several methods have ended.
    """
    found, first = [], _baseline_method(records)
    for outer, group in _by_conditions(records):
        rows: list[ComparisonRow] = []
        baseline: ComparisonRow | None = None
        styles = _styles({panel.labels[-1]: panel.labels[-1] for panel in group}, records)
        for panel in sorted(group, key=lambda panel: panel.labels[-1] != first):
            if (best := panel.best) is not None:
                method = panel.labels[-1]
                label, edge = f"{method}, {named(records.compare, best.label)}", _edge(panel, best)
                own = {"edge": edge, "method": method}
                rows.append(ComparisonRow(label, styles[method], best.runs, records.metric, baseline, **own))
                if method == first:
                    baseline = rows[0]
        if len(rows) > 1:
            title, axis = [*outer, f"each at its own best {records.compare}"], _methods(records)
            title += [] if baseline else [f"without the baseline {first}, which has no best {records.compare}"]
            labels = group[0].labels[:-1]
            found.append(ComparisonPanel(", ".join(title), labels, outer, tuple(rows), records.metric, baseline, axis))
    return found


def all_panels(records: Records) -> list[ComparisonPanel]:
    """Return all comparisons of a report: first those of methods at their best, then those of all runs.

    A method at its best has only the runs at its best learning rate or, if the study has no axis of learning rates, at
    the best number on the compared axis. A comparison of all runs is left out if it has the same runs as one at the
    best.
    """
    return [*at_their_best(swept(records)), *(one for one in compare(records) if twin(one, records) is None)]


def twin(panel: ComparisonPanel, records: Records) -> ComparisonPanel | None:
    """Return the comparison of methods at their best that has exactly the runs of `panel`; None if there is none.

    A report shows only one of two comparisons with the same runs.
    """

    def runs(one: ComparisonPanel) -> list[Path]:
        return [run.directory for row in one.rows for run in row.runs]

    others = (best for best in at_their_best(swept(records)) if best is not panel)
    return next((best for best in others if runs(best) == runs(panel)), None)


def _edge(panel: ComparisonPanel, best: ComparisonRow) -> str:
    """Return "least" or "largest" if `best` has the least or the largest number that was tried, else "".

    The label of a row is its number. Numbers of rows without ended runs were not tried.
    """
    tried, number = [label_number(row.label) for row in panel.rows if row.finals], label_number(best.label)
    return "least" if number == min(tried) else "largest" if number == max(tried) else ""


def method_axis(records: Records) -> str | None:
    """Return the axis whose labels are methods, such as "recipe", if the report compares methods at their best.

    Such a comparison has only the runs of each method at its best learning rate. If the study has no axis of learning
    rates, the comparison has the runs of each method at its best number on the axis that the study compares. Return
    None if the report has no such comparison.
    """
    rates = swept(records)
    return _methods(rates) if _by_conditions(rates) else None


def _methods(records: Records) -> str:
    """Return the name of the axis of methods, "" if there is none. It is the last axis other than the compared axis.

    Its labels are called methods. They are recipes, for example, if the compared axis is that of learning rates.
    """
    return next((axis for axis in reversed(records.axes) if axis != records.compare), "")


def _baseline_method(records: Records) -> str:
    """Return the baseline of a comparison of methods: the method of the first run; "" if there are no methods."""
    axis = _methods(records)
    return named(axis, records.runs[0].labels[axis]) if axis else ""


def describe_comparisons(records: Records) -> list[str]:
    """Return a sentence for each kind of comparison in the report of these runs. No run needs to have started."""
    rates, panels, found = swept(records), compare(records), list[str]()
    groups = _by_conditions(rates)
    if groups:
        methods = list(dict.fromkeys(panel.labels[-1] for _, group in groups for panel in group))
        numbers = dict.fromkeys(row.label for _, group in groups for panel in group for row in panel.rows)
        each = f"{', '.join(methods)}, each at its own best {rates.compare} of {', '.join(numbers)}"
        found.append(
            f"the report compares {each}, with the baseline {_baseline_method(rates)}{_panels([o for o, _ in groups])}"
        )
    rows = list(dict.fromkeys(row.title for panel in panels for row in panel.rows))
    if len(rows) > 1:
        base = named(records.compare, records.baseline)
        compared = f"{', '.join(rows)}, with the baseline {base}{_panels([panel.headings for panel in panels])}"
        found.append(f"the report compares {compared}")
    return found or [f"the report compares nothing, because the axis {records.compare} has one label"]


def _panels(conditions: Sequence[tuple[str, ...]]) -> str:
    """Return ", for each of ..." with the conditions of several panels; empty for a single panel.

    conditions: for each panel, its labels on the axes that are not compared.
    """
    return f", for each of {'; '.join(', '.join(one) for one in conditions)}" if len(conditions) > 1 else ""


def tuning_curves(records: Records) -> dict[tuple[str, str], list[Curve]]:
    """Return, by (field, title of the panel), curves of the mean metric against the values that a search tried.

    The curve of the baseline is the first. If a search varied several fields, a value is drawn with the best mean of
    all trials with this value. A value is drawn as a cross if a trial with it diverged, and no trial with it was
    completed. Trials that were stopped early are left out. A field without three values that are positive numbers has
    no curve.
    """
    cells = {cell_name(run.labels): run.labels for run in records.runs}
    tuned = {one.cell: cells.get(one.cell, {}).get(records.compare, one.cell) for one in records.tuned}
    styles = _styles({named(records.compare, label): label for label in tuned.values()}, records)
    found: dict[tuple[str, str], list[Curve]] = {}
    for one in sorted(records.tuned, key=lambda one: tuned[one.cell] != records.baseline):
        labels, label = cells.get(one.cell, {}), named(records.compare, tuned[one.cell])
        title = ", ".join(heading(axis, text) for axis, text in labels.items() if axis != records.compare)
        for path in one.values:
            curve = _tuning_curve(one, path, records.metric.sign, label, styles[label])
            if curve is not None:
                found.setdefault((path, title or records.name), []).append(curve)
    return found


def _tuning_curve(one: TunedCell, path: str, sign: int, label: str, style: int) -> Curve | None:
    """Return the curve of the mean metric against the values of the field `path` that a search tried.

    Return None if a value is not a positive number, or if there are fewer than three.

    one: result of the search.
    sign: 1 if smaller values of the metric are better, -1 if larger values are.
    label: text of the curve in the legend.
    style: number of color, dashes and marker.
    """
    best: dict[float, float] = {}
    diverged: dict[float, None] = {}
    for trial in one.tried:
        value = trial.values[path]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            return None
        if trial.mean is None:
            diverged[float(value)] = None
        elif trial.stopped is None:
            best[float(value)] = min(best.get(float(value), math.inf), sign * trial.mean)
    lost = tuple(LostRun((), (), value) for value in diverged if value not in best)
    x = sorted(best)
    if len(x) + len(lost) < 3:
        return None
    mean = [sign * best[value] for value in x]
    return Curve(label, style, x, mean, mean, mean, lost, f"{label}: diverged" if lost else "")
