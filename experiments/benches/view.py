"""The table, the figure and the recommendations of a bench, computed from its rows and its declarations."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

Row = dict[str, Any]
"""One measurement. `Bench.row` describes the keys that every row has."""
BenchRows = Sequence[Row]
CellText = Callable[[BenchRows], str]
"""Function from the rows of one line of a table to the text of one cell."""
LinePoints = Callable[[BenchRows], Iterable[tuple[float, float]]]
"""Function from the rows of one candidate to the points (x, y) of one line of a figure."""
Reduced = Callable[[BenchRows], float]
"""Function from rows to a number, such as the median of a column."""
K = TypeVar("K", bound=Hashable)


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
    lines: name -> function that returns the points of a line. For each candidate a line is drawn, and "{}" in the name
        stands for the candidate.
    keep: function that returns True for rows that are drawn.
    same: fields whose value in the first row selects the rows that are drawn. The panel's title shows this value.
    largest: fields whose largest value selects the rows that are drawn. The panel's title shows this value.
    band: interval to compare with, drawn as a band, or as a line if both ends are equal; None: not drawn.
    """

    x: str
    y: str
    lines: Mapping[str, LinePoints]
    keep: Callable[[Row], bool] = bool
    same: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    band: tuple[float, float] | None = None


@dataclass(frozen=True)
class Line:
    """Points of one line. `style` selects color, dashes and marker, which are the same in both panels."""

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]


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
    cost: Reduced
    cost_text: Callable[[float], str]
    costs: str = "time"
    error: Reduced | None = None
    error_name: str = "error"
    threshold: float = math.inf
    keep: Callable[[Row], bool] = bool


def groups(rows: Iterable[Row], key: Callable[[Row], K]) -> list[tuple[K, list[Row]]]:
    """Return rows grouped by equal keys, as (key, rows), in the order in which the keys first appear."""
    found: dict[K, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.items())


def measured_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in which something was measured."""
    return [row for row in rows if not row["problem"]]


def lay_out(table: Table, rows: BenchRows) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and the lines of a table. If a row was not measured, a last column has the reasons."""
    headings, lines = (*table.by, *table.cells), []
    problems = any(row["problem"] for row in rows)
    for key, own in groups(rows, lambda row: tuple(row.get(field) for field in table.by.values())):
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
    candidates, found = groups(rows, lambda row: row["candidate"]), []
    for shift, (name, points) in enumerate(panel.lines.items()):
        for style, (candidate, own) in enumerate(candidates):
            pairs = list(points(own))
            if pairs:
                style_of_line = style + shift * len(candidates)
                found.append(Line(name.format(candidate), style_of_line, [x for x, _ in pairs], [y for _, y in pairs]))
    return ", ".join(fixed), found


def recommend(recommendations: Iterable[Recommendation], rows: BenchRows) -> list[str]:
    """Return the text of each recommendation, one line for each problem."""
    lines = []
    for one in recommendations:
        for where, own in groups((row for row in measured_rows(rows) if one.keep(row)), one.where):
            by_candidate = groups(own, lambda row: row["candidate"])
            costs = {name: one.cost(some) for name, some in by_candidate}
            errors = {name: one.error(some) if one.error else 0.0 for name, some in by_candidate}
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


def number_of(row: Row, name: str) -> float:
    """Return a number of a row; NaN if the row does not have it."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def worst(name: str, *shares: str) -> Reduced:
    """Return a function that computes the largest value of a column.

    The result is infinite if a value of the column is not finite, or if a share in one of the columns `shares`, such as
    that of solved matrices, is below 1.
    """

    def value(row: Row) -> float:
        return _or_infinite(number_of(row, name)) if all(row[share] == 1 for share in shares) else math.inf

    return lambda rows: max(map(value, rows))


def typical(name: str) -> Reduced:
    """Return a function that computes the median of a column. Values that are not finite count as infinite."""
    return lambda rows: median(_or_infinite(number_of(row, name)) for row in rows)


def largest(name: str) -> Reduced:
    """Return a function that computes the largest finite value of a column; NaN if there is none."""
    return lambda rows: max((x for row in rows if math.isfinite(x := number_of(row, name))), default=math.nan)


def least(name: str) -> Reduced:
    """Return a function that computes the least finite value of a column; NaN if there is none."""
    return lambda rows: min((x for row in rows if math.isfinite(x := number_of(row, name))), default=math.nan)


def cell(value: Callable[[BenchRows], Any], form: Callable[[Any], str]) -> CellText:
    """Return a function from rows to the text `form(value(rows))`."""
    return lambda rows: form(value(rows))


def first(name: str, form: Callable[[Any], str] = str) -> CellText:
    """Return a function from rows to the text of a column's first value; "" if the value is None."""
    return lambda rows: "" if rows[0].get(name) is None else form(rows[0][name])


def at_worst(name: str, where: Callable[[Row], Any]) -> CellText:
    """Return a function from rows to `where(row)` as text, for the row with the largest value of a column."""
    return lambda rows: str(where(max(rows, key=lambda row: _or_infinite(number_of(row, name)))))


def only(keep: Callable[[Row], bool], text: CellText) -> CellText:
    """Return a function that applies `text` to the rows that `keep` selects, or to all rows if it selects none."""
    return lambda rows: text([row for row in rows if keep(row)] or list(rows))


def xy(x: str, y: str) -> LinePoints:
    """Return a function from rows to their points (x, y), sorted by x. Rows without y have none."""
    return lambda rows: sorted((row[x], row[y]) for row in rows if row[y] is not None)


def per(field: Callable[[Row], Hashable], x: Reduced, y: Reduced) -> LinePoints:
    """Return a function that groups rows by the value of a field, and computes one point (x, y) from each group."""
    return lambda rows: [(x(some), y(some)) for _, some in groups(rows, field)]


def milli(value: float) -> str:
    """Format milliseconds with three digits."""
    return f"{value:.3g}" if value >= 0.01 else f"{value:.4f}"


def in_ms(value: float) -> str:
    """Format milliseconds with three digits and the unit."""
    return f"{milli(value)} ms"


def finite(form: str) -> Callable[[float], str]:
    """Return a function that formats a number, and returns a dash for a number that is not finite."""
    return lambda value: form.format(value) if math.isfinite(value) else "-"


scientific, degrees = finite("{:.1e}"), finite("{:.2g}°")


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
