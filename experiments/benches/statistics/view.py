"""Table, figure and advice of the bench of statistics."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from ..common.results import FigurePanel, Line, ResultTable
from ..common.tables import groups, milli, points, unique
from .rows import BEST, StatisticRow

_COLUMNS = ("statistic", "cosine", "of its root", "gain error", "gain spread", "ms")


def statistic_summary(rows: Sequence[StatisticRow]) -> ResultTable:
    """One line for each statistic: the mean of the layers, after all gradients."""
    most, lines = max((row.samples for row in rows), default=0), []
    for candidate, some in groups((row for row in rows if row.samples == most), lambda row: row.candidate):
        values = [
            [getattr(row, name) for row in some if getattr(row, name) is not None]
            for name in ("cosine", "cosine_root", "gain_error", "gain_spread")
        ]
        took = [row.milliseconds for row in some if row.milliseconds is not None]
        lines.append((candidate, *(f"{mean(v):.3f}" if v else "-" for v in values), milli(mean(took)) if took else "-"))
    return ResultTable(f"statistics after {most} gradients: the mean over layers", _COLUMNS, tuple(lines))


def statistic_panels(rows: Sequence[StatisticRow]) -> tuple[FigurePanel, FigurePanel]:
    """Gain error and angle against the number of gradients."""
    own = [row for row in rows if row.gain_error is not None]
    errors: list[Line] = []
    angles: list[Line] = []
    for style, candidate in enumerate(unique(row.candidate for row in own)):
        by_samples = groups((row for row in own if row.candidate == candidate), lambda row: row.samples)
        errors.append(points(candidate, style, ((n, mean(r.gain_error or 0 for r in some)) for n, some in by_samples)))
        angles.append(points(candidate, style, ((n, 1 - mean(r.cosine for r in some)) for n, some in by_samples)))
    best = 1 - mean(row.cosine for row in rows if row.candidate == BEST)
    return (
        FigurePanel(tuple(errors), "gradients seen", "held-out gain error, decades"),
        FigurePanel(tuple(angles), "gradients seen", "1 - cosine with C (dashed: the best)", (best, best)),
    )


def statistic_advice(rows: Sequence[StatisticRow]) -> list[str]:
    """The best by each measure after all gradients; no time decides, observing is a small candidate of a step."""
    most = max((row.samples for row in rows), default=0)
    last = groups((r for r in rows if r.samples == most and r.gain_error is not None), lambda row: row.candidate)
    errors = {candidate: mean(row.gain_error or 0.0 for row in some) for candidate, some in last}
    cosines = {candidate: mean(row.cosine for row in some) for candidate, some in last}
    least, most_alike = min(errors, key=lambda p: errors[p]), max(cosines, key=lambda p: cosines[p])
    return [
        f"whitening of gradients not seen: {least}, off by {10 ** errors[least]:.2f} times in the median direction",
        f"nearest to the second moment in angle: {most_alike}, cosine {cosines[most_alike]:.3f}",
    ]
