"""Statistics over seeds: means, spreads, paired comparisons, and the first step at which a curve reaches a value.

Tests and intervals are those of `scipy.stats`. It is imported at first use, because this takes half a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from pydantic import Field

from eigengraft.component import Component

BOOTSTRAP_PAIRS = 8
"""Smallest number of pairs for which a bootstrap interval is computed. Intervals of fewer pairs are much too narrow: 3
pairs have only 10 different resamples.
"""
BOOTSTRAP_DRAWS = 10_000
"""Number of resamples of a bootstrap interval."""


@dataclass(frozen=True)
class Summary:
    """Mean and spread of `n` values. The spread is the standard deviation with divisor n - 1, None for one value."""

    n: int
    mean: float
    spread: float | None


@dataclass(frozen=True)
class Paired:
    """Differences d of two results over their `n` common seeds.

    mean: mean difference.
    t: mean(d) sqrt(n) / spread(d), with n - 1 degrees of freedom; None for a single pair, or if all differences are
        equal.
    p: p-value of the two-sided test that the true difference is 0; None where t is None.
    half: half of the width of the 95 % interval, which reaches from mean - half to mean + half; None where t is None.
    bootstrap: the interval of `bootstrap_interval`; None with fewer than `BOOTSTRAP_PAIRS` pairs or where t is None.
    """

    n: int
    mean: float
    t: float | None
    p: float | None
    half: float | None = None
    bootstrap: tuple[float, float] | None = None


class Target(Component):
    """A target value of a metric, reached at the first step with (value - mean) sqrt(n) >= z sigma, for the mean of n
    seeds.

    This is the acceptance test of track 3 of modded-nanogpt, which has sigma 0.0013 and z about 3. The standard
    deviation sigma of one seed is known beforehand, so that few seeds are enough. If larger values of the metric are
    better, the sign of the difference is reversed.
    """

    value: float = Field(examples=[2.2], description="value that the metric has to reach")
    sigma: float = Field(
        gt=0,
        examples=[0.01],
        description="standard deviation of the metric over seeds, at the step where the metric reaches the value",
    )
    z: float = Field(
        default=3.0, ge=0, description="number of standard errors by which the mean must be better than the value"
    )

    def first(self, seeds: Sequence[Mapping[int, float]], sign: int = 1) -> int | None:
        """Return the first step at which the target counts as reached, None if there is none.

        seeds: for each seed, step -> metric. A step that one of the seeds lacks does not count.
        sign: 1 if smaller values are better, -1 if larger values are.
        """
        for step in sorted(set[int]().union(*seeds)):
            mean = math.fsum(sign * own.get(step, sign * math.inf) for own in seeds) / len(seeds)
            if (sign * self.value - mean) * math.sqrt(len(seeds)) >= self.z * self.sigma:
                return step
        return None


def summarize(values: Sequence[float]) -> Summary | None:
    """Return mean and spread of the values, None for no values. The spread is None if the mean is not finite."""
    if not values:
        return None
    mean = fmean(values)
    return Summary(len(values), mean, stdev(values) if len(values) > 1 and math.isfinite(mean) else None)


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Paired | None:
    """Compare two results, given as seed -> value, over their common seeds. Return None if they share no seed."""
    differences = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    summary = summarize(differences)
    if summary is None:
        return None
    if not summary.spread:
        return Paired(summary.n, summary.mean, None, None)
    drawn = bootstrap_interval(differences) if summary.n >= BOOTSTRAP_PAIRS else None
    return Paired(summary.n, summary.mean, *mean_test(differences), drawn)


def mean_test(values: Sequence[float], at: float = 0.0) -> tuple[float, float, float]:
    """Test whether the true mean of the values is `at` (two-sided t-test). Return t, p, and half of the width of the
    95 % interval of the mean. The values must not all be equal.
    """
    from scipy import stats

    test = stats.ttest_1samp(values, at)
    low, high = test.confidence_interval(0.95)
    return float(test.statistic), float(test.pvalue), float(high - low) / 2


def significant_t(n: int) -> float:
    """Return the smallest |t| that is significant at 5 percent with n pairs, two or more: 12.7 for 2, 4.30 for 3."""
    from scipy import stats

    return float(stats.t.ppf(0.975, n - 1))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a 95 % interval of the mean by bootstrap, bias-corrected and accelerated (BCa; Efron 1987).

    The resamples are drawn with the fixed seed 0. The values must not all be equal.
    """
    from scipy import stats

    found = stats.bootstrap((values,), np.mean, n_resamples=BOOTSTRAP_DRAWS, rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Return the p values of several tests, corrected for their number (Holm 1979).

    The k-th smallest of m values, k = 0 .. m - 1, is multiplied by m - k. Corrected values are at most 1, and a larger
    p has no smaller corrected value. If all tests with a corrected value of at most 0.05 count as significant, the
    probability of any false finding is at most 0.05.
    """
    corrected, worst = {}, 0.0
    for k, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        corrected[name] = worst = max(worst, min(1.0, (len(p) - k) * value))
    return corrected


def reaches(x: Sequence[float], y: Sequence[float], level: float) -> float | None:
    """Return the first x at which the curve y(x) is at or below `level`, None if there is none.

    Values between points are interpolated linearly. Points with a y that is not finite are skipped. A curve that starts
    at or below the level reaches it at its first point.
    """
    before: tuple[float, float] | None = None
    for here, value in zip(x, y, strict=True):
        if not math.isfinite(value):
            continue
        if value <= level:
            if before is None:
                return here
            return before[0] + (here - before[0]) * (before[1] - level) / (before[1] - value)
        before = (here, value)
    return None
