"""Means, spreads, paired comparisons over seeds, and how soon a curve reaches a level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field
from scipy import special

from eigengraft.component import Component

BOOTSTRAP_PAIRS = 8
"""Fewest pairs with a bootstrap interval; that of fewer is much too narrow: of 3 pairs there are 10 different draws."""
BOOTSTRAP_DRAWS = 10_000


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (divided by n - 1) of `n` values; the spread of one value is unknown."""

    n: int
    mean: float
    spread: float | None


@dataclass(frozen=True)
class Paired:
    """Differences d over the `n` seeds both have: t = mean(d) sqrt(n) / spread(d), with n - 1 degrees of freedom.

    `p` is two-sided; mean - half to mean + half covers the true difference in 95 of 100 studies. `t`, `p` and `half`
    are None where no test exists: fewer than two pairs, or differences without spread. `bootstrap` is the interval of
    `bootstrap_interval`; None there too, and for fewer than `BOOTSTRAP_PAIRS` pairs.
    """

    n: int
    mean: float
    t: float | None
    p: float | None
    half: float | None = None
    bootstrap: tuple[float, float] | None = None

    @property
    def needed(self) -> float | None:
        """|t| that would be significant at 5 percent with this many pairs: 12.7 for 2, 4.30 for 3."""
        return float(special.stdtrit(self.n - 1, 0.975)) if self.n > 1 else None


class Target(Component):
    """A value that counts as reached at the first step at which (value - mean) sqrt(n) >= z sigma.

    The mean is over the n seeds. It is the acceptance test of track 3 of modded-nanogpt, with sigma 0.0013 and z about
    3 there: sigma, the standard deviation of a seed, is known beforehand, so that few seeds are enough. Where larger is
    better, signs are turned.
    """

    value: float = Field(description="what the metric is to reach")
    sigma: float = Field(gt=0, description="standard deviation of the metric over seeds where it reaches the value")
    z: float = Field(default=3.0, ge=0, description="how many standard errors the mean must be better than the value")

    def first(self, seeds: Sequence[Mapping[int, float]], sign: int = 1) -> int | None:
        """The step, None if there is none; seeds: the metric of each by step. A step that a seed lacks does not count.

        sign: -1 where larger is better.
        """
        for step in sorted(set[int]().union(*seeds)):
            mean = math.fsum(sign * own.get(step, sign * math.inf) for own in seeds) / len(seeds)
            if (sign * self.value - mean) * math.sqrt(len(seeds)) >= self.z * self.sigma:
                return step
        return None


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean and spread of the values; None for no values."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1 or not math.isfinite(mean):
        return Summary(len(values), mean, None)
    return Summary(len(values), mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Paired | None:
    """Compare two results given by seed over the seeds both have; None where they share no seed."""
    differences = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    summary = summarize(differences)
    if summary is None:
        return None
    if not summary.spread:
        return Paired(summary.n, summary.mean, None, None)
    error = summary.spread / math.sqrt(summary.n)
    t, half = summary.mean / error, error * float(special.stdtrit(summary.n - 1, 0.975))
    p = 2 * float(special.stdtr(summary.n - 1, -abs(t)))
    interval = bootstrap_interval(differences) if summary.n >= BOOTSTRAP_PAIRS and math.isfinite(t) else None
    return Paired(summary.n, summary.mean, t, p, half, interval)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the mean by bootstrap, bias-corrected and accelerated (BCa; Efron 1987).

    Its ends are the quantiles Phi(z0 + (z0 + z) / (1 - a (z0 + z))), z = -+1.96, of the means of 10,000 draws of n of
    the n values with replacement, with z0 = Phi^-1(share of means below that of the values, half of those equal to it)
    and a = sum(d^3) / (6 sum(d^2)^1.5), where d is each value less the mean. The draws have a fixed seed, 0. The
    values must not all be equal.
    """
    own = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(0).integers(0, len(own), (BOOTSTRAP_DRAWS, len(own)))
    means, mean = own[draws].mean(axis=1), own.mean()
    bias = special.ndtri(((means < mean).mean() + (means <= mean).mean()) / 2)
    left = own - mean
    acceleration = (left**3).sum() / (6 * (left**2).sum() ** 1.5)
    moved = bias + special.ndtri(np.array([0.025, 0.975]))
    low, high = np.quantile(means, special.ndtr(bias + moved / (1 - acceleration * moved)))
    return float(low), float(high)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p of several tests, corrected so that one false finding among all of them is as rare as p says (Holm 1979).

    The k-th smallest of m, k = 0 .. m - 1, is multiplied by m - k; none is below one that was smaller, or above 1.
    """
    corrected, worst = {}, 0.0
    for k, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        corrected[name] = worst = max(worst, min(1.0, (len(p) - k) * value))
    return corrected


def reaches(x: Sequence[float], y: Sequence[float], level: float) -> float | None:
    """The x where the curve y(x) is first at or below `level`, interpolated linearly; None if nowhere.

    Points whose y is not finite are skipped. A curve that starts at or below the level reaches it at its first point.
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
