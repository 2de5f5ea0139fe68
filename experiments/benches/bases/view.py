"""Table, figure and advice of the bench of eigenbases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from ..common.results import FigurePanel, Line, ResultTable
from ..common.tables import fastest, groups, milli, points, scientific, unique
from .rows import BasisRow

_COLUMNS = ("solver", "size", "dtype", "columns", "orthogonality", "off-diagonal", "eigenvalues", "ok", "ms")


def basis_summary(rows: Sequence[BasisRow]) -> ResultTable:
    """One line for each solver, size and dtype: the last refresh, over all spectra."""
    lines = []
    last = max((row.refresh for row in rows), default=0)
    for (candidate, size, dtype), some in groups(rows, lambda row: (row.candidate, row.size, row.dtype)):
        settled = [row for row in some if row.refresh == last]
        lines.append(
            (
                candidate,
                str(size),
                dtype,
                str(settled[0].columns),
                scientific(max(row.orthogonality for row in some)),
                scientific(max(row.offdiagonal for row in settled)),
                scientific(max(row.eigenvalues for row in settled)),
                f"{min(row.ok for row in settled):.0%}",
                milli(median(row.milliseconds for row in settled)),
            )
        )
    return ResultTable(f"eigenbases after {last} refreshes: the worst over spectra", _COLUMNS, tuple(lines))


def basis_panels(rows: Sequence[BasisRow], threshold: float) -> tuple[FigurePanel, FigurePanel]:
    """Off-diagonal ratio against time, a point for each size; its course over refreshes at the largest size."""
    first = rows[0] if rows else None
    rows = [row for row in rows if first and (row.dtype, row.spectrum) == (first.dtype, first.spectrum)]
    last, largest = max((row.refresh for row in rows), default=0), max((row.size for row in rows), default=0)
    cost, course = [], []
    for style, candidate in enumerate(unique(row.candidate for row in rows)):
        own = [row for row in rows if row.candidate == candidate]
        settled = [row for row in own if row.refresh == last]
        cost.append(
            Line(candidate, style, [row.milliseconds for row in settled], [_shown(row.offdiagonal) for row in settled])
        )
        pairs = ((float(row.refresh), _shown(row.offdiagonal)) for row in own if row.size == largest)
        course.append(points(candidate, style, pairs))
    sizes, ratio = ", ".join(map(str, unique(row.size for row in rows))), "off-diagonal ratio of $Q^T A Q$"
    what = f"ms per matrix (d = {sizes}; {first.spectrum if first else ''})"
    level = (threshold, threshold)
    return (
        FigurePanel(tuple(cost), what, f"{ratio}, refresh {last}", level),
        FigurePanel(tuple(course), f"refreshes (d = {largest})", ratio, level),
    )


def basis_advice(rows: Sequence[BasisRow], threshold: float) -> list[str]:
    """For each size and dtype the fastest complete basis that stayed diagonal enough from the second refresh on."""
    lines = []
    for (size, dtype), some in groups(rows, lambda row: (row.size, row.dtype)):
        late = [row for row in some if row.refresh > 1] or some
        complete = [
            (candidate, own) for candidate, own in groups(late, lambda row: row.candidate) if own[0].columns == size
        ]
        errors = {
            candidate: max(row.offdiagonal if row.ok == 1 else math.inf for row in own) for candidate, own in complete
        }
        times = {candidate: median(row.milliseconds for row in own) for candidate, own in complete}
        if errors:
            what = f"eigenbasis, {size} x {size}, {dtype}, refresh from the last one"
            lines.append(fastest(what, times, errors, threshold, "off-diagonal ratio"))
    return lines


def _shown(ratio: float) -> float:
    """The ratio to draw: an exact basis is drawn at rounding, not at minus infinity."""
    return max(ratio, 1e-17)
