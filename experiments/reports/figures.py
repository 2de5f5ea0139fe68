"""Drawing of curves with matplotlib, and SVG with fixed colors for files or style-sheet variables for HTML pages."""

from __future__ import annotations

import io
import math
import re
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..files import replacing

# The palette of Okabe and Ito, distinct for any color vision, with its lightness adapted to white and to dark paper.
LIGHT = ("#5b5b5c", "#0072b2", "#d55e00", "#009e73", "#b8609a", "#c98a00", "#3d9cd2", "#8a7d00")
DARK = ("#b4b4b5", "#4da3e0", "#ff8438", "#2fc79a", "#e29cc8", "#f0b429", "#8fd0f7", "#dccb3c")
# Markers and dashes distinguish curves without color, such as in print.
MARKERS = "osD^vPX*"
DASHES = ("-", (0, (3, 1.6)), (0, (1, 1.2)))
_RESERVED = {"adamw": 0, "shampoo": 1, "soap_fitted": 2, "muon": 4}
"""Colors of the methods that most reports have. The names of all others select one of the other colors by a hash."""
_HANDLE, CHARACTER = 0.5, 0.075
"""Widths in inches of the parts of a legend entry: its line with the spaces around it, and an average character."""
_MARGIN = 0.75
"""Width in inches of the parts of a figure beside its axes: labels of the vertical axis, and spaces."""
_MANY = 100
"""Number of points of a curve above which its markers are drawn with a white edge. Curves with so many points are
mostly training losses, which are noisy. Evaluations are fewer."""
INK, _RULE = "#3c3c3d", "#d8d8d9"
_TICKS, _FEWER_TICKS, POWERS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 5), (1,)
"""First digits of the ticks of a logarithmic axis, for narrow, for wider and for very wide ranges of values."""
_EXPONENT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class LostRun:
    """A run that diverged: its finite values, and the x at which it ended."""

    x: Sequence[float]
    y: Sequence[float]
    end: float


@dataclass(frozen=True)
class Curve:
    """The mean of a metric over seeds, with a band from the smallest to the largest value of a seed.

    Runs that diverged are drawn as dotted lines. A cross at the upper edge of the figure marks where such a run ends.

    label: text in the legend.
    style: number of color, dashes and marker, see `stroke`.
    x: abscissas.
    mean, low, high: mean, smallest and largest value over seeds.
    lost: runs that diverged.
    lost_label: text in the legend for these runs.
    """

    label: str
    style: int
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    lost: tuple[LostRun, ...] = ()
    lost_label: str = ""


LogAxes = Literal["auto", "none", "x", "y", "xy"]
"""Axes of a figure of curves over a run that are logarithmic. `auto`: the vertical axis, if its values span a wide
range."""


