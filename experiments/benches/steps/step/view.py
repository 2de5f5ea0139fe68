"""Table, figure and advice of the bench of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...common.results import FigurePanel, Line, ResultTable
from ...common.tables import groups, milli
from .rows import StepRow

_COLUMNS = (
    "set",
    "interval",
    "candidate",
    "ms a step",
    "host",
    "steady",
    "refreshes",
    "largest / median",
    "state B/p",
    "peak B/p",
    "operators",
    "kernels",
    "build s",
    "times floor",
    "/ best other",
)
_OWN = "recipe"


def step_summary(rows: Sequence[StepRow]) -> ResultTable:
    """One line for each row; the last column is the time over that of the fastest peer of the same maths."""
    lines = [_line(row, best_other(row, rows)) for row in rows]
    return ResultTable("steps of all candidates in turn, amortised over an interval", _COLUMNS, tuple(lines))


def _line(row: StepRow, ratio: float | None) -> tuple[str, ...]:
    head = (row.set, str(row.interval), row.candidate)
    if row.problem:
        return (*head, row.problem, *[""] * (len(_COLUMNS) - 4))
    return (
        *head,
        milli(row.amortised),
        milli(row.host),
        milli(row.steady),
        milli(row.refresh),
        f"{row.largest / row.median:.2f}",
        f"{row.state:.1f}",
        "" if row.peak is None else f"{row.peak:.1f}",
        "" if row.operators is None else str(row.operators),
        "" if row.kernels is None else str(row.kernels),
        f"{row.build:.2f}",
        "" if row.times_floor is None else f"{row.times_floor:.2f}",
        "" if ratio is None else f"{ratio:.2f}",
    )


def is_own(row: StepRow) -> bool:
    """Whether the candidate is a recipe of this library."""
    return bool(row.declaration.get(_OWN))


def best_other(row: StepRow, rows: Sequence[StepRow]) -> float | None:
    """The time of a recipe over that of the fastest peer of the same maths on the same set; None: there is none."""
    others = [
        other.amortised
        for other in rows
        if not is_own(other)
        and not other.problem
        and (other.set, other.interval, other.maths) == (row.set, row.interval, row.maths)
    ]
    return row.amortised / min(others) if others and is_own(row) and not row.problem else None


def step_panels(rows: Sequence[StepRow]) -> tuple[FigurePanel, FigurePanel]:
    """Time over the number of parameters, with the floor of recipes as lines; and evenness against bytes."""
    good = [row for row in rows if not row.problem]
    lines, spread = [], []
    for style, (label, own) in enumerate(groups(good, lambda row: row.candidate)):
        ordered = sorted(own, key=lambda row: row.numbers)
        lines.append(Line(label, style, [r.numbers for r in ordered], [r.amortised for r in ordered]))
        spread.append(Line(label, style, [r.state for r in ordered], [r.largest / r.median for r in ordered]))
        floors = [(row.numbers, row.floor) for row in ordered if row.floor]
        if floors:
            lines.append(Line(f"floor of {label}", style, [x for x, _ in floors], [y for _, y in floors]))
    return (
        FigurePanel(tuple(lines), "numbers in parameters", "milliseconds a step"),
        FigurePanel(tuple(spread), "bytes of state a parameter", "largest step over the median", (1.0, 1.3)),
    )


def step_advice(rows: Sequence[StepRow]) -> list[str]:
    """The fastest candidate of each maths on each set, and how times grow where a dimension was varied."""
    lines = []
    for (name, interval, maths), own in groups(
        [row for row in rows if not row.problem], lambda row: (row.set, row.interval, row.maths)
    ):
        first, *others = sorted(own, key=lambda row: row.amortised)
        if others:
            after = f"{others[0].candidate} {others[0].amortised / first.amortised:.2f} times the time"
            lines.append(
                f"{name}, {maths}, interval {interval}: {first.candidate}, {milli(first.amortised)} ms; {after}"
            )
    return [
        *lines,
        *(f"{label}: milliseconds ~ numbers^{slope:.2f} over {name}" for label, name, slope in slopes(rows)),
    ]


def slopes(rows: Sequence[StepRow]) -> list[tuple[str, str, float]]:
    """(candidate, varied dimension as gpt:layers, exponent of the time in the number of parameters), least squares."""
    found = []
    varied = [row for row in rows if ":" in row.set and not row.problem]
    for (label, name, _), own in groups(varied, lambda r: (r.candidate, r.set.partition("=")[0], r.interval)):
        if len({row.numbers for row in own}) > 1:
            found.append((label, name, slope([row.numbers for row in own], [row.amortised for row in own])))
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope of log y over log x."""
    u, v = [math.log(value) for value in x], [math.log(value) for value in y]
    a, b = sum(u) / len(u), sum(v) / len(v)
    return sum((p - a) * (q - b) for p, q in zip(u, v, strict=True)) / sum((p - a) ** 2 for p in u)
