"""A self-contained HTML page about a directory of runs: curves, tables, differences of recipes, environments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from ..files import make_directory, short_name, write_text
from . import figures
from .comparison import ComparisonPanel, at_their_best, compare, sweeps, swept, tuning_curves
from .drawings import beside_curves
from .recipe_diff import diff_recipes
from .records import Records, Run, Status, learning_rate, read_records
from .seed_statistics import BOOTSTRAP_PAIRS, Paired
from .tables import (
    format_difference,
    format_length,
    format_metric,
    format_number,
    format_ratio,
    format_reached,
    format_summary,
    sentences,
    worst_layers,
    write_runs_csv,
    write_tables,
)

_AXES = (("steps", "training steps"), ("seconds", "training seconds"))


def write_report(directory: Path, baseline: str | None = None) -> Path:
    """Write report.html, runs.csv, tables.md and tables.tex into a directory, and return the path of the page.

    Args: directory: directory of a study or of runs, finished or not. baseline: label to compare with. None: the
    baseline of the study.

    Returns: The path of report.html.

    Raises: ValueError: no run has started, or `baseline` is no label.
    """
    records = read_records(directory, baseline)
    page = render(records)
    path = directory / "report.html"
    write_text(path, page)
    write_runs_csv(records, directory / "runs.csv")
    write_tables(records, directory)
    return path


def write_figures(directory: Path, folder: Path, baseline: str | None = None) -> list[Path]:
    """Write every figure of the report of `directory` into `folder`, as SVG and as PNG, and return the paths."""
    make_directory(folder)
    records = read_records(directory, baseline)
    along, metric = swept(records), records.metric.title
    named = {
        _file(records, title, f"final {metric} against {along.compare}"): figure
        for title, figure in _sweeps(along).items()
    }
    named |= {_file(records, *parts): figure for parts, figure in _tuning(records).items()}
    for panel in [*at_their_best(along), *compare(records)]:
        for axis, (short, _) in enumerate(_AXES if panel.begun else ()):
            named[_file(records, panel.title, f"{metric} against {short}")] = _figure(panel, axis)
        named |= {_file(records, panel.title, short): drawing for short, _, drawing in beside_curves(panel)}
    paths = []
    for name, figure in named.items():
        for suffix in ("svg", "png"):
            paths.append(folder / short_name(_slug(name), f".{suffix}"))
            figures.save_figure(figure, paths[-1])
    return paths


def render(records: Records) -> str:
    """Return the page as text. All labels, paths and messages are escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "summary": format_summary,
        "difference": format_difference,
        "number": format_number,
        "metric": format_metric,
        "length_of_run": format_length,
        "ratio": format_ratio,
    }
    panels, along = compare(records), swept(records)
    best = at_their_best(along)
    head = f"Final {records.metric.title} against {axis_name(along.compare)}"
    return environment.get_template("report.html.jinja").render(
        records=records,
        panels=[
            (panel, _drawings(panel, index), sentences(panel, records), worst_layers(panel))
            for index, panel in enumerate([*best, *panels])
        ],
        sweeps=[
            (f"{head}: {title}", Markup(figures.inline_svg(figure, f"sweep-{index}")))
            for index, (title, figure) in enumerate(_sweeps(along).items())
        ],
        tuning=[
            (f"{what.capitalize()}: {title}", Markup(figures.inline_svg(figure, f"tuning-{index}")))
            for index, ((title, what), figure) in enumerate(_tuning(records).items())
        ],
        swept=along.compare,
        reached=format_reached,
        learning_rate=learning_rate,
        chosen=bool(best),
        status=_count_status(records),
        failures=[(run, run.status(records.metric)) for run in records.runs if _failed(run, records)],
        labels=list(dict.fromkeys(row.label for panel in panels for row in panel.rows if row.label in panel.configs)),
        recipe_diff=diff_recipes({panel.title: panel.configs for panel in panels}),
        environments=_environments(records.runs),
        critical=_critical(records),
        bootstrap_pairs=BOOTSTRAP_PAIRS,
        palette=list(zip(figures.LIGHT, figures.DARK, strict=True)),
    )


def _figure(panel: ComparisonPanel, axis: int) -> Figure:
    curves = [curve for row in panel.rows if (curve := row.curve(axis)) is not None]
    base = panel.baseline
    level = None
    if base is not None and base.final is not None and math.isfinite(base.final.mean):
        level = figures.Level(base.final.mean, f"{base.title}, final")
    return figures.draw_curves(curves, _AXES[axis][1], panel.metric.title, level=level)


def _drawings(panel: ComparisonPanel, index: int) -> list[tuple[str, Markup]]:
    """Return the caption and the SVG of each figure of a panel."""
    drawings = {
        f"{panel.metric.title.capitalize()} against {long}: {panel.title}": (short, _figure(panel, axis))
        for axis, (short, long) in enumerate(_AXES if panel.begun else ())
    }
    drawings |= {f"{caption}: {panel.title}": (short, drawing) for short, caption, drawing in beside_curves(panel)}
    return [  # matplotlib has escaped the labels
        (caption, Markup(figures.inline_svg(figure, f"panel-{index}-{short}")))
        for caption, (short, figure) in drawings.items()
    ]


def _sweeps(records: Records) -> dict[str, Figure]:
    """Return a figure for each group of panels in which a number varies, by title."""
    y_label = f"final {records.metric.title}"
    return {
        title: figures.draw_curves(curves, axis_name(records.compare), y_label, log_x=True)
        for title, curves in sweeps(records).items()
    }


def _tuning(records: Records) -> dict[tuple[str, str], Figure]:
    """Return a figure of each search's results, by (title of the panel, description)."""
    metric = f"mean {records.metric.title}"
    return {
        (title, f"tuning, {metric} against {axis_name(path)}"): figures.draw_curves(
            curves, axis_name(path), metric, log_x=True
        )
        for (path, title), curves in tuning_curves(records).items()
    }


def _count_status(records: Records) -> dict[Status, int]:
    counts: dict[Status, int] = {}
    for run in records.runs:
        status = run.status(records.metric)
        counts[status] = counts.get(status, 0) + 1
    return counts


def _failed(run: Run, records: Records) -> bool:
    return run.status(records.metric) not in ("complete", "missing") or bool(run.result.get("diagnosis"))


def _environments(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the distinct values of every field of the runs' environments, by field."""
    fields: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in _leaves(run.environment):
            fields.setdefault(key, {}).setdefault(value)
    return {key: list(values) for key, values in fields.items()}


def _leaves(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, f"{path} {key}".strip())
    else:
        yield path, " ".join(map(str, data)) if isinstance(data, list) else str(data)


def _critical(records: Records) -> Paired | None:
    """Return a comparison without difference, for the |t| that is significant with this number of seeds."""
    seeds = len({run.seed for run in records.runs})
    return Paired(seeds, 0.0, None, None) if seeds > 1 else None


def axis_name(path: str) -> str:
    """Return the name of a numeric axis: words for common paths, the path itself for others."""
    words = {"lr": "learning rate", "weight_decay": "weight decay", "steps": "training steps", "task.width": "width"}
    return words.get(path, path)


def _file(records: Records, title: str, what: str) -> str:
    """Return a file name with the study, the panel and the content of a figure."""
    return " ".join(dict.fromkeys((records.name, title, what)))


def _slug(title: str) -> str:
    return re.sub(r"[^\w.]+", "-", title).strip("-") or "figure"
