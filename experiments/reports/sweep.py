"""Sweeps: the final metric as a curve over labels that are numbers, such as learning rates or intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .comparison import ComparisonPanel, ComparisonRow, compare, named
from .figures import Curve, LostRun
from .records import Records, TunedCell, cell_name

RATE = "lr"
"""The axis whose best label each method may have for itself, whatever the study compares."""


def swept(records: Records) -> Records:
    """The runs compared along the learning rate, if that is an axis beside the one that the study compares.

    The methods are the last of the other labels then, and the runs of the baseline come first.
    """
    if records.compare == RATE or not all(RATE in run.labels for run in records.runs):
        return records
    runs = [replace(run, labels=_rate_last(run.labels, records.compare)) for run in records.runs]
    runs.sort(key=lambda run: run.labels[records.compare] != records.baseline)
    return replace(records, runs=tuple(runs), compare=RATE, baseline=runs[0].labels[RATE])


def _rate_last(labels: Mapping[str, str], method: str) -> dict[str, str]:
    others = {axis: label for axis, label in labels.items() if axis not in (method, RATE)}
    return {**others, method: labels[method], RATE: labels[RATE]}


def sweeps(records: Records) -> dict[str, list[Curve]]:
    """Curves by title: one curve per panel; panels that differ only in the last label share a figure.

    Empty unless all labels are numbers. Diverged runs leave a gap; rows without a finished run are left out.
    """
    panels = compare(records)
    numbers = {row.label: _number(row.label) for panel in panels for row in panel.rows}
    if len(numbers) < 3 or not all(map(math.isfinite, numbers.values())):
        return {}
    styles: dict[str, int] = {}
    found: dict[str, list[Curve]] = {}
    for panel in panels:
        *outer, last = panel.labels or (records.name,)
        ended = sorted(((numbers[r.label], r) for r in panel.rows if r.finals), key=lambda pair: pair[0])
        values = [[v if math.isfinite(v) else math.nan for v in row.finals.values()] for _, row in ended]
        lost = tuple(LostRun((), (), number) for number, row in ended if row.diverged)
        curve = Curve(
            label=last,
            style=styles.setdefault(last, len(styles)),
            lost=lost,
            lost_label=f"{last}: a run diverged" if lost else "",
            x=[number for number, _ in ended],
            mean=[math.fsum(some) / len(some) for some in values],
            low=[min(some) for some in values],
            high=[max(some) for some in values],
        )
        if ended:
            found.setdefault(", ".join(outer) or records.name, []).append(curve)
    return found


def at_their_best(records: Records) -> list[ComparisonPanel]:
    """Panels that compare each method, a label of the axis before the last, at its own best number of a sweep.

    The first method is the baseline. Empty where there is no sweep, or one method alone.
    """
    groups: dict[tuple[str, ...], list[ComparisonPanel]] = {}
    for panel in compare(records) if sweeps(records) else ():
        if panel.best is not None and panel.labels:
            groups.setdefault(panel.labels[:-1], []).append(panel)
    return [_at_their_best(records, outer, group) for outer, group in groups.items() if len(group) > 1]


def _at_their_best(records: Records, outer: tuple[str, ...], group: Sequence[ComparisonPanel]) -> ComparisonPanel:
    chosen = [(panel.labels[-1], panel.best) for panel in group if panel.best is not None]
    rows: list[ComparisonRow] = []
    for style, (method, best) in enumerate(chosen):
        label = f"{method}, {named(records.compare, best.label)}"
        rows.append(ComparisonRow(label, style, best.runs, records.metric, rows[0] if rows else None))
    title = ", ".join([*outer, f"each at its own best {records.compare}"])
    return ComparisonPanel(title, outer, tuple(rows), records.metric, rows[0])


def tuning_curves(records: Records) -> dict[tuple[str, str], list[Curve]]:
    """Curves of what searches tried, by (dotted path, title of the panel): the mean metric against values of a field.

    Of several values of other fields the best counts. Diverged values are crosses. Values whose runs were stopped early
    are left out, and so are fields without three positive numbers.
    """
    cells = {cell_name(run.labels): run.labels for run in records.runs}
    styles: dict[str, int] = {}
    found: dict[tuple[str, str], list[Curve]] = {}
    for one in records.tuned:
        labels = cells.get(one.cell, {})
        label = named(records.compare, labels.get(records.compare, one.cell))
        title = ", ".join(named(axis, text) for axis, text in labels.items() if axis != records.compare)
        for path in one.values:
            curve = _tuning_curve(one, path, records.metric.sign, label, styles.setdefault(label, len(styles)))
            if curve is not None:
                found.setdefault((path, title or records.name), []).append(curve)
    return found


def _tuning_curve(one: TunedCell, path: str, sign: int, label: str, style: int) -> Curve | None:
    """The curve of one field in one cell; None where it is no curve."""
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


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
