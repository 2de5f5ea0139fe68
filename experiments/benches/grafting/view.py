"""Table, figure and advice of the bench of magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..common.results import FigurePanel, ResultTable
from ..common.tables import groups, milli, points, unique
from .rows import GraftingRow

_COLUMNS = ("chain", "RMS", "ratio", "spectral / sqrt(m/n)", "ratio", "norm", "at", "ms")


def grafting_summary(rows: Sequence[GraftingRow]) -> ResultTable:
    """One line for each chain: the ranges over shapes, and norm and time at the largest."""
    lines = []
    for candidate, some in groups(rows, lambda row: row.candidate):
        rms, relative = [row.rms for row in some], [_relative(row) for row in some]
        largest = max(some, key=lambda row: row.m * row.n)
        lines.append(
            (
                candidate,
                f"{min(rms):.3g} - {max(rms):.3g}",
                _ratio(rms),
                f"{min(relative):.3g} - {max(relative):.3g}",
                _ratio(relative),
                f"{largest.norm:.3g}",
                f"{largest.m} x {largest.n}",
                milli(largest.milliseconds),
            )
        )
    return ResultTable("size of updates over shapes", _COLUMNS, tuple(lines))


def grafting_panels(rows: Sequence[GraftingRow]) -> tuple[FigurePanel, FigurePanel]:
    """RMS of square blocks against their size; spectral norm against the aspect, the mean where shapes share it."""
    squares, spectral = [], []
    for style, candidate in enumerate(unique(row.candidate for row in rows)):
        own = [row for row in rows if row.candidate == candidate]
        squares.append(points(candidate, style, ((float(row.n), row.rms) for row in own if row.m == row.n)))
        aspects = groups(own, lambda row: row.m / row.n)
        means = ((aspect, sum(map(_relative, some)) / len(some)) for aspect, some in aspects)
        spectral.append(points(candidate, style, means))
    return (
        FigurePanel(tuple(squares), "d of blocks d x d", "update RMS"),
        FigurePanel(tuple(spectral), "m / n", r"spectral norm of the update / $\sqrt{m/n}$"),
    )


def grafting_advice(rows: Sequence[GraftingRow], threshold: float) -> list[str]:
    """Name the chains that keep a learning rate's meaning when the shape changes."""
    if len({(row.m, row.n) for row in rows}) < 2:
        return ["more than one shape is needed to compare"]
    measures: tuple[tuple[str, Callable[[GraftingRow], float]], ...] = (
        ("RMS", lambda row: row.rms),
        ("spectral norm relative to sqrt(m / n)", _relative),
    )
    found = []
    for what, value in measures:
        spans = [(candidate, list(map(value, some))) for candidate, some in groups(rows, lambda row: row.candidate)]
        good = [candidate for candidate, values in spans if max(values) <= threshold * min(values)]
        found.append(f"equal {what} over these shapes, within {threshold:g}: {'; '.join(good) or 'none'}")
    return found


def _relative(row: GraftingRow) -> float:
    return row.spectral / math.sqrt(row.m / row.n)


def _ratio(values: Sequence[float]) -> str:
    return f"{max(values) / min(values):.2f}" if min(values) > 0 else "-"
