"""The table, the lines of the figure and the recommendations of a bench, computed from the rows of its results.

A row is one measurement. A bench describes its table, figure and recommendations by `Table`, `Panel` and
`Recommendation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from ..reports.records import group_by

Row = dict[str, Any]
"""One measurement. `Bench.row` describes the keys that every row has."""
BenchRows = Sequence[Row]
CellText = Callable[[BenchRows], str]
"""Function from the rows of one line of a table to the text of one cell."""
LinePoints = Callable[[BenchRows], Iterable[tuple[float, float]]]
"""Function from the rows of one candidate to the points (x, y) of one line of a figure."""
Reduced = Callable[[BenchRows], float]
"""Function from rows to a number, such as the median of a column."""
Selection = Callable[[BenchRows], BenchRows]
"""Function from the rows of one line of a table to those rows from which the text of a cell is computed."""
How = Literal["median", "worst", "max", "min", "mean"]
"""Name of a reduction of a column to one number. The function `reduction` describes each."""


def number_of(row: Row, name: str) -> float:
    """Return a number of a row; NaN if the row does not have it."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def reduction(column: str, how: How = "median", *shares: str) -> Reduced:
    """Return a function that reduces a column of rows to one number.

    - median, worst: the median and the largest value, where a value that is not finite counts as infinite.
    - max, min: the largest and the least finite value; NaN if there is none.
    - mean: the mean over the rows that have the column; NaN if there is none.

    shares: names of columns with a share between 0 and 1, such as the share of matrices that were solved. If a row has
        a share below 1 in one of them, its value counts as infinite.
    """

    def reduced(rows: BenchRows) -> float:
        if how == "mean":
            present = [row[column] for row in rows if column in row]
            return fmean(present) if present else math.nan
        values = [number_of(row, column) if all(row[share] == 1 for share in shares) else math.inf for row in rows]
        finite = [value for value in values if math.isfinite(value)]
        if how in ("max", "min"):
            return (max if how == "max" else min)(finite, default=math.nan)
        values = finite + [math.inf] * (len(values) - len(finite))
        return median(values) if how == "median" else max(values)

    return reduced


def milli(value: float) -> str:
    """Format milliseconds with three digits; a dash for a number that is not finite."""
    return finite("{:.3g}" if value >= 0.01 else "{:.4f}")(value)


def in_ms(value: float) -> str:
    """Format milliseconds with three digits and the unit."""
    return f"{milli(value)} ms"


def finite(form: str) -> Callable[[float], str]:
    """Return a function that formats a number, and returns a dash for a number that is not finite.

    form: format as for `str.format`, such as "{:.3f}".
    """
    return lambda value: form.format(value) if math.isfinite(value) else "-"


scientific, degrees = finite("{:.1e}"), finite("{:.2g}°")


@dataclass(frozen=True)
class Table:
    """A table with one line for each combination of values of some fields.

    title: text above the table.
    by: heading -> field of rows, for the first columns.
    cells: heading -> function that returns the text of a cell, for all other columns.
    """

    title: str
    by: Mapping[str, str]
    cells: Mapping[str, CellText]


@dataclass(frozen=True)
class Panel:
    """One half of a figure, with two logarithmic axes.

    x, y: labels of the axes.
    lines: name -> function from the rows of one candidate to the points of its line. For each candidate a line is
        drawn, and "{}" in the name stands for the candidate.
    keep: function of a row, True if the row is drawn.
    same: fields such as "dtype". A row is drawn only if its values of these fields are those of the first row. The
        panel's title shows these values.
    largest: fields such as "size". A row is drawn only if its values of these fields are the largest ones. The panel's
        title shows these values.
    band: number or interval to compare with, drawn as a line or a band; None: not drawn.
    """

    x: str
    y: str
    lines: Mapping[str, LinePoints]
    keep: Callable[[Row], bool] = bool
    same: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    band: float | tuple[float, float] | None = None


@dataclass(frozen=True)
class Line:
    """The points of one line in a panel, which is one half of the figure of a bench.

    label: name of the line in the legend.
    style: number that selects color, dashes and marker.
    points: pairs (x, y) in the units of the axes.
    """

    label: str
    style: int
    points: Sequence[tuple[float, float]]


_MILLISECONDS = reduction("milliseconds")


@dataclass(frozen=True)
class Recommendation:
    """A rule that recommends for each problem the cheapest candidate whose error is at most a threshold.

    where: function that returns the text that names the problem of a row. Candidates are compared within one problem.
    cost: function that returns the cost of a candidate, computed from its rows of one problem.
    cost_text: format of a cost.
    costs: noun for the ratio of the next candidate's cost to the least, such as "the time" in "2.0 times the time".
    error: function that returns the error of a candidate, computed from the same rows; None: all candidates are
        accepted.
    error_name: name of the error in the text.
    threshold: largest error that is accepted.
    keep: function that returns True for rows that are considered.
    """

    where: Callable[[Row], str]
    cost: Reduced = _MILLISECONDS
    cost_text: Callable[[float], str] = in_ms
    costs: str = "time"
    error: Reduced | None = None
    error_name: str = "error"
    threshold: float = math.inf
    keep: Callable[[Row], bool] = bool


def measured_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in which something was measured."""
    return [row for row in rows if not row["problem"]]


def lay_out(table: Table, rows: BenchRows) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and the lines of a table.

    If a row was not measured, a last column has the reason. For several such rows of one line, it has the first reason.
    """
    headings, lines = (*table.by, *table.cells), []
    problems = any(row["problem"] for row in rows)
    for key, own in group_by(rows, lambda row: tuple(row.get(field) for field in table.by.values())).items():
        good, reasons = measured_rows(own), [row["problem"] for row in own if row["problem"]]
        cells = [text(good) if good else "" for text in table.cells.values()]
        lines.append((*map(str, key), *cells, *([reasons[0] if reasons else ""] if problems else [])))
    return (*headings, *(["not measured"] if problems else [])), lines


def lines_of(panel: Panel, rows: BenchRows) -> tuple[str, list[Line]]:
    """Return the title and the lines of a panel."""
    rows, fixed = [row for row in measured_rows(rows) if panel.keep(row)], []
    for field in (*panel.same, *panel.largest) if rows else ():
        value = rows[0][field] if field in panel.same else max(row[field] for row in rows)
        rows = [row for row in rows if row[field] == value]
        fixed.append(f"{field} {value}")
    candidates, found = group_by(rows, lambda row: row["candidate"]), []
    for shift, (name, points) in enumerate(panel.lines.items()):
        for style, (candidate, own) in enumerate(candidates.items()):
            if pairs := list(points(own)):
                found.append(Line(name.format(candidate), style + shift * len(candidates), pairs))
    return ", ".join(fixed), found


def recommend(recommendations: Iterable[Recommendation], rows: BenchRows) -> list[str]:
    """Return one line of text for each pair of a rule and a problem: the cheapest candidate that the rule accepts.

    recommendations: the rules.
    rows: measurements of candidates on problems, such as matrices of one size and dtype.
    """
    lines = []
    for one in recommendations:
        for where, own in group_by((row for row in measured_rows(rows) if one.keep(row)), one.where).items():
            by_candidate = group_by(own, lambda row: row["candidate"])
            costs = {name: one.cost(some) for name, some in by_candidate.items()}
            errors = {name: one.error(some) if one.error else 0.0 for name, some in by_candidate.items()}
            lines.append(f"{where}: {_choice(one, costs, errors)}")
    return lines


def _choice(one: Recommendation, costs: Mapping[str, float], errors: Mapping[str, float]) -> str:
    good = sorted((costs[name], errors[name], name) for name in costs if errors[name] <= one.threshold)
    limit = f"{one.error_name} {one.threshold:g}"
    if not good:
        best = min(errors, key=lambda name: errors[name])
        if not math.isfinite(errors[best]):
            return "none gives a usable result on every problem"
        return f"none is at most the {limit}; the most accurate is {best} ({errors[best]:.2g})"
    cost, error, name = good[0]
    line = f"{name}, {one.cost_text(cost)}" + (f", {one.error_name} {error:.2g}" if one.error else "")
    if len(good) > 1:
        line += f"; then {good[1][2]}, {good[1][0] / cost:.2f} times the {one.costs}"
    left_out = len(costs) - len(good)
    return line + (f" ({left_out} of {len(costs)} above the {limit})" if left_out else "")


def cell(
    column: str, how: Literal["first"] | How = "first", form: Callable[[Any], str] = str, of: Selection = list
) -> CellText:
    """Return a function from the rows of one line of a table to the text of one cell.

    column: column of the rows that has the number to show.
    how: "first" for the number of the first row, else the reduction of all rows to one number (see `reduction`).
    form: function that formats the number. If there is no number, the text of the cell is empty.
    of: function that selects the rows to use. If it selects none, the text of the cell is a dash.
    """

    def text(rows: BenchRows) -> str:
        if not (some := of(rows)):
            return "-"
        found = some[0].get(column) if how == "first" else reduction(column, how)(some)
        return "" if found is None else form(found)

    return text


def only(keep: Callable[[Row], bool]) -> Selection:
    """Return a function that selects the rows for which `keep` is true, or all rows if there are none."""
    return lambda rows: [row for row in rows if keep(row)] or rows


def at_worst(column: str) -> Selection:
    """Return a function that selects the row with the largest value of a column."""
    return lambda rows: [max(rows, key=lambda row: reduction(column, "worst")([row]))]


def xy(x: str, y: str) -> LinePoints:
    """Return a function from rows to the points (x, y) of a line, sorted by x. A row in which y is None has no point.

    x, y: columns of the rows that have the coordinates.
    """
    return lambda rows: sorted((row[x], row[y]) for row in rows if row[y] is not None)


def per(field: Callable[[Row], Hashable], x: Reduced, y: Reduced) -> LinePoints:
    """Return a function that groups rows, and computes one point (x, y) from each group.

    field: function from a row to the value that is equal for all rows of a group.
    x, y: functions that compute the coordinates from the rows of a group.
    """
    return lambda rows: [(x(some), y(some)) for some in group_by(rows, field).values()]
