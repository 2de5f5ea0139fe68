"""Digits of columns: as many as small numbers need, and three decimals for all others."""

import math

import pytest

from eigengraft.experiments.cli.console import format_loss
from eigengraft.experiments.reports.number_format import NumberFormat, number_format


@pytest.mark.parametrize(
    ("values", "spreads", "expected"),
    [
        ([2.25, 0.9], [0.35, 0.14], NumberFormat(3)),
        ([0.512, 100.0], [0.0006, 0.02], NumberFormat(3)),  # the spread is printed as 0.001
        ([0.512, 100.0], [0.0004, 0.02], NumberFormat(5)),
        ([0.6], [0.1, 9.999999999998899e-05], NumberFormat(5)),  # 1e-4 but for rounding
        ([0.024, 0.03], [2e-4, 1e-3], NumberFormat(5)),
        ([3e-4], [], NumberFormat(6)),  # three digits
        ([3e-4, 2.0], [2e-5, 0.1], NumberFormat(6)),
        ([0.0012, 0.0008], [], NumberFormat(6)),
        ([0.5], [4e-6], NumberFormat(6)),  # one digit is enough beside 0.500000
        ([3e-5], [], NumberFormat(2, "e")),
        ([3e-7, 2.0], [2e-8, 0.1], NumberFormat(2, "e")),
        ([0.5, 0.5], [0.0, 1e-17], NumberFormat(3)),  # equal, but for rounding
        ([0.0, math.inf, math.nan], [math.nan], NumberFormat(3)),
        ([], [], NumberFormat(3)),
    ],
)
def test_a_column_has_the_digits_that_its_smallest_numbers_need(values, spreads, expected):
    assert number_format(values, [(spread, values[0]) for spread in spreads]) == expected


def test_single_losses_as_the_console_prints_them():
    assert [format_loss(loss) for loss in (2.25, 0.0123, 3e-4, 3e-5)] == ["2.250", "0.012", "0.000300", "3.00e-05"]
    assert [format_loss(loss, 4) for loss in (2.25, 0.0012, 3e-4, math.inf)] == ["2.2500", "0.0012", "0.000300", "inf"]
