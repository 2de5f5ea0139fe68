"""The figure of a bench: two panels, in the style of the reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..reports.figures import INK, LIGHT, legend_size, log_ticks, stroke, style_axes, wrap_legend
from .view import BenchRows, Line, Panel, lines_of

_WIDTH = 9.6
"""Width of the figure in inches."""


def draw_panels(panels: Sequence[Panel], rows: BenchRows) -> Figure:
    """Draw the panels side by side, in the style of the reports. One legend below them names every line once."""
    drawn = [lines_of(panel, rows) for panel in panels]
    names = list(dict.fromkeys(line.label for _, lines in drawn for line in lines))
    columns, lines_high = legend_size(names, _WIDTH, 4)
    figure = Figure(figsize=(_WIDTH, 3.6 + 0.18 * lines_high), layout="constrained")
    handles = {}
    for place, (panel, (title, lines)) in enumerate(zip(panels, drawn, strict=True), start=1):
        axes = figure.add_subplot(1, len(panels), place)
        _draw(axes, panel, title, lines)
        handles.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    style = {"fontsize": 8.5, "labelcolor": INK, "framealpha": 0, "handlelength": 2.8}
    legend = figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=columns, **style)
    wrap_legend(legend, _WIDTH)
    return figure


def _draw(axes: Axes, panel: Panel, title: str, lines: Sequence[Line]) -> None:
    points = [point for line in lines for point in _line(axes, line)]
    if isinstance(panel.band, tuple):
        axes.axhspan(*panel.band, color=LIGHT[0], alpha=0.1, linewidth=0, zorder=0)
    elif panel.band is not None:
        axes.axhline(panel.band, color=LIGHT[0], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axes.set_title(title, fontsize=9.5, color=INK)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if points:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis, values in zip((axes.xaxis, axes.yaxis), zip(*points, strict=True), strict=True):
            log_ticks(axis, (1, 2, 5) if max(values) / min(values) < 200 else (1,))
    else:
        axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center", color=INK, size=9.5)
    style_axes(axes)


def _line(axes: Axes, line: Line) -> list[tuple[float, float]]:
    """Draw a line and return its points, without points that logarithmic axes cannot show."""
    drawn = [(x, y) for x, y in line.points if min(x, y) > 0 and math.isfinite(x + y)]
    x, y = [x for x, _ in drawn], [y for _, y in drawn]
    axes.plot(x, y, **stroke(line.style), linewidth=1.6, markersize=4.5, label=line.label)
    return drawn
