"""Table, figure and advice of the bench of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.results import FigurePanel, ResultTable
from ...common.tables import groups, milli, points
from .rows import RankRow

_COLUMNS = ("recipe", "ranks", "critical path ms", "least busy ms", "efficiency", "by counted work")


def rank_summary(rows: Sequence[RankRow]) -> ResultTable:
    """One line for each recipe and number of ranks."""
    lines = [
        (
            row.candidate,
            str(row.ranks),
            milli(row.path_ms),
            milli(min(row.busy_ms)),
            f"{row.efficiency:.2f}",
            f"{row.counted:.2f}",
        )
        for _, own in groups(rows, lambda row: row.candidate)
        for row in own
    ]
    title = "time of a step for which the busiest rank computes; efficiency: one rank's over all ranks' times"
    return ResultTable(title, _COLUMNS, tuple(lines))


def rank_panels(rows: Sequence[RankRow]) -> tuple[FigurePanel, FigurePanel]:
    """Efficiency over ranks, measured and counted; and the critical path over ranks."""
    found = groups(rows, lambda row: row.candidate)
    measured = [points(n, s, ((row.ranks, row.efficiency) for row in own)) for s, (n, own) in enumerate(found)]
    counted = [
        points(f"{name}, counted", style + len(found), ((row.ranks, row.counted) for row in own))
        for style, (name, own) in enumerate(found)
    ]
    paths = tuple(points(n, s, ((row.ranks, row.path_ms) for row in own)) for s, (n, own) in enumerate(found))
    return (
        FigurePanel((*measured, *counted), "ranks", "efficiency", (1.0, 1.0)),
        FigurePanel(paths, "ranks", "critical path of a step, ms"),
    )


def rank_advice(rows: Sequence[RankRow]) -> list[str]:
    """The recipe with the shortest critical path on each number of ranks."""
    found = []
    for ranks, own in groups(rows, lambda row: row.ranks):
        best = min(own, key=lambda row: row.path_ms)
        where = f"on {ranks} rank{'s' if ranks > 1 else ''}"
        found.append(f"{where}: {best.candidate}, {milli(best.path_ms)} ms, efficiency {best.efficiency:.2f}")
    return found
