"""Figures of a panel in addition to its curves: differences from the baseline, and measures of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .comparison import ComparisonPanel
from .figures import INK, LIGHT, POWERS, Curve, Look, draw_line, log_ticks, stroke, style_axes
from .seed_statistics import Paired


def difference_dots(panel: ComparisonPanel, width: float = Look.width) -> Figure | None:
    """Draw a dot for each row at its mean paired difference from the baseline, with the 95 % interval of the t test.

    Rows have the order of the panel's table, from top to bottom. Rows without an interval, because they diverged or
    have a single seed, are left out. Returns None if fewer than two rows have an interval.
    """
    rows = [(row, found) for row in panel.rows if (found := row.difference) is not None and _bar(found) is not None]
    if panel.baseline is None or len(rows) < 2:
        return None
    rows.reverse()  # heights grow from the bottom
    figure = Figure(figsize=(width, 0.75 + 0.32 * len(rows)), layout="constrained")
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
    own = {**stroke(style), "linestyle": "-", "markersize": 5, "linewidth": 1.5, "capsize": 3}
    axes.errorbar([found.mean], [height], xerr=_bar(found), **own)


def _bar(found: Paired) -> list[float] | None:
    """Return half of the 95 % interval as matplotlib expects it, or None if there is no finite interval."""
    return None if found.half is None or not math.isfinite(found.half) else [found.half]


MEASURES = {
    "update_rms": ("update, root mean square", True),
    "cosine": ("cosine with the gradient", False),
    "condition": ("condition number of statistics", True),
    "root_condition": ("condition number of roots", True),
    "angle": ("drift of bases, degrees", False),
    "off_diagonal": ("off-diagonal share in the basis", False),
    "residual": ("residual of roots", True),
    "staleness": ("updates since a refresh", False),
    "orthogonality": ("bases from orthonormal", True),
    "storage_error": ("error of storage", True),
}
"""Title of each measure, and True if its axis is logarithmic, in the order of the figure."""
OF_CHAINS = ("update_rms", "cosine")
"""Measures that all stages have. The figure shows only their values for whole chains of stages."""


def internals(panel: ComparisonPanel, width: float = Look.width) -> Figure | None:
    """Draw a small diagram for each measure that a run of the panel has recorded. Return None if there are no measures.

    A line is the median over parameters, stages and seeds. Its band reaches from quartile to quartile.
    """
    found = {measure: curves for measure in MEASURES if (curves := _curves(panel, measure))}
    if not found:
        return None
    rows = -(-len(found) // 2)
    figure = Figure(figsize=(width, 1.5 * rows + 0.35), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False)
    for axes in grid.flat[len(found) :]:
        axes.remove()
    for axes, (measure, curves) in zip(grid.flat, found.items(), strict=False):
        _diagram(axes, curves, *MEASURES[measure])
    for axes in grid.flat[max(0, len(found) - 2) : len(found)]:
        axes.set_xlabel("training steps", fontsize=7.5)
    lines = {str(line.get_label()): line for axes in grid.flat for line in axes.get_lines()}
    style = {"ncols": 3, "fontsize": 8, "frameon": False, "labelcolor": INK}
    figure.legend(list(lines.values()), list(lines), loc="outside upper left", **style)
    return figure


def _curves(panel: ComparisonPanel, measure: str) -> list[Curve]:
    """Return the quartiles of a measure over parameters and seeds at each step, a curve for each row with values."""
    found = []
    for row in panel.rows:
        values: dict[int, list[float]] = {}
        for line in (line for run in row.runs for line in run.diagnostics if _shown(line, measure)):
            values.setdefault(int(line["step"]), []).append(float(line["value"]))
        if values:
            steps = sorted(values)
            low, middle, high = np.transpose([np.quantile(values[x], (0.25, 0.5, 0.75)) for x in steps]).tolist()
            found.append(Curve(row.label, row.style, [float(step) for step in steps], middle, low, high))
    return found


def _shown(line: dict[str, Any], measure: str) -> bool:
    wanted = line["measure"] == measure and line["value"] is not None
    return wanted and (measure not in OF_CHAINS or line["stage"].rpartition(".")[2] == "update")


def _diagram(axes: Axes, curves: Sequence[Curve], title: str, logarithmic: bool) -> None:
    for curve in curves:
        draw_line(axes, curve)
    positive = [y for curve in curves for y in curve.low]
    if logarithmic and positive and min(positive) > 0 and math.isfinite(max(positive)):
        axes.set_yscale("log")
        wide = max(y for curve in curves for y in curve.high) > 50 * min(positive)
        log_ticks(axes.yaxis, POWERS if wide else (1, 2, 5), most=4)
    elif positive and min(positive) >= 0:
        axes.set_ylim(bottom=0)
    style_axes(axes)
    axes.set_title(title, fontsize=8, loc="left", color=INK)
    axes.tick_params(which="both", labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def beside_curves(panel: ComparisonPanel, width: float = Look.width) -> Iterator[tuple[str, str, Figure]]:
    """Yield (short name, caption, figure) of each figure of a panel except its curves. `width`: in inches."""
    apart = difference_dots(panel, width)
    if apart is not None:
        yield "differences", "Differences from the baseline over paired seeds, with 95 % intervals", apart
    inside = internals(panel, width)
    if inside is not None:
        caption = "Inside the optimizer: medians over parameters, stages and seeds, bands from quartile to quartile"
        yield "internals", caption, inside
