"""The size of updates around a gradient spike, one panel for each learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from ...reports.figures import LIGHT, MARKERS, save_figure, style_axes
from .rows import BOUND, LEARNING_RATES, LINES, WINDOW, SpikeRow

_INK, _RULE = "#3c3c3d", "#d8d8d9"
_LABELS = {
    "exact": "exact",
    "marginals": "marginals",
    "permute": "permute",
    "none": "none",
    "none, momentum outside": "none, momentum outside the basis",
    "published": "reference/soap, as published",
}
_RATES = dict(zip(LEARNING_RATES, (", the recipe's own", ", ten times that"), strict=True))
_STYLES = {line: index + 1 for index, line in enumerate(LINES)}


def draw_spike(rows: Sequence[SpikeRow], path: Path) -> None:
    """Draw and save; the suffix (svg, png, pdf) decides the format. Lines are medians of seeds, within their range."""
    rates = list(dict.fromkeys(row.lr for row in rows))
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    axes: list[Axes] = []
    for index, lr in enumerate(rates):
        one = figure.add_subplot(1, len(rates), index + 1, sharey=axes[0] if axes else None)
        axes.append(one)
        _panel(one, [row for row in rows if row.lr == lr])
        one.set_title(f"learning rate {lr:g}{_RATES.get(lr, '')}", fontsize=9.5, color=_INK)
    axes[0].set_ylabel("update RMS / learning rate, largest matrix")
    handles, labels = axes[0].get_legend_handles_labels()
    style = {"fontsize": 8.5, "labelcolor": _INK, "framealpha": 0, "handlelength": 2.6}
    figure.legend(handles, labels, loc="outside lower center", ncols=3, **style)
    save_figure(figure, path)


def _panel(axes: Axes, rows: Sequence[SpikeRow]) -> None:
    axes.axvline(0, color=LIGHT[0], linewidth=0.9, zorder=1)
    axes.axhline(
        BOUND,
        color=LIGHT[0],
        linewidth=1.1,
        linestyle=(0, (4, 3)),
        zorder=1,
        label="Adam after one dominant gradient, $\\sqrt{1-\\beta}$",
    )
    for line in LINES:
        here = [row.sizes for row in rows if row.line == line]
        if here:
            _line(axes, line, list(zip(*here, strict=True)))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("steps after the spike")
    style_axes(axes)


def _line(axes: Axes, line: str, sizes: Sequence[Sequence[float]]) -> None:
    """sizes: for each step those of all seeds; the last step is `WINDOW` steps after the spike."""
    steps, style = range(WINDOW + 1 - len(sizes), WINDOW + 1), _STYLES[line]
    axes.fill_between(steps, [*map(min, sizes)], [*map(max, sizes)], color=LIGHT[style], alpha=0.22, linewidth=0)
    axes.plot(
        steps,
        [median(seeds) for seeds in sizes],
        color=LIGHT[style],
        linewidth=1.7,
        marker=MARKERS[style],
        markersize=4,
        markevery=(style, 8),
        label=_LABELS[line],
        zorder=4 if line in ("exact", "marginals") else 3,
    )
