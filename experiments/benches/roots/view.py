"""Table, figure and advice of the bench of inverse roots."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median

from ..common.results import FigurePanel, Line, ResultTable
from ..common.tables import fastest, groups, milli, points, scientific, span, unique
from .rows import RootRow

_COLUMNS = (
    "solver", "size", "dtype", "e", "error: median", "worst", "at", "angle", "residual", "ok", "definite", "iterations",
    "ms",
)  # fmt: skip


def root_summary(rows: Sequence[RootRow]) -> ResultTable:
    """One line for each solver, size, dtype and exponent, over all spectra."""
    lines = []
    for (candidate, size, dtype, exponent), some in groups(rows, lambda r: (r.candidate, r.size, r.dtype, r.exponent)):
        bad = max(some, key=lambda row: _or(row.error, math.inf))
        lines.append(
            (
                candidate,
                str(size),
                dtype,
                exponent,
                scientific(median(_or(row.error, math.inf) for row in some)),
                scientific(bad.error),
                bad.spectrum,
                f"{max(_or(row.angle, 0.0) for row in some):.2g}°",
                scientific(max(_or(row.residual, 0.0) for row in some)),
                f"{min(row.ok for row in some):.0%}",
                f"{min(row.definite for row in some):.0%}",
                span([row.iterations for row in some]),
                milli(median(row.milliseconds for row in some)),
            )
        )
    return ResultTable("inverse roots: the worst and the median over spectra", _COLUMNS, tuple(lines))


def root_panels(rows: Sequence[RootRow], swept: Collection[str], threshold: float) -> tuple[FigurePanel, FigurePanel]:
    """Median error over spectra against time, a point for each size; error against condition at the largest size."""
    first = rows[0] if rows else None
    rows = [row for row in rows if first and (row.dtype, row.exponent) == (first.dtype, first.exponent)]
    largest = max((row.size for row in rows), default=0)
    cost, accuracy = [], []
    for style, candidate in enumerate(unique(row.candidate for row in rows)):
        own = [row for row in rows if row.candidate == candidate]
        sizes = [some for _, some in groups(own, lambda row: row.size)]
        times = [median(row.milliseconds for row in some) for some in sizes]
        errors = [median(_or(row.error, math.inf) for row in some) for some in sizes]
        cost.append(Line(candidate, style, times, errors))
        sweep = [row for row in own if row.spectrum in swept and row.size == largest]
        accuracy.append(points(candidate, style, ((row.condition, row.error) for row in sweep)))
    what = f"{first.dtype}, $A^{{-{first.exponent}}}$" if first else ""
    sizes_seen = ", ".join(map(str, sorted({row.size for row in rows})))
    return (
        FigurePanel(
            tuple(cost),
            f"ms per matrix (d = {sizes_seen})",
            f"median relative error, {what}",
            (threshold, threshold),
        ),
        FigurePanel(
            tuple(accuracy), f"condition number (d = {largest})", "worst relative error", (threshold, threshold)
        ),
    )


def root_advice(rows: Sequence[RootRow], threshold: float) -> list[str]:
    """For each size, dtype and exponent the fastest solver that was right on every spectrum, and the runner-up."""
    lines = []
    for (size, dtype, exponent), some in groups(rows, lambda r: (r.size, r.dtype, r.exponent)):
        worst = {
            candidate: max(_fault(row) for row in own) for candidate, own in groups(some, lambda row: row.candidate)
        }
        times = {
            candidate: median(row.milliseconds for row in own)
            for candidate, own in groups(some, lambda row: row.candidate)
        }
        where = f"A^(-{exponent}), {size} x {size}, {dtype}"
        lines.append(fastest(where, times, worst, threshold))
    return lines


def _fault(row: RootRow) -> float:
    """The error of a root that may be used, infinity for any other."""
    return row.error if row.ok == 1 and row.definite == 1 and math.isfinite(row.error) else math.inf


def _or(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise
