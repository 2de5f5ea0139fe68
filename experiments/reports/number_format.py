"""Choose how many digits the numbers of a column have: three decimals, or more if the column has small numbers.

All numbers of a column have one format, so that they align and can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

_MOST = 6
"""Most decimals of a column. Columns that need more are in scientific notation, which is easier to read from there."""
_ROUNDING = 2.0**-23
"""Relative spread up to which values count as equal: the spacing of float32, in which most losses are computed."""


def number_format(values: Iterable[float], errors: Iterable[tuple[float, float]] = (), decimals: int = 3) -> str:
    """Return the format of all numbers of a column, as an argument of `format` such as ".3f".

    The format has `decimals` decimals, unless a number of the column is too small for them. A value is too small if
    fewer than `decimals` - 1 of its significant digits would be printed. For three decimals, this is a value below
    0.01. An error is too small if it would be printed as zero.

    If a number is too small, the format has enough decimals for two significant digits of every value and error or, if
    there are no errors, for three of every value. It has at most six decimals. If six are too few for a value, or print
    an error as zero, the format is scientific.

    values: means and other numbers of the column. Numbers that are 0 or not finite do not count.
    errors: pairs of an error and the value that it belongs to. Errors are spreads, half-widths of intervals, and
        differences. An error that float32 cannot distinguish from 0 beside its value does not count.
    decimals: decimals of columns without small numbers.
    """
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    counted = [abs(error) for error, value in errors if math.isfinite(error) and abs(error) > _ROUNDING * abs(value)]
    if min(sizes, default=1.0) >= 10.0 ** (1 - decimals) and not any(_is_zero(error, decimals) for error in counted):
        return f".{decimals}f"
    by_values = max((_decimals(size, 2 if counted else 3) for size in sizes), default=0)
    by_errors = max((_decimals(error, 2) for error in counted), default=0)
    if by_values > _MOST or any(_is_zero(error, _MOST) for error in counted):
        return ".2e"
    return f".{min(max(decimals, by_values, by_errors), _MOST)}f"


def _is_zero(size: float, decimals: int) -> bool:
    """Return True if `size`, the absolute value of a number, is printed as zero with this many decimals."""
    return float(f"{size:.{decimals}f}") == 0


def _decimals(size: float, digits: int) -> int:
    """Return the number of decimals with which a positive number `size` is printed with `digits` significant digits."""
    return digits - 1 - int(f"{size:.{digits - 1}e}".partition("e")[2])


def format_loss(loss: float, decimals: int = 3) -> str:
    """Return a loss as text, with `decimals` decimals, or with three significant digits if it is too small for them
    (see `number_format`).
    """
    return format(loss, number_format([loss], decimals=decimals))
