"""Table, figure and advice of the bench of storage."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ...common.results import FigurePanel, Line, ResultTable
from ...common.tables import milli
from .rows import StorageRow

_COLUMNS = ("recipe", "steps", "state / plain", "time / plain: mean", "median step", "stored ms", "plain ms")


def storage_summary(rows: Sequence[StorageRow]) -> ResultTable:
    """One line for each recipe."""
    lines = [
        (
            row.candidate,
            str(row.steps),
            f"{row.bytes:.3g}",
            f"{row.ratio:.3g}",
            f"{row.ordinary:.3g}",
            milli(median(row.stored_ms)),
            milli(median(row.plain_ms)),
        )
        for row in rows
    ]
    return ResultTable(
        "steps with storage over steps with nothing coded, refreshes in the mean", _COLUMNS, tuple(lines)
    )


def storage_panels(rows: Sequence[StorageRow]) -> tuple[FigurePanel, FigurePanel]:
    """Time against bytes, both over plain; and the slowest steps first, so that refreshes stand apart."""
    price = tuple(Line(row.candidate, style, [row.bytes], [row.ratio]) for style, row in enumerate(rows))
    steps = []
    for style, row in enumerate(rows):
        ranks = list(range(1, row.steps + 1))
        unit = median(row.plain_ms)
        for name, times, shift in (
            (row.candidate, row.stored_ms, 0),
            (f"{row.candidate}, plain", row.plain_ms, len(rows)),
        ):
            steps.append(Line(name, style + shift, ranks, [ms / unit for ms in sorted(times, reverse=True)]))
    return (
        FigurePanel(price, "state over plain", "mean time of a step over plain", (1.0, 1.0)),
        FigurePanel(tuple(steps), "steps, the slowest first", "time over the median plain step", (1.0, 1.0)),
    )


def storage_advice(rows: Sequence[StorageRow]) -> list[str]:
    """Compare what each recipe saves with what it costs."""
    return [
        f"{row.candidate}: {row.bytes:.2g} of the state for {row.ratio:.2f} times the time of a step "
        f"({row.ordinary:.2f} between refreshes)"
        for row in rows
    ]
