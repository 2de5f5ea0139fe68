"""Table, figure and advice of the bench of polar factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from ..common.results import FigurePanel, ResultTable
from ..common.tables import fastest, groups, milli, points, scientific, unique
from .rows import PolarRow


def polar_summary(rows: Sequence[PolarRow], advised: float) -> ResultTable:
    """One line for each solver, shape and dtype; band and distance up to the condition number `advised`."""
    lines = []
    for (candidate, dtype, m, n), some in groups(rows, lambda r: (r.candidate, r.dtype, r.m, r.n)):
        near = [row for row in some if row.condition <= advised] or some
        lines.append(
            (
                candidate,
                f"{m} x {n}",
                dtype,
                f"{min(row.low for row in near):.3f} - {max(row.high for row in near):.3f}",
                scientific(max(row.distance for row in near)),
                f"{min(row.low for row in some):.3f} - {max(row.high for row in some):.3f}",
                milli(median(row.milliseconds for row in some)),
            )
        )
    columns = ("solver", "shape", "dtype", f"band, condition <= {advised:g}", "distance", "band, all", "ms")
    return ResultTable("polar factors: the worst over condition numbers", columns, tuple(lines))


def polar_panels(rows: Sequence[PolarRow], advised: float, threshold: float) -> tuple[FigurePanel, FigurePanel]:
    """Distance against time, a point for each shape; distance against condition number at the largest shape."""
    largest = max(((row.m, row.n) for row in rows), key=math.prod, default=(0, 0))
    cost, accuracy = [], []
    for style, candidate in enumerate(unique(row.candidate for row in rows)):
        own = [row for row in rows if row.candidate == candidate and row.dtype == rows[0].dtype]
        shapes = groups((row for row in own if row.condition <= advised), lambda row: (row.m, row.n))
        pairs = ((median(r.milliseconds for r in some), max(r.distance for r in some)) for _, some in shapes)
        cost.append(points(candidate, style, pairs))
        sweep = ((row.condition, row.distance) for row in own if (row.m, row.n) == largest)
        accuracy.append(points(candidate, style, sweep))
    shapes_seen = ", ".join(f"{m}x{n}" for m, n in unique((row.m, row.n) for row in rows))
    level, limit = (threshold, threshold), f"condition ≤ {advised:g}"
    at_largest = f"condition number ({largest[0]} x {largest[1]})"
    return (
        FigurePanel(tuple(cost), f"ms per matrix ({shapes_seen})", f"distance to polar, {limit}", level),
        FigurePanel(tuple(accuracy), at_largest, "distance to the polar factor", level),
    )


def polar_advice(rows: Sequence[PolarRow], advised: float, threshold: float) -> list[str]:
    """For each shape and dtype the fastest solver that came near enough to the polar factor, and the runner-up."""
    lines = []
    near = [row for row in rows if row.condition <= advised] or list(rows)
    for (m, n, dtype), some in groups(near, lambda r: (r.m, r.n, r.dtype)):
        times = {name: median(row.milliseconds for row in own) for name, own in groups(some, lambda r: r.candidate)}
        errors = {name: max(row.distance for row in own) for name, own in groups(some, lambda r: r.candidate)}
        lines.append(fastest(f"polar factor, {m} x {n}, {dtype}", times, errors, threshold, "distance"))
    return lines
