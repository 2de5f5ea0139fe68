"""Grouping, number formats and advice that the tables and figures of all benches share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from .results import Line

R = TypeVar("R")
K = TypeVar("K", bound=Hashable)


def groups(rows: Iterable[R], key: Callable[[R], K]) -> list[tuple[K, list[R]]]:
    """Rows with equal keys together, in the order in which the keys first appear."""
    found: dict[K, list[R]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.items())


def unique(values: Iterable[K]) -> list[K]:
    """Each value once, in order."""
    return list(dict.fromkeys(values))


def points(label: str, style: int, pairs: Iterable[tuple[float, float]]) -> Line:
    """A line through the pairs in the order of x."""
    ordered = sorted(pairs)
    return Line(label, style, [x for x, _ in ordered], [y for _, y in ordered])


def fastest(
    where: str, times: Mapping[str, float], errors: Mapping[str, float], threshold: float, what: str = "error"
) -> str:
    """One line of advice: the fastest candidate whose error stays below the threshold, and the next one."""
    good = sorted((times[candidate], candidate) for candidate in times if errors[candidate] <= threshold)
    if not good:
        best = min(errors, key=lambda candidate: errors[candidate])
        if not math.isfinite(errors[best]):
            return f"{where}: none gives a usable result on every problem"
        return f"{where}: none stays below the {what} {threshold:g}; the most accurate is {best} ({errors[best]:.2g})"
    ms, candidate = good[0]
    line = f"{where}: {candidate}, {milli(ms)} ms, worst {what} {errors[candidate]:.2g}"
    if len(good) > 1:
        line += f"; then {good[1][1]}, {good[1][0] / ms:.1f} times the time"
    left_out = len(times) - len(good)
    return line + (f" ({left_out} of {len(times)} above the {what} {threshold:g})" if left_out else "")


def milli(value: float) -> str:
    """Milliseconds with three digits."""
    return f"{value:.3g}" if value >= 0.01 else f"{value:.4f}"


def scientific(value: float) -> str:
    """Two digits and an exponent; a dash where there is no number."""
    return f"{value:.1e}" if math.isfinite(value) else "-"


def span(values: Sequence[int]) -> str:
    """`low-high`, or the one value."""
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}-{max(values)}"
