"""The figure of differences: how far each row of a panel ends from the baseline, as a dot with its interval."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..comparison import ComparisonPanel
from ..figures import INK, LIGHT, MARKERS, style_axes
from ..seed_statistics import Paired


def difference_dots(panel: ComparisonPanel) -> Figure | None:
    """A dot for each row at its mean paired difference from the baseline, with the 95 % interval of the t test.

    The best row is uppermost. None where fewer than two rows have an interval; a row that diverged, or has a single
    seed, has none and is left out.
    """
    rows = [(row, found) for row in panel.rows if (found := row.difference) is not None and _bar(found) is not None]
    if panel.baseline is None or len(rows) < 2:
        return None
    rows.sort(key=lambda pair: -panel.metric.sign * pair[1].mean)
    figure = Figure(figsize=(4.8, 0.75 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0.0, color=LIGHT[0], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    for height, (row, found) in enumerate(rows):
        _dot(axes, row.style, found, height)
    axes.set_yticks(range(len(rows)), [row.title for row, _ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(f"final {panel.metric.title} minus that of {panel.baseline.title}")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    style_axes(axes)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelcolor=INK)
    return figure


def _dot(axes: Axes, style: int, found: Paired, height: int) -> None:
    look = LIGHT[style % len(LIGHT)], MARKERS[style % len(MARKERS)]
    axes.errorbar(
        [found.mean], [height], xerr=_bar(found), color=look[0], marker=look[1], markersize=5, linewidth=1.5, capsize=3
    )


def _bar(found: Paired) -> list[float] | None:
    """Half of the interval; None where there is none to draw."""
    return None if found.half is None or not math.isfinite(found.half) else [found.half]
