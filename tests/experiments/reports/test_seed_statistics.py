"""Statistics over seeds against numbers worked out by hand."""

import math

import numpy as np
import pytest

from eigengraft.experiments.reports.seed_statistics import (
    bootstrap_interval,
    holm,
    paired,
    reaches,
    significant_t,
    summarize,
)


def test_mean_and_sample_standard_deviation():
    summary = summarize([1.0, 3.0, 8.0])  # mean 4, squares 9 + 1 + 16 = 26, over 2: 13
    assert summary is not None
    assert (summary.n, summary.mean) == (3, 4.0)
    assert summary.spread == pytest.approx(math.sqrt(13), rel=1e-15)


def test_one_value_has_no_spread_and_none_no_summary():
    summary = summarize([2.5])
    assert summary is not None and (summary.mean, summary.spread) == (2.5, None)
    assert summarize([]) is None


def test_a_diverged_seed_makes_the_mean_infinite_and_the_spread_unknown():
    summary = summarize([1.0, math.inf])
    assert summary is not None and (summary.mean, summary.spread) == (math.inf, None)


@pytest.mark.slow
def test_paired_two_seeds():
    # d = -1, -3: mean -2, spread sqrt(2), t = -2; with one degree of freedom p = 1 - 2/pi atan(|t|)
    result = paired({0: 4.0, 1: 5.0, 9: 0.0}, {1: 8.0, 0: 5.0, 7: 1.0})
    assert result is not None and (result.n, result.mean) == (2, -2.0)
    assert result.t == pytest.approx(-2.0)
    assert result.p == pytest.approx(1 - 2 / math.pi * math.atan(2.0), rel=1e-12)
    assert significant_t(2) == pytest.approx(math.tan(0.95 * math.pi / 2), rel=1e-9)


def test_paired_three_seeds():
    # d = 1, 2, 3: mean 2, spread 1, t = 2 sqrt(3); with two degrees of freedom p = 1 - t / sqrt(t^2 + 2)
    result = paired({0: 2.0, 1: 4.0, 2: 6.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert result is not None
    assert result.t == pytest.approx(2 * math.sqrt(3))
    assert result.p == pytest.approx(1 - math.sqrt(12) / math.sqrt(14), rel=1e-12)


@pytest.mark.parametrize("values", [{0: 2.0}, {0: 2.0, 1: 3.0}], ids=["one pair", "no spread"])
def test_paired_without_a_test(values):
    result = paired(values, {0: 1.0, 1: 2.0})
    assert result is not None and (result.mean, result.t, result.p) == (1.0, None, None)


def test_paired_without_common_seeds():
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_reaches_interpolates_between_evaluations():
    assert reaches([0, 10, 20], [4.0, 3.0, 1.0], 2.0) == pytest.approx(15.0)
    assert reaches([0, 10, 20], [4.0, 3.0, 1.0], 3.0) == 10
    assert reaches([0, 10], [4.0, 3.0], 2.9) is None
    assert reaches([5, 10], [4.0, 3.0], 4.5) == 5


def test_reaches_takes_the_first_crossing_and_skips_what_is_not_finite():
    assert reaches([0, 10, 20, 30], [4.0, math.nan, 2.0, 5.0], 3.0) == pytest.approx(10.0)


def test_holm_multiplies_the_smallest_p_most_and_keeps_the_order():
    # sorted .01, .02, .03, .5: 4 * .01 = .04, 3 * .02 = .06, 2 * .03 = .06 and 1 * .5
    corrected = holm({"b": 0.03, "a": 0.01, "d": 0.5, "c": 0.02})
    assert corrected == pytest.approx({"a": 0.04, "c": 0.06, "b": 0.06, "d": 0.5})
    assert holm({"a": 0.4, "b": 0.6}) == pytest.approx({"a": 0.8, "b": 0.8})  # no p is below a smaller one's
    assert holm({"a": 0.2}) == {"a": 0.2} and holm({}) == {} and holm({"a": 0.9, "b": 0.9}) == {"a": 1.0, "b": 1.0}


def test_the_interval_of_a_difference_ends_at_zero_where_p_is_one_in_twenty():
    # d = -1, -3: standard error 1, one degree of freedom, whose quantile at 0.975 is tan(0.475 pi)
    result = paired({0: 4.0, 1: 5.0}, {0: 5.0, 1: 8.0})
    assert result is not None and result.half == pytest.approx(math.tan(0.475 * math.pi), rel=1e-9)
    assert paired({0: 1.0}, {0: 2.0}).half is None


@pytest.mark.slow
def test_the_bootstrap_interval_is_that_of_the_definition():
    """Quantiles Phi(z0 + (z0 + z) / (1 - a (z0 + z))), z = -+1.96, of the means of draws (Efron 1987, section 2)."""
    special = pytest.importorskip("scipy.special")
    own = np.random.default_rng(7).exponential(size=9) - 0.2
    means = own[np.random.default_rng(0).integers(0, 9, (10_000, 9))].mean(axis=1)
    bias = special.ndtri(((means < own.mean()).mean() + (means <= own.mean()).mean()) / 2)
    left = own - own.mean()
    acceleration = (left**3).sum() / (6 * (left**2).sum() ** 1.5)
    moved = bias + special.ndtri(np.array([0.025, 0.975]))
    expected = np.quantile(means, special.ndtr(bias + moved / (1 - acceleration * moved)))
    assert bootstrap_interval(list(own)) == pytest.approx(tuple(expected), rel=1e-9)


def test_few_pairs_and_equal_differences_have_no_bootstrap_interval():
    eight = {seed: seed**2 / 10 for seed in range(8)}
    assert paired(eight, dict.fromkeys(range(8), 1.0)).bootstrap == bootstrap_interval([v - 1 for v in eight.values()])
    assert paired(eight, dict.fromkeys(range(7), 1.0)).bootstrap is None
    assert paired(dict.fromkeys(range(8), 2.0), dict.fromkeys(range(8), 1.0)).bootstrap is None
