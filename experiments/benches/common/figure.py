"""Two panels side by side with one legend, in the style of the reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ...reports.figures import LIGHT, MARKERS, save_figure, style_axes
from .results import FigurePanel, Line

_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
_INK, _RULE = "#3c3c3d", "#d8d8d9"
_LONGEST, _LETTERS = 56, 150
"""Largest number of letters in a label of the legend, and in a row of it."""


def draw_panels(panels: Sequence[FigurePanel]) -> Figure:
    """The figure; the legend stands below both panels and names every part once."""
    names = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    shown = [name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…" for name in names]
    columns = max(1, min(len(names), 4, _LETTERS // (8 + max(map(len, shown), default=1))))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(9.6, 3.6 + 0.18 * rows), layout="constrained")
    axes = [figure.add_subplot(1, len(panels), index + 1) for index in range(len(panels))]
    for one, panel in zip(axes, panels, strict=True):
        _panel(one, panel)
    handles = {}
    for one in axes:
        handles.update(dict(zip(*reversed(one.get_legend_handles_labels()), strict=True)))
    figure.legend(
        [handles[name] for name in names],
        shown,
        loc="outside lower center",
        ncols=columns,
        fontsize=8.5,
        labelcolor=_INK,
        framealpha=0,
        handlelength=2.8,
    )
    return figure


def write_figure(panels: Sequence[FigurePanel], path: Path) -> None:
    """Draw and save; the suffix (svg, png, pdf) decides the format."""
    save_figure(draw_panels(panels), path)


def _panel(axes: Axes, panel: FigurePanel) -> None:
    drawn = [_line(axes, line) for line in panel.lines]
    if panel.band is not None:
        low, high = panel.band
        if low == high:
            axes.axhline(low, color=LIGHT[0], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        else:
            axes.axhspan(low, high, color=LIGHT[0], alpha=0.1, linewidth=0, zorder=0)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    points = [point for line in drawn for point in line]
    if points:
        _logarithmic(axes, "x", [x for x, _ in points])
        _logarithmic(axes, "y", [y for _, y in points])
    else:
        axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center", color=_INK, size=9.5)
    style_axes(axes)


def _line(axes: Axes, line: Line) -> list[tuple[float, float]]:
    """Draws what a logarithmic axis has a place for, and returns it."""
    drawn = [(x, y) for x, y in zip(line.x, line.y, strict=True) if min(x, y) > 0 and math.isfinite(x + y)]
    axes.plot(
        [x for x, _ in drawn],
        [y for _, y in drawn],
        color=LIGHT[line.style % len(LIGHT)],
        linewidth=1.6,
        linestyle=_DASHES[line.style // len(LIGHT) % len(_DASHES)],
        marker=MARKERS[(line.style + line.style // len(LIGHT)) % len(MARKERS)],
        markersize=4.5,
        label=line.label,
    )
    return drawn


def _logarithmic(axes: Axes, name: str, values: Sequence[float]) -> None:
    """A logarithmic axis whose ticks are decades, or 1, 2, 5 where there are few decades."""
    axes.set_xscale("log") if name == "x" else axes.set_yscale("log")
    axis = axes.xaxis if name == "x" else axes.yaxis
    narrow = max(values) / min(values) < 200
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=12))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, position: int | None = None) -> str:
    if 1e-2 <= value < 1e4:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    digit = round(value / 10**exponent)
    return f"$10^{{{exponent}}}$" if digit == 1 else f"${digit}\\cdot 10^{{{exponent}}}$"
