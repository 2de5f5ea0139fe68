"""A self-contained HTML page about a directory of runs: curves, tables, differences of recipes, environments.

The runs are divided into panels: those of a panel differ only on the compared axis. A panel has figures of the metrics
over a run, of the differences from the baseline, and of measures of the optimizer such as the norms of updates.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from eigengraft.errors import ArgumentError

from ..files import make_directory, replacing, short_name, write_text
from . import figures, tables
from .comparison import ComparisonPanel, all_panels, at_their_best, compare, sweeps, swept, tuning_curves, twin
from .recipe_diff import diff_recipes
from .records import ABSCISSAS, METRICS, TRAINING_LOSS, Abscissa, Metric, Records, Run, read_records
from .seed_statistics import BOOTSTRAP_PAIRS, Paired, significant_t


def difference_dots(panel: ComparisonPanel, width: float = figures.WIDTH) -> Figure | None:
    """Draw a dot for each row at its mean paired difference from the baseline, with the 95 % interval of the t test.

    Rows have the order of the panel's table, from top to bottom. Rows without an interval, because they diverged or
    have a single seed, are left out. Returns None if fewer than two rows have an interval.
    """
    rows = [(row, found) for row in panel.rows if (found := row.difference) is not None and _bar(found) is not None]
    if panel.baseline is None or len(rows) < 2:
        return None
    rows.reverse()  # heights grow from the bottom
    titles = [figures.wrapped(row.title, 0.4 * width) for row, _ in rows]
    lines = [line for title in titles for line in title.split("\n")]
    room = width - 0.3 - figures.CHARACTER * max(map(len, lines))
    label = figures.wrapped(f"final {panel.metric.title} minus that of {panel.baseline.title}", room)
    step = max(0.32, 0.05 + 0.15 * max(title.count("\n") + 1 for title in titles))
    height = 0.75 + step * len(rows) + 0.16 * label.count("\n")
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0.0, color=figures.LIGHT[0], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    for height, (row, found) in enumerate(rows):
        style = {**figures.stroke(row.style), "linestyle": "-", "markersize": 5, "linewidth": 1.5, "capsize": 3}
        axes.errorbar([found.mean], [height], xerr=_bar(found), **style)
    axes.set_yticks(range(len(rows)), titles)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(label)
    figures.spread_ticks(axes.xaxis, room, most=6)
    figures.style_axes(axes)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelcolor=figures.INK)
    return figure


def _bar(found: Paired) -> list[float] | None:
    """Return the length of an error bar for matplotlib: half of the 95 % interval. None if it is not finite."""
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


def internals(panel: ComparisonPanel, width: float = figures.WIDTH) -> Figure | None:
    """Draw a small diagram for each measure that a run of the panel has recorded. Return None if there are no measures.

    A line is the median over parameters, stages and seeds. Its band reaches from quartile to quartile.
    """
    found = {measure: curves for measure in MEASURES if (curves := _curves(panel, measure))}
    if not found:
        return None
    rows = -(-len(found) // 2)
    entries = list(dict.fromkeys(curve.label for curves in found.values() for curve in curves))
    columns, lines = figures.legend_size(entries, width, 3)
    figure = Figure(figsize=(width, 1.5 * rows + 0.15 + 0.2 * lines), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False)
    for axes in grid.flat[len(found) :]:
        axes.remove()
    for axes, (measure, curves) in zip(grid.flat, found.items(), strict=False):
        _diagram(axes, curves, *MEASURES[measure], width / 2 - 0.4)
    for axes in grid.flat[max(0, len(found) - 2) : len(found)]:
        axes.set_xlabel("training steps", fontsize=7.5)
    handles = {str(line.get_label()): line for axes in grid.flat for line in axes.get_lines()}
    style = {"ncols": columns, "fontsize": 8, "frameon": False, "labelcolor": figures.INK}
    figures.wrap_legend(figure.legend(list(handles.values()), list(handles), loc="outside upper left", **style), width)
    return figure


def _curves(panel: ComparisonPanel, measure: str) -> list[figures.Curve]:
    """Return a curve for each compared label, with the quartiles of a measure over parameters and seeds at each step.

    Labels whose runs did not record the measure are left out.

    measure: name of a measure of the optimizer, such as the norm of updates.
    """
    found = []
    for row in panel.rows:
        values: dict[int, list[float]] = {}
        for line in (line for run in row.runs for line in run.diagnostics if _shown(line, measure)):
            values.setdefault(int(line["step"]), []).append(float(line["value"]))
        if values:
            steps = sorted(values)
            low, middle, high = np.transpose([np.quantile(values[x], (0.25, 0.5, 0.75)) for x in steps]).tolist()
            found.append(figures.Curve(row.label, row.style, [float(step) for step in steps], middle, low, high))
    return found


def _shown(line: dict[str, Any], measure: str) -> bool:
    wanted = line["measure"] == measure and line["value"] is not None
    return wanted and (measure not in OF_CHAINS or line["stage"].rpartition(".")[2] == "update")


def _diagram(axes: Axes, curves: Sequence[figures.Curve], title: str, logarithmic: bool, inches: float) -> None:
    for curve in curves:
        figures.draw_line(axes, curve)
    positive = [y for curve in curves for y in curve.low]
    if logarithmic and positive and min(positive) > 0 and math.isfinite(max(positive)):
        axes.set_yscale("log")
        wide = max(y for curve in curves for y in curve.high) > 50 * min(positive)
        figures.log_ticks(axes.yaxis, figures.POWERS if wide else (1, 2, 5), most=4)
    elif positive and min(positive) >= 0:
        axes.set_ylim(bottom=0)
    figures.style_axes(axes)
    axes.set_title(figures.wrapped(title, inches, 8), fontsize=8, loc="left", color=figures.INK)
    axes.tick_params(which="both", labelsize=7)
    figures.spread_ticks(axes.xaxis, inches, most=4, size=7, integer=True)


if TYPE_CHECKING:
    from pandas import DataFrame


_DEFAULT: tuple[Abscissa, ...] = ("steps", "seconds")
"""Quantities along which metrics are drawn by default. Seconds are left out if no run has recorded them."""


WIDTHS = (1, 20)
"""Least and largest width of figures in inches: labels do not fit into less, and no paper is wider."""


def _is_list(texts: object) -> bool:
    """Return True for a sequence of strings that is not itself a string."""
    return isinstance(texts, Sequence) and not isinstance(texts, str) and all(isinstance(one, str) for one in texts)


def _are_texts(labels: object) -> bool:
    """Return True for a mapping from strings to strings."""
    return isinstance(labels, Mapping) and _is_list([*labels, *labels.values()])


def _is_width(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and WIDTHS[0] <= float(value) <= WIDTHS[1]


@dataclass(frozen=True)
class Report:
    """The report of a directory of runs: its numbers, its figures and its page.

    Args:
        directory: directory of a study or of runs, finished or not.
        baseline: label to compare with, or `axis=label`. The runs are compared along the axis of this label. None: the
            baseline of the study.
        only: labels of the compared axis, or `axis=label` for another axis. All other runs are left out, and the page
            is written into a folder of its own (see `folder`). A pattern such as `soap*` selects several labels. Empty:
            all runs.
        labels: texts that replace labels, by label.
        x: quantities along which metrics are drawn: any of "steps", "seconds", "tokens" and "flops".
        width: width of figures in inches.
        log: logarithmic axes of the curves over a run: "auto", "none", "x", "y" or "xy".

    Raises:
        ValueError: an argument has a wrong type or value, or names a label that does not exist; no run has started; or
            no run has recorded a quantity of `x`.
    """

    directory: str | Path
    baseline: str | None = None
    only: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    x: Sequence[Abscissa] = _DEFAULT
    width: float = figures.WIDTH
    log: figures.LogAxes = "auto"

    def __post_init__(self) -> None:
        quantities = ", ".join(ABSCISSAS)
        required = {
            "directory": (isinstance(self.directory, (str, PathLike)), "a path"),
            "baseline": (self.baseline is None or isinstance(self.baseline, str), "a label or AXIS=LABEL"),
            "only": (_is_list(self.only), "a list of labels, as ['soap*', 'lr=0.1'],"),
            "labels": (
                _are_texts(self.labels),
                "a dictionary from labels to texts, as {'soap': 'SOAP'},",
            ),
            "x": (_is_list(self.x) and len(self.x) > 0, f"a list of one or more of {quantities}, as ['tokens'],"),
            "width": (_is_width(self.width), f"a number of inches from {WIDTHS[0]} to {WIDTHS[1]}"),
            "log": (self.log in get_args(figures.LogAxes), f"one of {', '.join(get_args(figures.LogAxes))}"),
        }
        for name, (fine, what) in required.items():
            if not fine:
                raise ArgumentError(name, f"{what} is required, got {getattr(self, name)!r}")
        if unknown := [along for along in self.x if along not in ABSCISSAS]:
            raise ArgumentError("x", f"'{unknown[0]}' is not a quantity of a run; the quantities are {quantities}")
        _ = self.records  # raises an error about labels

    @cached_property
    def records(self) -> Records:
        """The runs, read from their files when the report is made."""
        records = read_records(Path(self.directory), self.baseline, self.only, self.labels)
        for along in self.x:
            if not _recorded(records, along) and tuple(self.x) != _DEFAULT:
                raise ArgumentError("x", f"no run has recorded {along}; use steps")
        return records

    @cached_property
    def panels(self) -> list[ComparisonPanel]:
        """The panels of the page. See `all_panels`."""
        return all_panels(self.records)

    def runs(self) -> DataFrame:
        """Return a data frame with a row for each run, with the columns of `load_runs`."""
        return tables.runs_frame(self.records)

    def figures(self) -> dict[str, Figure]:
        """Return all figures by name, as figures of matplotlib; `figure.axes` has their axes."""
        final, tuning = self._of_grids()
        found = {name: figure for name, _, figure in (*final, *tuning)}
        for panel in self.panels:
            found |= {_file(self.records, panel.title, name): figure for name, _, figure in self._of_panel(panel)}
        return found

    @property
    def footnote(self) -> str:
        """A sentence that explains the sign † in figures, for their captions; "" if no figure has this sign."""
        busy = "seconds" in self.x and any(panel.busy for panel in self.panels)
        return tables.BUSY if busy else ""

    def save_figures(self, folder: str | Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
        """Write all figures into a folder, which is created if it does not exist.

        A caption of a figure with the sign † needs the sentence `footnote`.

        Args:
            folder: folder of the figures.
            formats: formats of matplotlib, as "svg", "png" and "pdf". Each figure is written in all of them.

        Returns:
            The paths of the files.

        Raises:
            ValueError: `formats` is no list of formats that matplotlib can write.
        """
        if not _is_list(formats):
            raise ArgumentError("formats", f"a list of formats, as ['svg', 'pdf'], is required, got {formats!r}")
        known = FigureCanvasBase.get_supported_filetypes()
        if unknown := [one for one in formats if one not in known]:
            raise ArgumentError(
                "formats", f"'{unknown[0]}' is not a format of figures; the formats are {', '.join(known)}"
            )
        make_directory(Path(folder))
        paths = []
        for name, figure in self.figures().items():
            for suffix in formats:
                paths.append(Path(folder) / short_name(_slug(name), f".{suffix}"))
                figures.save_figure(figure, paths[-1])
        return paths

    @property
    def folder(self) -> Path:
        """The folder of the page: the directory of the runs.

        If `only` leaves out runs, it is a folder in this directory, whose name has the selected labels.
        """
        directory, selected = Path(self.directory), self.records.selected
        return directory / short_name(_slug(f"only {' '.join(selected)}")) if selected else directory

    def write(self) -> Path:
        """Write report.html, runs.csv, tables.md and tables.tex into `folder`. Return the path of the page."""
        page, folder = self.page(), self.folder
        make_directory(folder)
        write_text(folder / "report.html", page)
        with replacing(folder / "runs.csv") as temporary:
            self.runs().to_csv(temporary, index=False, float_format="%.6g", lineterminator="\n")
        tables.write_tables(self.records, folder)
        return folder / "report.html"

    def page(self) -> str:
        """Return the page as text. All labels, paths and messages are escaped."""
        records, (final, tuning) = self.records, self._of_grids()
        return (
            templates()
            .get_template("report.html.jinja")
            .render(
                records=records,
                panels=list(self._sections()),
                sweeps=_drawn(final, "sweep"),
                tuning=_drawn(tuning, "tuning"),
                swept=swept(records).compare,
                grid=tables.grid_of(records),
                marks=tables.marks,
                rise_notice=tables.rise_notice,
                chosen=bool(at_their_best(swept(records))),
                status=Counter(run.status(records.metric) for run in records.runs),
                failures=[(run, run.status(records.metric)) for run in records.runs if _failed(run, records)],
                tuned=tables.tuned_table(records.tuned),
                recipe_diff=diff_recipes({panel.title: panel.configs for panel in compare(records)}),
                environments=_environments(records.runs),
                seeds=len({run.seed for run in records.runs}),
                significant_t=significant_t,
                bootstrap_pairs=BOOTSTRAP_PAIRS,
                palette=list(zip(figures.LIGHT, figures.DARK, strict=True)),
            )
        )

    def _sections(self) -> Iterator[tuple[Any, ...]]:
        """Yield the content of each section of the page. A section shows one comparison (panel).

        The content is a tuple: the panel, another panel with the same runs or None, figures, sentences, the table of
        layers, and the table of results. If there is another panel with the same runs, the section only refers to this
        panel, and has neither figures nor sentences nor tables.
        """
        records = self.records
        for index, panel in enumerate([*at_their_best(swept(records)), *compare(records)]):
            if (same := twin(panel, records)) is not None:
                yield panel, same, (), (), None, None
            else:
                drawings = _drawn(self._of_panel(panel), f"panel-{index}", panel.title)
                texts = tables.sentences(panel), tables.worst_layers(panel), tables.panel_table(panel, records)
                yield panel, None, drawings, *texts

    def _of_grids(self) -> tuple[list[Drawing], list[Drawing]]:
        """Return two lists of figures of the metric against a hyperparameter.

        The first list shows the final metrics of the runs if the labels of an axis are numbers, such as learning rates
        (see `sweeps`). The second list shows the mean metrics that a search of the study found for each tuned field
        (see `tuning_curves`).
        """
        records, along = self.records, swept(self.records)
        metric = records.metric.title
        final, tuning = list[Drawing](), list[Drawing]()
        for title, curves in sweeps(along).items():
            drawn = figures.draw_curves(curves, axis_name(along.compare), f"final {metric}", log=None, width=self.width)
            name = _file(records, title, f"final {metric} against {along.compare}")
            final.append((name, f"Final {metric} against {axis_name(along.compare)}: {title}", drawn))
        for (path, title), curves in tuning_curves(records).items():
            drawn = figures.draw_curves(curves, axis_name(path), f"mean {metric}", log=None, width=self.width)
            what = f"tuning, mean {metric} against {axis_name(path)}"
            tuning.append((_file(records, title, what), f"{what.capitalize()}: {title}", drawn))
        return final, tuning

    def _of_panel(self, panel: ComparisonPanel) -> list[Drawing]:
        """Return all figures of one comparison (panel).

        The metric is drawn against each quantity of the argument `x` of the report, such as steps and seconds. Training
        loss, accuracy and the metrics `val.NAME` are drawn only against the first of these quantities.
        """
        found: list[Drawing] = []
        drawn = [(panel.metric, along) for along in self.x if _recorded(self.records, along)]
        accuracy = [METRICS["val_accuracy"]] if panel.reports_accuracy else []
        others = [TRAINING_LOSS, *accuracy, *(Metric(column, column, 1) for column in panel.further)]
        for metric, along in [*drawn, *((metric, self.x[0]) for metric in others)]:
            name = f"{metric.title} against {along}"
            if panel.begun and name not in [one for one, *_ in found]:
                caption = f"{metric.title} against {ABSCISSAS[along]}"
                caption += tables.busy_sign(panel) if along == "seconds" else ""
                found.append((name, caption[0].upper() + caption[1:], self._figure(panel, along, metric)))
        apart, inside = difference_dots(panel, self.width), internals(panel, self.width)
        if apart is not None:
            found.append(("differences", "Differences from the baseline over paired seeds, with 95 % intervals", apart))
        if inside is not None:
            caption = "Inside the optimizer: medians over parameters, stages and seeds, bands from quartile to quartile"
            found.append(("internals", caption, inside))
        return found

    def _figure(self, panel: ComparisonPanel, along: Abscissa, metric: Metric) -> Figure:
        curves = [curve for row in panel.rows if (curve := row.curve(along, metric)) is not None]
        base, level, compared = panel.baseline, None, metric is panel.metric
        if compared and base is not None and base.final is not None and math.isfinite(base.final.mean):
            level = figures.Level(base.final.mean, f"{base.title}, final", base.style)
        x_label = ABSCISSAS[along] + (tables.busy_sign(panel) if along == "seconds" else "")
        rising = self.log == "auto" and metric.sign < 0  # an accuracy near 1 needs no logarithm
        log: figures.LogAxes = "none" if rising else self.log
        return figures.draw_curves(curves, x_label, metric.title, level=level, log=log, width=self.width)


def templates() -> Environment:
    """Return the environment of the templates in this folder. It escapes all values."""
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _recorded(records: Records, along: Abscissa) -> bool:
    """Return True if a run has recorded a quantity, or may still do so because it has not started."""
    return any(not run.rows or run.abscissas(along) for run in records.runs)


Drawing = tuple[str, str, Figure]
"""Tuple of a figure's name, its caption and the figure."""


