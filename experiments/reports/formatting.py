"""The numbers of a comparison as words and as cells of a table."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .comparison import ComparisonPanel, ComparisonRow
from .records import Records
from .seed_statistics import Paired, Summary

_NONE, _MINUS = "\u2013", "\u2212"


def sentences(panel: ComparisonPanel, records: Records) -> Iterator[str]:
    """Describe the numbers of a panel in words."""
    best, base = panel.best, panel.baseline
    if best is None:
        return
    extreme = "Lowest" if panel.metric.sign > 0 else "Highest"
    yield f"{extreme} final {panel.metric.title}: {best.label}, {format_summary(best.final)}."
    if base is None or base.final is None or best is base:
        return
    yield f"{base.label}: {format_summary(base.final)}."
    test = best.difference
    if test is not None and test.p is not None and test.p > 0.05:
        yield f"With {test.n} seeds this difference is not significant (p = {test.p:.2g})."
    steps = [step for step in best.reached(0).values() if step is not None]
    if steps and len(steps) == len(best.runs):
        last = max(base.runs[0].curve(panel.metric)[0])
        yield f"{best.label} reaches {base.label}'s final value after {sum(steps) / len(steps):.0f} of {last} steps."


def format_reached(row: ComparisonRow, axis: int) -> tuple[str, str]:
    """Mean over seeds of where the baseline's final value is reached, and how many seeds reach it unless all do."""
    found = row.reached(axis)
    hits = [value for value in found.values() if value is not None]
    if not hits:
        return ("never" if found else _NONE), ""
    mean = sum(hits) / len(hits)
    return f"{mean:.{axis}f}", "" if len(hits) == len(found) else f"{len(hits)} of {len(found)} seeds"


def format_summary(summary: Summary | None) -> str:
    """Mean and spread."""
    if summary is None:
        return _NONE
    if not math.isfinite(summary.mean):
        return "diverged"
    spread = "" if summary.spread is None else f" \u00b1 {summary.spread:.3f}"
    return f"{summary.mean:.3f}{spread}"


def format_difference(difference: Paired | None) -> tuple[str, str]:
    """Mean difference, and the test of whether it is 0."""
    if difference is None:
        return _NONE, ""
    test = "" if difference.t is None else f"t = {difference.t:.1f}, p = {difference.p:.2g}"
    return f"{difference.mean:+.3f}".replace("-", _MINUS), test.replace("= -", f"= {_MINUS}")


def format_number(value: float | None, digits: int = 1) -> str:
    """The number with this many digits after the point; a dash for None."""
    return _NONE if value is None else f"{value:.{digits}f}"


def format_ratio(value: float | None, base: float | None) -> str:
    """`value / base` as a factor; empty where one is missing."""
    return "" if not value or not base else f"{value / base:.2f}\u00d7"
