"""The numbers of a comparison as words and as cells of a table."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .comparison import ComparisonPanel, ComparisonRow
from .records import Records
from .seed_statistics import Summary

_NONE, _MINUS = "\u2013", "\u2212"


def sentences(panel: ComparisonPanel, records: Records) -> Iterator[str]:
    """Describe the numbers of a panel in words."""
    best, base = panel.best, panel.baseline
    if best is None:
        return
    extreme = "Lowest" if panel.metric.sign > 0 else "Highest"
    yield f"{extreme} final {panel.metric.title}: {best.title}, {format_summary(best.final)}."
    if base is None or base.final is None or best is base:
        return
    yield f"{base.title}: {format_summary(base.final)}."
    test, p = best.difference, panel.corrected.get(best.label)
    if test is not None and test.half is not None:
        interval = format_difference(best, panel)[0]
        yield f"{best.title} minus {base.title}: {interval}, with a 95 % interval over {test.n} paired seeds."
    if test is not None and p is not None and p > 0.05:
        tests = f", corrected for {len(panel.corrected)} comparisons" if len(panel.corrected) > 1 else ""
        yield f"With {test.n} seeds this difference is not significant (p = {p:.2g}{tests})."
    steps = [step for step in best.reached(0).values() if step is not None]
    if steps and len(steps) == len(best.runs):
        last = max(base.runs[0].curve(panel.metric)[0])
        yield f"{best.title} reaches {base.title}'s final value after {sum(steps) / len(steps):.0f} of {last} steps."


def format_reached(row: ComparisonRow, axis: int) -> tuple[str, str]:
    """Mean over seeds of where the baseline's final value is reached, and how many seeds reach it unless all do."""
    found = row.reached(axis)
    hits = [value for value in found.values() if value is not None]
    if not hits:
        return ("never" if found else _NONE), ""
    mean = sum(hits) / len(hits)
    return f"{mean:.{axis}f}", "" if len(hits) == len(found) else f"{len(hits)} of {len(found)} seeds"


def format_length(row: ComparisonRow) -> tuple[str, str]:
    """Mean steps, and mean training seconds if the median step had taken as long all the time."""
    ended = [run.seconds()[-1] for run in row.runs if run.result]
    return format_number(row.mean("steps"), 0), format_number(sum(ended) / len(ended) if ended else None)


def format_summary(summary: Summary | None) -> str:
    """Mean and spread."""
    if summary is None:
        return _NONE
    if not math.isfinite(summary.mean):
        return "diverged"
    spread = "" if summary.spread is None else f" \u00b1 {summary.spread:.3f}"
    return f"{summary.mean:.3f}{spread}"


def format_difference(row: ComparisonRow, panel: ComparisonPanel) -> tuple[str, str]:
    """Mean difference with its 95 % interval, and the test of whether it is 0, p corrected for all of the panel.

    Where there are pairs enough, a bootstrap interval too.
    """
    difference = row.difference
    if difference is None:
        return _NONE, "" if row.comparable else "other task, code or data"
    mean = signed(difference.mean)
    if difference.t is None or difference.half is None:
        return mean, ""
    ends = [signed(difference.mean + side * difference.half) for side in (-1, 1)]
    tests = f", Holm {panel.corrected[row.label]:.2g}" if len(panel.corrected) > 1 else ""
    t = f"{difference.t:.1f}".replace("-", _MINUS)
    drawn = ""
    if difference.bootstrap is not None:
        drawn = f"\nbootstrap [{', '.join(map(signed, difference.bootstrap))}]"
    return f"{mean} [{ends[0]}, {ends[1]}]", f"t = {t}, p = {difference.p:.2g}{tests}{drawn}"


def signed(value: float) -> str:
    """A number with its sign, to three digits after the point."""
    return f"{value:+.3f}".replace("-", _MINUS)


def format_number(value: float | None, digits: int = 1) -> str:
    """The number with this many digits after the point; a dash for None."""
    return _NONE if value is None else f"{value:.{digits}f}"


def format_metric(value: float | None) -> str:
    """The number to five significant digits; "diverged" for None."""
    return "diverged" if value is None else f"{value:.5g}"


def format_ratio(value: float | None, base: float | None) -> str:
    """`value / base` as a factor; empty where one is missing."""
    return "" if not value or not base else f"{value / base:.2f}\u00d7"


def format_rate(rate: float | None, edge: str = "") -> str:
    """A learning rate; edge: "least" or "largest" where it is at an end of what was tried."""
    return "" if rate is None else f"{rate:g}" + (f" ({edge} tried)" if edge else "")
