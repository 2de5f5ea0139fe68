"""The page of a bench: advice, figure, table, columns, declaration and machine in one HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..reports import figures
from ..reports.figures import INK, LIGHT, log_ticks, save_figure, style_axes
from ..reports.report import templates
from .bench import Bench
from .view import BenchRows, Line, Panel, Row, lay_out, lines_of

_LONGEST = 56
"""Largest number of letters of a name in the legend. Longer names are cut."""
_LETTERS = 150
"""Largest number of letters in one row of the legend, which fills the width of the figure."""


def render_page(bench: Bench, rows: Sequence[Row], environment: Mapping[str, Any], place: str, declaration: str) -> str:
    """Return the page as text. All names and messages are escaped.

    environment: machine and versions, by name.
    place: device and threads in one line.
    declaration: the bench as YAML.
    """
    table = bench.table()
    headings, lines = lay_out(table, rows)
    return (
        templates(Path(__file__).parent)
        .get_template("bench.html.jinja")
        .render(
            kind=bench.declaration()["kind"],
            title=table.title,
            place=place,
            advice=bench.advice(rows),
            figure=Markup(figures.inline_svg(draw_panels(bench.panels(), rows), "bench")),
            headings=headings,
            lines=lines,
            columns=bench.columns,
            declaration=declaration,
            environment=environment,
            palette=list(zip(LIGHT, figures.DARK, strict=True)),
        )
    )


def draw_panels(panels: Sequence[Panel], rows: BenchRows) -> Figure:
    """Draw the panels side by side, in the style of the reports. One legend below them names every line once."""
    drawn = [lines_of(panel, rows) for panel in panels]
    names = list(dict.fromkeys(line.label for _, lines in drawn for line in lines))
    shown = [name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…" for name in names]
    columns = max(1, min(len(names), 4, _LETTERS // (8 + max(map(len, shown), default=1))))
    figure = Figure(figsize=(9.6, 3.6 + 0.18 * math.ceil(len(names) / columns)), layout="constrained")
    handles = {}
    for place, (panel, (title, lines)) in enumerate(zip(panels, drawn, strict=True), start=1):
        axes = figure.add_subplot(1, len(panels), place)
        _draw(axes, panel, title, lines)
        handles.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    style = {"fontsize": 8.5, "labelcolor": INK, "framealpha": 0, "handlelength": 2.8}
    figure.legend([handles[name] for name in names], shown, loc="outside lower center", ncols=columns, **style)
    return figure


def write_figure(panels: Sequence[Panel], rows: BenchRows, path: Path) -> None:
    """Draw the panels and save the figure in the format that the suffix names (svg, png, pdf)."""
    save_figure(draw_panels(panels, rows), path)


def _draw(axes: Axes, panel: Panel, title: str, lines: Sequence[Line]) -> None:
    points = [point for line in lines for point in _line(axes, line)]
    if panel.band is not None:
        low, high = panel.band
        if low == high:
            axes.axhline(low, color=LIGHT[0], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        else:
            axes.axhspan(low, high, color=LIGHT[0], alpha=0.1, linewidth=0, zorder=0)
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
    drawn = [(x, y) for x, y in zip(line.x, line.y, strict=True) if min(x, y) > 0 and math.isfinite(x + y)]
    x, y = [x for x, _ in drawn], [y for _, y in drawn]
    axes.plot(x, y, **figures.stroke(line.style), linewidth=1.6, markersize=4.5, label=line.label)
    return drawn
