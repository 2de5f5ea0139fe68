"""One self-contained HTML page about a directory of runs: curves, a table, what differed, and where it ran."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from . import figures
from .comparison import Panel, Row, compare
from .contrast import contrast
from .records import Records, Run, Status, read_records
from .statistics import Paired, Summary

_NONE, _MINUS = "\u2013", "\u2212"
_AXES = (("steps", "training steps"), ("seconds", "training seconds"))


def write_report(directory: Path) -> Path:
    """Write DIRECTORY/report.html from whatever runs are there, finished or not, and return its path."""
    page = render(read_records(directory))
    path = directory / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def write_figures(directory: Path, folder: Path) -> list[Path]:
    """Write every figure of the report of `directory` into `folder`, as SVG and as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for panel in compare(read_records(directory)):
        for axis, (short, _) in enumerate(_AXES):
            for suffix in ("svg", "png"):
                paths.append(folder / f"{_slug(panel.title)}-{short}.{suffix}")
                figures.save(_figure(panel, axis), paths[-1])
    return paths


def render(records: Records) -> str:
    """The page as text; every label, path and message in it is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plus_minus": _plus_minus, "paired": _paired, "number": _number, "ratio": _ratio}
    panels = compare(records)
    return environment.get_template("report.html.jinja").render(
        records=records,
        panels=[(panel, _drawings(panel, index), _sentences(panel, records)) for index, panel in enumerate(panels)],
        reach=_reach,
        status=_count_status(records),
        troubles=[(run, run.status(records.metric)) for run in records.runs if _trouble(run, records)],
        labels=list(dict.fromkeys(row.label for panel in panels for row in panel.rows if row.label in panel.configs)),
        contrasts=contrast({panel.title: panel.configs for panel in panels}),
        environments=_environments(records.runs),
        critical=_critical(records),
        palette=list(zip(figures.LIGHT, figures.DARK, strict=True)),
    )


def _figure(panel: Panel, axis: int) -> Figure:
    curves = [curve for row in panel.rows if (curve := row.curve(axis)) is not None]
    base = panel.baseline
    level = None
    if base is not None and base.final is not None and math.isfinite(base.final.mean):
        level = figures.Level(base.final.mean, f"{base.label}, final")
    return figures.draw(curves, _AXES[axis][1], panel.metric.title, level)


def _drawings(panel: Panel, index: int) -> list[tuple[str, Markup]]:
    """A caption and an SVG for each figure."""
    return [
        (
            f"{panel.metric.title.capitalize()} against {long}: {panel.title}",
            # The drawing comes from matplotlib, which escapes labels itself.
            Markup(figures.inline(_figure(panel, axis), f"panel-{index}-{short}")),
        )
        for axis, (short, long) in enumerate(_AXES)
    ]


def _sentences(panel: Panel, records: Records) -> Iterator[str]:
    """What the numbers of a panel say, in words."""
    best, base = panel.best, panel.baseline
    if best is None:
        return
    extreme = "Lowest" if panel.metric.sign > 0 else "Highest"
    yield f"{extreme} final {panel.metric.title}: {best.label}, {_plus_minus(best.final)}."
    if base is None or base.final is None or best is base:
        return
    yield f"{base.label}: {_plus_minus(base.final)}."
    steps = [step for step in best.reached(0).values() if step is not None]
    if steps and len(steps) == len(best.runs):
        last = max(base.runs[0].curve(panel.metric)[0])
        yield f"{best.label} is at {base.label}'s final value after {sum(steps) / len(steps):.0f} of {last} steps."


def _reach(row: Row, axis: int) -> tuple[str, str]:
    """Mean over seeds of where the baseline's final value is reached; where not by all, a note on how many."""
    found = row.reached(axis)
    hits = [value for value in found.values() if value is not None]
    if not hits:
        return ("never" if found else _NONE), ""
    mean = sum(hits) / len(hits)
    return f"{mean:.{axis}f}", "" if len(hits) == len(found) else f"{len(hits)} of {len(found)} seeds"


def _plus_minus(summary: Summary | None) -> str:
    if summary is None:
        return _NONE
    if not math.isfinite(summary.mean):
        return "diverged"
    spread = "" if summary.spread is None else f" \u00b1 {summary.spread:.3f}"
    return f"{summary.mean:.3f}{spread}"


def _paired(difference: Paired | None) -> tuple[str, str]:
    if difference is None:
        return _NONE, ""
    test = "" if difference.t is None else f"t = {difference.t:.1f}, p = {difference.p:.2g}"
    return f"{difference.mean:+.3f}".replace("-", _MINUS), test.replace("= -", f"= {_MINUS}")


def _number(value: float | None, digits: int = 1) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _ratio(value: float | None, base: float | None) -> str:
    return "" if not value or not base else f"{value / base:.2f}\u00d7"


def _count_status(records: Records) -> dict[Status, int]:
    counts: dict[Status, int] = {}
    for run in records.runs:
        status = run.status(records.metric)
        counts[status] = counts.get(status, 0) + 1
    return counts


def _trouble(run: Run, records: Records) -> bool:
    return run.status(records.metric) not in ("complete", "missing")


def _environments(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Every value of every field of the runs' environments, by field; one value a field where all ran alike."""
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
    """A pair count to warn with: |t| needed at this number of seeds."""
    seeds = len({run.seed for run in records.runs})
    return Paired(seeds, 0.0, None, None) if seeds > 1 else None


def _slug(title: str) -> str:
    return re.sub(r"[^\w.]+", "-", title).strip("-") or "figure"
