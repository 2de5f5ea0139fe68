"""Digits of columns: as many as small numbers need, and three decimals for all others."""

import math

import pytest

from eigengraft.experiments.cli.console import format_loss
from eigengraft.experiments.reports.number_format import number_format


@pytest.mark.parametrize(
    ("values", "spreads", "expected"),
    [
        ([2.25, 0.9], [0.35, 0.14], ".3f"),
        ([0.512, 100.0], [0.0006, 0.02], ".3f"),  # the spread is printed as 0.001
        ([0.512, 100.0], [0.0004, 0.02], ".5f"),
        ([0.6], [0.1, 9.999999999998899e-05], ".5f"),  # 1e-4 but for rounding
        ([0.024, 0.03], [2e-4, 1e-3], ".5f"),
        ([3e-4], [], ".6f"),  # three digits
        ([3e-4, 2.0], [2e-5, 0.1], ".6f"),
        ([0.0012, 0.0008], [], ".6f"),
        ([0.5], [4e-6], ".6f"),  # one digit is enough beside 0.500000
        ([3e-5], [], ".2e"),
        ([3e-7, 2.0], [2e-8, 0.1], ".2e"),
        ([0.5, 0.5], [0.0, 1e-17], ".3f"),  # equal, but for rounding
        ([0.0, math.inf, math.nan], [math.nan], ".3f"),
        ([], [], ".3f"),
    ],
)
def test_a_column_has_the_digits_that_its_smallest_numbers_need(values, spreads, expected):
    assert number_format(values, [(spread, values[0]) for spread in spreads]) == expected


def test_single_losses_as_the_console_prints_them():
    assert [format_loss(loss) for loss in (2.25, 0.0123, 3e-4, 3e-5)] == ["2.250", "0.012", "0.000300", "3.00e-05"]
    assert [format_loss(loss, 4) for loss in (2.25, 0.0012, 3e-4, math.inf)] == ["2.2500", "0.0012", "0.000300", "inf"]