def _drawn(drawings: Sequence[Drawing], prefix: str, title: str = "") -> list[tuple[str, Markup]]:
    """Return (caption, SVG) of each figure, for an HTML page.

    prefix: start of all ids in the SVGs. Figures of different sections of the page need different ones.
    title: text that follows every caption; empty: none.
    """
    return [  # matplotlib has escaped the labels
        (f"{caption}: {title}" if title else caption, Markup(figures.inline_svg(figure, f"{prefix}-{index}")))
        for index, (_, caption, figure) in enumerate(drawings)
    ]


def _failed(run: Run, records: Records) -> bool:
    return run.status(records.metric) not in ("complete", "missing") or bool(run.result.get("diagnosis"))


def _environments(runs: Sequence[Run]) -> tables.TextTable:
    """Return a table of the environments of runs. It has a row for each field, with all values of the field.

    If a field has more than four values, the row has the first four and the number of the others.
    """
    fields: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in _leaves(run.environment):
            fields.setdefault(key, {}).setdefault(value)
    texts = {
        key: [*list(found)[:4], *([f"and {len(found) - 4} more"] * (len(found) > 4))] for key, found in fields.items()
    }
    return tables.TextTable(
        "", "", "", [], [[tables.TableCell(key), tables.TableCell("\n".join(lines))] for key, lines in texts.items()]
    )


def _leaves(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, f"{path} {key}".strip())
    else:
        yield path, " ".join(map(str, data)) if isinstance(data, list) else str(data)


def axis_name(path: str) -> str:
    """Return the name of a numeric axis: words for common paths, the path itself for others."""
    words = {"lr": "learning rate", "weight_decay": "weight decay", "steps": "training steps", "task.width": "width"}
    return words.get(path, path)


def _file(records: Records, title: str, what: str) -> str:
    """Return the name of a figure: the study's name, `title` and `what`. If some of these are equal, they appear once.

    title: title of the panel or group of curves that the figure shows.
    what: content of the figure, such as "final validation loss against lr".
    """
    return " ".join(dict.fromkeys((records.name, title, what)))


def _slug(title: str) -> str:
    return re.sub(r"[^\w.]+", "-", title).strip("-") or "figure"
