"""The tables of a report: its runs as CSV and Parquet, its panels in Markdown and LaTeX."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eigengraft.errors import RecipeError

from ..files import replacing, write_text
from .comparison import ComparisonPanel, ComparisonRow, compare
from .formatting import format_difference, format_length, format_number, format_rate, format_summary
from .records import Records, learning_rate
from .run import Run
from .sweep import at_their_best, swept

_COLUMNS = ("val_loss", "val_accuracy", "steps", "seconds", "step_ms", "optimizer_ms", "state_bytes_per_parameter")
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\u2212": "$-$",
    "\u00b1": r"$\pm$",
    "\u2013": "--",
    **{sign: f"\\{sign}" for sign in "&%$#_"},
}


def write_tables(records: Records, folder: Path) -> list[Path]:
    """Write tables.md and tables.tex, one table for each panel that has begun; LaTeX needs the package booktabs."""
    panels = [panel for panel in [*at_their_best(swept(records)), *compare(records)] if panel.begun]
    written = {"tables.md": markdown, "tables.tex": latex}
    for name, form in written.items():
        write_text(folder / name, "\n\n".join(form(panel, records) for panel in panels) + "\n")
    return [folder / name for name in written]


def markdown(panel: ComparisonPanel, records: Records) -> str:
    """One panel as a table of GitHub's Markdown, its title above."""
    lines = [_row(cells) for cells in cells_of(panel, records)]
    lines.insert(1, _row(["---"] * lines[0].count(" | ") + ["---"]))
    return f"**{_plain(_caption(panel, records))}**\n\n" + "\n".join(lines)


def latex(panel: ComparisonPanel, records: Records) -> str:
    """One panel as a table with its caption."""
    head, *body = [" & ".join(map(_escaped, cells)) + r" \\" for cells in cells_of(panel, records)]
    columns = "l" + "r" * head.count(" & ")
    begin = [
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{_escaped(_caption(panel, records))}}}",
        f"\\begin{{tabular}}{{{columns}}}",
    ]
    return "\n".join([*begin, "\\toprule", head, "\\midrule", *body, "\\bottomrule", "\\end{tabular}", "\\end{table}"])


def cells_of(panel: ComparisonPanel, records: Records) -> Iterator[list[str]]:
    """The head and the rows of a panel's table."""
    base = panel.baseline
    p = "p (Holm)" if len(panel.corrected) > 1 else "p"
    differences = ["seeds", f"minus {base.title} [95 % interval]", p] if base else ["seeds"]
    costs = [f"steps to {records.target.value:g}"] if records.target else []
    costs += ["steps", "seconds"] if records.equal == "seconds" else []
    costs += ["step, ms", "state, bytes per parameter"]
    yield [records.compare, "learning rate", f"final {panel.metric.title}", *differences, *costs]
    for row in panel.rows:
        edge = records.rate_edge(row.runs[0].labels) if row.runs else ""
        rate = format_rate(learning_rate(panel.configs.get(row.label, {})), edge)
        shown = format_summary(row.final) + (f" ({row.diverged} of {len(row.runs)} diverged)" if row.diverged else "")
        middle = [str(len(row.finals)), *_difference(row, panel)] if base else [str(len(row.finals))]
        numbers = [str(row.first(records.target) or "never")] if records.target else []
        if records.equal == "seconds":
            numbers += format_length(row)
        numbers += [format_number(row.mean("step_ms")), format_number(row.mean("state_bytes_per_parameter"))]
        yield [row.title, rate, shown, *middle, *numbers]


def _caption(panel: ComparisonPanel, records: Records) -> str:
    return panel.title if panel.title == records.name else f"{records.name}: {panel.title}"


def _difference(row: ComparisonRow, panel: ComparisonPanel) -> list[str]:
    if row.baseline is None:
        return ["", ""]
    p = panel.corrected.get(row.label)
    return [format_difference(row, panel)[0], "" if p is None else f"{p:.2g}"]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_plain, cells))} |"


def _plain(text: str) -> str:
    return re.sub(r"([|*_<>`\\])", r"\\\1", text)


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


def write_runs_csv(records: Records, path: Path) -> None:
    """Write a row for each run (see `run_row`), numbers to six digits; numbers that a run lacks are empty."""
    rows = [run_row(run, records) for run in records.runs]
    columns = _columns(rows)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)


def write_parquet(records: Records, folder: Path) -> list[Path]:
    """Write runs.parquet, a row for each run as in runs.csv, and metrics.parquet, a row for each logged step of each.

    Labels, seed and status are columns of both; numbers are not rounded, and null where a run lacks them. Raises
    RecipeError where pyarrow is not installed.
    """
    try:
        from pyarrow import Table
        from pyarrow.parquet import write_table
    except ImportError:
        raise RecipeError("--parquet: pyarrow is required (pip install eigengraft[parquet]), got none") from None
    runs, metrics, written = [], [], []
    for run in records.runs:
        runs.append(run_row(run, records))
        metrics += [{**_identity(run, records), **row} for row in run.rows]
    for name, rows in (("runs", runs), ("metrics", metrics)):
        written.append(folder / f"{name}.parquet")
        table = Table.from_pydict({column: [row.get(column) for row in rows] for column in _columns(rows)})
        with replacing(written[-1]) as temporary:
            write_table(table, temporary)
    return written


def run_row(run: Run, records: Records) -> dict[str, Any]:
    """Everything that tables say of a run, by column.

    Labels are in columns `axis.NAME` and values that a search found in `tuned.PATH`: an axis may have the name of a
    measured number, as `lr` or `steps`, and neither replaces the other. `peak_lr` is the learning rate in force.
    """
    values = records.tuned_values(run.labels)
    tuned = {f"tuned.{path}": values.get(path) for one in records.tuned for path in one.values}
    numbers = {column: run.result.get(column) for column in _COLUMNS}
    return {**_identity(run, records), "peak_lr": learning_rate(run.config), **tuned, **numbers}


def _identity(run: Run, records: Records) -> dict[str, Any]:
    """Labels by axis, seed and status of a run, and its variant where runs of one cell differ."""
    axes = dict.fromkeys(axis for one in records.runs for axis in one.labels)
    apart = {"variant": run.variant} if any(one.variant for one in records.runs) else {}
    labels = {f"axis.{axis}": run.labels.get(axis) for axis in axes}
    return {**labels, "seed": run.seed, **apart, "status": run.status(records.metric)}


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
