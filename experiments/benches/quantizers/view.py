"""Table, figure and advice of the bench of quantizers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median

from ..common.results import FigurePanel, Line, ResultTable
from ..common.tables import fastest, groups, milli, points, scientific, unique
from .rows import QuantizerRow

_COLUMNS = (
    "quantizer", "size", "dtype", "stored", "bytes", "error", "angle", "largest", "not orthogonal",
    "off diagonal", "least", "root: median", "worst", "at", "encode ms", "decode ms",
)  # fmt: skip


_WIDTHS = {"float32": 4, "float64": 8}


def quantizer_summary(rows: Sequence[QuantizerRow]) -> ResultTable:
    """One line for each quantizer, size and dtype: the worst over all spectra, median times."""
    lines = []
    for (candidate, size, dtype), some in groups(rows, lambda row: (row.candidate, row.size, row.dtype)):
        bad = max(some, key=_fault)
        lines.append(
            (
                candidate,
                str(size),
                dtype,
                some[0].role,
                f"{some[0].bytes:.3g}",
                scientific(max(_or_infinite(row.error) for row in some)),
                f"{max(_or_infinite(row.angle) for row in some):.2g}°",
                scientific(max(_or_infinite(row.largest) for row in some)),
                scientific(max(_or_infinite(row.orthogonality) for row in some)),
                scientific(max(_or_infinite(row.off_diagonal) for row in some)),
                scientific(-max(_or_infinite(-row.smallest) for row in some)),
                scientific(median(map(_fault, some))),
                scientific(_fault(bad)),
                bad.spectrum,
                _cost([row.encode_ms for row in some], [row.encode_speed for row in some]),
                _cost([row.decode_ms for row in some], [row.decode_speed for row in some]),
            )
        )
    title = "stored factors: the worst over spectra; in brackets bytes moved per second, in percent of those of a copy"
    return ResultTable(title, _COLUMNS, tuple(lines))


def quantizer_panels(
    rows: Sequence[QuantizerRow], swept: Collection[str], threshold: float
) -> tuple[FigurePanel, FigurePanel]:
    """Error of the root against bytes, from median to worst over spectra, and against condition; the largest size."""
    first = rows[0] if rows else None
    largest = max((row.size for row in rows), default=0)
    rows = [row for row in rows if first and row.size == largest and row.dtype == first.dtype]
    price, accuracy = [], []
    for style, candidate in enumerate(unique(row.candidate for row in rows)):
        own = [row for row in rows if row.candidate == candidate]
        errors = [_fault(row) for row in own]
        price.append(Line(candidate, style, [own[0].bytes] * 2, [median(errors), max(errors)]))
        sweep = ((row.condition, _fault(row)) for row in own if row.spectrum in swept)
        accuracy.append(points(candidate, style, sweep))
    root = f"error of $A^{{-{first.exponent}}}$" if first else ""
    where, level = f"d = {largest}, {first.dtype if first else ''}", (threshold, threshold)
    return (
        FigurePanel(tuple(price), f"bytes per entry ({where})", f"{root}, median and worst over spectra", level),
        FigurePanel(tuple(accuracy), f"condition number ({where})", root, level),
    )


def quantizer_advice(rows: Sequence[QuantizerRow], threshold: float) -> list[str]:
    """For each size and dtype the fewest bytes whose root is right, and the fastest; on recorded factors and on all."""
    lines = []
    for (size, dtype, exponent), some in groups(rows, lambda row: (row.size, row.dtype, row.exponent)):
        real = [row for row in some if row.spectrum == "recorded"]
        problems = {"all spectra": some}
        if real and len(real) < len(some):
            problems = {"recorded factors": real, **problems}
        for name, those in problems.items():
            where = f"A^(-{exponent}), {size} x {size}, {dtype}, {name}"
            by_candidate = groups(those, lambda row: row.candidate)
            errors = {candidate: max(map(_fault, own)) for candidate, own in by_candidate}
            times = {candidate: median(row.encode_ms + row.decode_ms for row in own) for candidate, own in by_candidate}
            sizes = {candidate: own[0].bytes for candidate, own in by_candidate}
            lines.append(fewest(where, sizes, errors, threshold))
            saving = {candidate: ms for candidate, ms in times.items() if sizes[candidate] < _WIDTHS[dtype]}
            if any(errors[candidate] <= threshold for candidate in saving):
                lines.append(fastest(f"{where}, fastest that saves bytes", saving, errors, threshold, "root error"))
    return lines


def fewest(where: str, sizes: Mapping[str, float], errors: Mapping[str, float], threshold: float) -> str:
    """One line of advice: the candidate of fewest bytes whose error stays below the threshold, and the next one."""
    good = sorted(
        (sizes[candidate], errors[candidate], candidate) for candidate in sizes if errors[candidate] <= threshold
    )
    if not good:
        best = min(errors, key=lambda candidate: errors[candidate])
        if not math.isfinite(errors[best]):
            return f"{where}: none gives a usable result on every problem"
        return f"{where}: none stays below the root error {threshold:g}; the best is {best} ({errors[best]:.2g})"
    size, error, candidate = good[0]
    line = f"{where}: {candidate}, {size:.3g} bytes per entry, worst root error {error:.2g}"
    if len(good) > 1:
        line += f"; then {good[1][2]}, {good[1][0]:.3g} bytes, {good[1][1]:.2g}"
    return line


def _cost(ms: Sequence[float], speeds: Sequence[float]) -> str:
    return f"{milli(median(ms))} ({100 * median(speeds):.0f} %)"


def _fault(row: QuantizerRow) -> float:
    """The error of the root where all matrices came back, infinity elsewhere."""
    return _or_infinite(row.root_error) if row.ok == 1 else math.inf


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