WIDTH = 4.8
"""Default width of figures in inches. Papers have columns of 3.25 to 3.5 and pages of 5.5 to 6.75 inches."""


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare the curves with, in the color of a style."""

    value: float
    label: str
    style: int


def stroke(style: int) -> dict[str, Any]:
    """Return color, dashes and marker of a style as arguments of matplotlib. The first 24 styles are all different.

    Styles 0 to 7 are solid and have the colors of the palette. Each further turn of the palette has other dashes.
    """
    turn, color = divmod(style, len(LIGHT))
    marker = MARKERS[(color + turn) % len(MARKERS)]
    return {"color": LIGHT[color], "linestyle": DASHES[turn % len(DASHES)], "marker": marker}


def styles_of(names: Mapping[str, str]) -> dict[str, int]:
    """Return a style for each label of a figure. A method usually has the same style in all figures.

    If two methods of a figure would have the same style, the method whose name is first in the alphabet keeps it, and
    the other method gets another free color. Methods with reserved colors keep these.

    names: name of the method, by label.
    """
    found: dict[str, int] = {}
    others = [color for color in range(len(LIGHT)) if color not in _RESERVED.values()]
    for label in sorted(names, key=lambda label: (names[label] not in _RESERVED, names[label], label)):
        first = zlib.crc32(names[label].encode()) % len(others)
        own = [_RESERVED[names[label]]] if names[label] in _RESERVED else []
        wanted = [*own, *others[first:], *others[:first], *_RESERVED.values()]
        turn = len(found) // len(LIGHT) * len(LIGHT)
        found[label] = next(turn + color for color in wanted if turn + color not in found.values())
    return {label: found[label] for label in names}


def draw_curves(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    level: Level | None = None,
    log: LogAxes | None = "auto",
    width: float = WIDTH,
) -> Figure:
    """Draw curves in one figure. The vertical axis is logarithmic if all values are positive and span a wide range.

    level: horizontal line to draw; None: no line.
    log: choice of logarithmic axes, for curves of a metric over the course of a run. None: the curves show final
        metrics against a quantity such as a learning rate, whose axis is then logarithmic.
    width: width in inches.
    """
    entries = [text for curve in curves for text in (curve.label if curve.x else "", curve.lost_label) if text]
    entries += [] if level is None else [level.label]
    columns, lines = legend_size(entries, width, 2)
    height = 3.1 + 0.2 * lines
    x_label, y_label = wrapped(x_label, width - _MARGIN), wrapped(y_label, height - 0.2 * lines - _MARGIN)
    figure = Figure(figsize=(width, height + 0.16 * x_label.count("\n")), layout="constrained")
    axes = figure.add_subplot()
    logarithmic = log is None or "x" in log
    for curve in curves:
        draw_line(axes, curve, logarithmic, few_markers=log is not None)
    if level is not None:
        color = stroke(level.style)["color"]
        axes.axhline(level.value, color=color, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1, label=level.label)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _vertical(axes, curves, falling=log is not None, logarithmic=None if log is None or log == "auto" else "y" in log)
    if logarithmic:
        axes.set_xscale("log")
    spread_ticks(axes.xaxis, width - _MARGIN)
    tried = {x for curve in curves for x in (*curve.x, *(run.end for run in curve.lost)) if x > 0}
    if log is None and tried:
        ticks = _apart(sorted(tried), width)
        axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: ticks.get(x, "")))
    style_axes(axes)
    if curves:  # the legend is below the axes, where it covers nothing
        style = {"fontsize": 8.5, "labelcolor": INK, "frameon": False, "handlelength": 2.2}
        wrap_legend(figure.legend(loc="outside lower center", ncols=columns, **style), width)
    return figure


def wrapped(text: str, inches: float, size: float = 9.5) -> str:
    """Return a text broken into lines. Words are never divided.

    inches: largest length of a line that has more than one word.
    size: size of the font in points.
    """
    most = int(inches / (CHARACTER * size / 9.5))
    return textwrap.fill(text, max(1, most), break_long_words=False, break_on_hyphens=False) or text


def legend_size(entries: Sequence[str], width: float, most: int) -> tuple[int, int]:
    """Return the number of columns of a legend, at most `most`, and the number of lines of the longest column.

    entries: texts of the legend.
    width: width of the figure in inches.
    """
    longest = _HANDLE + CHARACTER * max(map(len, entries), default=0)
    columns = max(1, min(most, int(width / longest)))
    lines = [wrapped(text, width - _HANDLE).count("\n") + 1 for text in entries]
    size = -(-len(lines) // columns)
    return columns, max((sum(lines[k : k + size]) for k in range(0, len(lines), max(1, size))), default=0)


def wrap_legend(legend: Legend, width: float) -> None:
    """Break texts of a legend that are longer than a figure of this width, in inches."""
    for text in legend.get_texts():
        text.set_text(wrapped(text.get_text(), width - _HANDLE))


def _apart(values: Sequence[float], width: float) -> dict[float, str]:
    """Return {value: text} for the values that get a tick on a logarithmic axis. A value gets no tick if its text would
    touch the text of the tick before.

    values: positive numbers in ascending order, which fill the axis.
    width: width of the figure in inches.
    """
    found: dict[float, str] = {}
    inches = 0.8 * width / math.log(values[-1] / values[0]) if len(values) > 1 else 0.0
    for value in values:
        text, last = f"{value:.3g}" if value < 1 else f"{value:g}", next(reversed(found), None)
        if last is None or inches * math.log(value / last) > CHARACTER * (len(found[last]) + len(text) + 1) / 2:
            found[value] = text
    return found


def draw_line(axes: Axes, curve: Curve, logarithmic: bool = False, *, few_markers: bool = True) -> None:
    """Draw a curve in its style: its line with the band around it, and the runs that diverged.

    logarithmic: True if the horizontal axis will be logarithmic, for the places of markers.
    few_markers: True for few markers, as `_marked` chooses them. False for a marker at every point, as for values that
        were tried.
    """
    own = stroke(curve.style)
    color = own["color"]
    if curve.x:
        axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.22, linewidth=0)
        marked: dict[str, Any] = {"markersize": 4}
        if few_markers:
            marked["markevery"] = _marked(curve.x, logarithmic)
            if len(curve.x) > _MANY:  # the line may be noisy; a white edge sets markers apart from it
                marked |= {"markersize": 6, "markeredgecolor": "white", "markeredgewidth": 0.8}
        axes.plot(curve.x, curve.mean, **own, **marked, linewidth=1.7, label=curve.label)
    height = 0.97 - 0.05 * (curve.style % len(LIGHT))  # crosses of several curves are drawn below each other
    for index, run in enumerate(curve.lost):
        axes.plot(run.x, run.y, color=color, linewidth=1.0, linestyle=":")
        label = curve.lost_label if index == 0 else "_"
        (cross,) = axes.plot([run.end], [height], transform=axes.get_xaxis_transform(), label=label, linestyle="none")
        cross.set(color=color, marker="x", markersize=6, markeredgewidth=1.6)


def _marked(x: Sequence[float], logarithmic: bool) -> list[int]:
    """Return the indices of the points that get a marker: all of up to twelve points, else about seven.

    These seven have about the same number of points between them or, on a logarithmic axis, about the same distance.
    """
    if len(x) <= 12:
        return list(range(len(x)))
    if not logarithmic:
        return list(range(0, len(x), math.ceil(len(x) / 7)))
    places = np.array(x, dtype=float)
    places = np.log(np.where(places > 0, places, math.nan))  # such an axis has no 0
    if np.isnan(places).all():
        return []
    wanted = np.linspace(np.nanmin(places), np.nanmax(places), 7)
    return sorted({int(np.nanargmin(np.abs(places - place))) for place in wanted})


def _vertical(axes: Axes, curves: Sequence[Curve], *, falling: bool, logarithmic: bool | None = None) -> None:
    """Set the range of the vertical axis to all values.

    falling: if True and the curves fall, values above the largest first value are cut off.
    logarithmic: True for a logarithmic axis, False for a linear one; None: logarithmic if values span a wide range. If
        a value is not positive, the axis is always linear.
    """
    finite = [y for curve in curves for y in [*curve.low, *curve.high] if math.isfinite(y)]
    if not finite:
        return
    low, high = min(finite), max(finite)
    starts = [y for curve in curves for y in curve.high[:1] if math.isfinite(y)]
    ends = [y for curve in curves for y in curve.mean[-1:] if math.isfinite(y)]
    if falling and starts and ends and max(starts) > max(ends):  # curves that rise, as of an accuracy, are not cut off
        high = max(starts)
    narrow = low > 0 and high / low < 1.8
    if low <= 0 or (narrow if logarithmic is None else not logarithmic):
        pad = 0.05 * (high - low) or 1.0
        axes.set_ylim(low - pad, high + pad)
        return
    axes.set_yscale("log")
    log_ticks(axes.yaxis, _TICKS if high / low < 8 else _FEWER_TICKS if high / low < 1e3 else POWERS)
    if narrow:  # a narrow range may have only one of the ticks above
        axes.yaxis.set_major_locator(MaxNLocator(6))
    spread = max(high / low, 1.1)
    axes.set_ylim(low / spread**0.05, high * spread**0.05)


def log_ticks(axis: Axis, digits: Sequence[float], most: int = 7) -> None:
    """Put the ticks of a logarithmic axis at these digits times powers of ten.

    If the only digit is 1, there are at most `most` ticks. If the axis then extends beyond the range from 0.001 to
    10000, ticks are written as powers, such as 10⁻⁸.
    """

    def text(value: float, _: object) -> str:
        low, high = axis.get_view_interval()
        if digits != POWERS or (low > 5e-4 and high < 2e4):
            return f"{value:g}"
        return f"10{str(round(math.log10(value))).translate(_EXPONENT)}"

    axis.set_major_locator(LogLocator(subs=digits, numticks=most if digits == POWERS else None))
    axis.set_major_formatter(FuncFormatter(text))
    axis.set_minor_locator(NullLocator())


def spread_ticks(axis: Axis, inches: float, most: int = 9, size: float = 9, **options: Any) -> None:
    """Put as many ticks on a horizontal axis as have room, at least two.

    inches: length of the axis.
    most: largest number of intervals between ticks of a linear axis.
    size: size of the font in points.
    options: further arguments of `MaxNLocator`.
    """
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log":
        finest = 0 if high < 4 * low else 1 if high < 2e3 * low else 3
        digits = (_TICKS, _FEWER_TICKS, (1, 3), POWERS)[finest:]
        choices = [partial(log_ticks, axis, own) for own in digits]
        choices += [partial(log_ticks, axis, POWERS, number) for number in (5, 4, 3)]
    else:
        locators = [MaxNLocator(number, steps=[1, 2, 2.5, 5, 10], **options) for number in range(most, 0, -1)]
        choices = [partial(axis.set_major_locator, locator) for locator in locators]
    for choose in choices:
        choose()
        if _are_apart(axis, inches, size):
            return


def _are_apart(axis: Axis, inches: float, size: float) -> bool:
    """Return True if a horizontal axis has two ticks or more, and their texts have a space between them."""
    low, high = axis.get_view_interval()
    ticks = [x for x in axis.get_major_locator().tick_values(low, high) if low <= x <= high]
    texts = axis.get_major_formatter().format_ticks(ticks)
    places = axis.get_transform().transform(np.array([low, *ticks, high]))
    inch = (places - places[0]) / (places[-1] - places[0]) * inches
    room = [(len(a) + len(b)) / 2 + 1 for a, b in pairwise(texts)]
    gaps = np.diff(inch[1:-1])
    return len(ticks) > 1 and all(gap > CHARACTER * size / 9 * most for gap, most in zip(gaps, room, strict=True))


def style_axes(axes: Axes) -> None:
    """Give the axes the style of all figures: a light grid, no frame but the base line, small labels."""
    axes.grid(True, color=_RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=INK)
    axes.xaxis.label.set(color=INK, size=9.5)
    axes.yaxis.label.set(color=INK, size=9.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure on white paper. The suffix (svg, png, pdf) determines the format.

    PDF files embed TrueType fonts (type 42), because many venues refuse matplotlib's default, Type 3.
    """
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": path.stem, "pdf.fonttype": 42, "ps.fonttype": 42}
    with matplotlib.rc_context(settings):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        form = path.suffix.removeprefix(".")
        with replacing(path) as temporary:
            figure.savefig(temporary, facecolor="white", dpi=160, metadata=metadata, format=form)


def inline_svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element for an HTML page, with the page's font and with variables as colors.

    The page must define `--ink`, `--rule` and `--series-0` ... . `name` keeps the ids of several figures apart.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "svg.id": None}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
    text = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"\s*font-family:[^;\"]*;?", "", text)
    text = text.replace(INK, "var(--ink)").replace(_RULE, "var(--rule)")
    for index, color in enumerate(LIGHT):
        text = text.replace(color, f"var(--series-{index})")
    return text.strip()
