"""Weights for the stage `momentum_mixture` that change during a run.

The weights are computed from a few statistics of the kernel of a momentum: the weights that it gives to past gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def k_maxwell(
    count: int,
    start_age: float,
    end_age: float,
    ages: tuple[float, float] = (3.0, 64.0),
    beta: float = 0.95,
    begin: float = 0.3,
) -> list[dict[str, Any]]:
    """Return the `means` of a `momentum_mixture` whose mean age changes linearly from `start_age` to `end_age`.

    The age of a gradient is the number of steps since it was computed. The mean age of a running mean is the mean of
    the ages of all gradients, weighted by their weights in the running mean. The mean age of the mixture is the
    weighted mean of the mean ages of its running means.

    The mean ages a_1 ... a_K of the running means are log-spaced, and their decays are a_k / (a_k + 1). Their weights
    are w_k = c k for k < K, and w_K = 1 - sum_(k<K) w_k, with the c for which sum_k w_k a_k is the mean age of the
    mixture. Until `begin` all means have the decay `beta`. From `begin` to the end of the run the weights change
    linearly from those of `start_age` to those of `end_age`.

    `k_maxwell(8, 58, 26)` has the weights of pull request #357 of modded-nanogpt, and `k_maxwell(6, 50, 22)` those of
    #359.

    Args:
        count: Number of means, K, at least 2.
        start_age: Mean age of the mixture at `begin`, in steps.
        end_age: Mean age of the mixture at the end of the run, in steps.
        ages: Mean ages of the fastest and of the slowest mean, in steps.
        beta: Decay of all means before `begin`.
        begin: Fraction of the run, between 0 and 1, before which all means are equal.

    Returns:
        A list of K mappings with the keys `beta` and `weight`, as a recipe has them.

    Raises:
        ValueError: The ages are not in order, or a mean age needs a weight below 0.
    """
    spaced, oldest = _log_spaced(count, ages), ages[1]

    def weights(mean_age: float) -> list[float]:
        c = (oldest - mean_age) / sum(k * (oldest - age) for k, age in enumerate(spaced, start=1))
        found = [c * k for k in range(1, count)]
        if min(*found, 1 - sum(found)) < 0:
            lowest = sum(k * age for k, age in enumerate(spaced[:-1], start=1)) / sum(range(1, count))
            raise ValueError(
                f"a mean age of {mean_age:g} would need a negative weight; choose a mean age from {lowest:.3g} to "
                f"{oldest:g}"
            )
        return [*found, 1 - sum(found)]

    return _annealed([age / (age + 1) for age in spaced], weights(start_age), weights(end_age), beta, begin)


class KernelStatistics(NamedTuple):
    """Four statistics of a kernel of momentum. The kernel has a weight for each past gradient, by its age in steps.

    The age of the newest gradient is 0. The weights sum to 1, and the weights times (-1)^age sum to 0, so that a
    gradient that changes its sign from step to step has no effect.

    mean_age: Mean age under the weights, in steps.
    mean_log_age: Mean of log(1 + age) under the weights.
    newest: Weight of the newest gradient.
    second: Weight of the gradient of age 1.
    """

    mean_age: float
    mean_log_age: float
    newest: float
    second: float


def entropy_kernel(statistics: KernelStatistics, length: int = 256) -> NDArray[np.float64]:
    """Return the kernel of maximum entropy with given statistics (pull requests #368 and #369 of modded-nanogpt).

    The weights of the ages 0 and 1 are given. The weights w_k of the ages k = 2, 3, ... have the largest -sum_k w_k log
    w_k of all weights with these statistics. They are w_k = exp(a + b (-1)^k + c k + d log(1 + k)). Newton's method
    finds b, c and d, and a follows from the sum of the weights.

    Args:
        statistics: Statistics of the kernel.
        length: Number of weights, which are those of the ages 0 to length - 1. Older gradients have no weight.

    Returns:
        Weights `[length]` by age.

    Raises:
        ValueError: No positive weights have these statistics.
    """
    ages = np.arange(2, length, dtype=np.float64)
    features = np.vstack([(-1.0) ** ages, ages, np.log1p(ages)])
    _, _, newest, second = statistics
    rest = 1 - newest - second
    wanted = np.array([second - newest, statistics.mean_age - second, statistics.mean_log_age - second * np.log(2)])
    unit = np.ptp(features, axis=1)
    features, wanted = features / unit[:, None], wanted / (rest * unit)

    def dual(at: NDArray[np.float64]) -> float:
        z = features.T @ at
        return float(z.max() + np.log(np.exp(z - z.max()).sum()) - at @ wanted)

    at = np.zeros(3)
    for _ in range(_NEWTON_STEPS):
        z = features.T @ at
        p = np.exp(z - z.max())
        p /= p.sum()
        slope = features @ p - wanted
        if np.abs(slope).max() < _DUAL_TOLERANCE:
            return np.concatenate([[newest, second], rest * p])
        curvature = (features * p) @ features.T - np.outer(features @ p, features @ p)
        step, size = -np.linalg.lstsq(curvature, slope, rcond=None)[0], 1.0
        while dual(at + size * step) > dual(at) + 1e-4 * size * (slope @ step) and size > 1e-10:
            size /= 2
        at = at + size * step
    given = ", ".join(f"{name} {value:g}" for name, value in statistics._asdict().items())
    raise ValueError(
        f"a kernel of {length} positive weights cannot have these statistics: {given}; try a mean_age nearer to "
        "exp(mean_log_age) - 1"
    )


_NEWTON_STEPS = 200
"""Largest number of Newton steps in `entropy_kernel`. About ten suffice if positive weights have the wanted
statistics.
"""
_DUAL_TOLERANCE = 1e-12
"""Largest error of a statistic that `entropy_kernel` accepts. A statistic is the mean of a function of age. Its error
is divided by the range of this function, the largest minus the smallest value. In float64 the error reaches about
1e-15.
"""


def maximum_entropy(
    count: int,
    start: KernelStatistics,
    end: KernelStatistics,
    ages: tuple[float, float] = (1.0, 200.0),
    beta: float = 0.95,
    begin: float = 0.25,
) -> list[dict[str, Any]]:
    """Return the `means` of a `momentum_mixture` that approximates momentum with a kernel of maximum entropy.

    A kernel has a weight for each past gradient. The kernel of maximum entropy with given statistics is computed by
    `entropy_kernel`. Pull requests #368 and #369 of modded-nanogpt store 256 gradients, and their kernel changes
    linearly from the one with the statistics `start` to the one with the statistics `end`. Here `count` running means
    with log-spaced mean ages replace the stored gradients. Until `begin` all means have the decay `beta`.

    The mixture has the same sum of weights and the same mean age as the kernel. Under this condition its weights, which
    may be negative, minimize the squared distance from the kernel. The distance is not 0, because the kernel alternates
    from age to age: with the statistics below and eight means, the absolute differences sum to 0.24 at the start and to
    0.10 at the end.

    The two pull requests have the statistics (90, 3.7153849427, 0.07235, 0.02235) at the start and (24.05,
    2.3786333904, 0.137, 0.087) at the end.

    Args:
        count: Number of means, at least 2.
        start: Statistics of the kernel at `begin`.
        end: Statistics of the kernel at the end of the run.
        ages: Mean ages of the fastest and of the slowest mean, in steps.
        beta: Decay of all means before `begin`.
        begin: Fraction of the run, between 0 and 1, before which all means are equal.

    Returns:
        A list of mappings with the keys `beta` and `weight`, as a recipe has them.

    Raises:
        ValueError: The ages are not in order, or no positive weights have the statistics.
    """
    spaced = np.array(_log_spaced(count, ages))
    betas = spaced / (spaced + 1)
    long = np.arange(int(20 * ages[1]))[:, None]  # the slowest mean gives 2e-9 of its weight to older gradients
    kernels = (1 - betas) * betas**long
    exact = np.vstack([np.ones(count), spaced])
    system = np.block([[kernels.T @ kernels, exact.T], [exact, np.zeros((2, 2))]])

    def weights(statistics: KernelStatistics) -> list[float]:
        kernel = entropy_kernel(statistics)
        wanted = np.concatenate([kernels[: len(kernel)].T @ kernel, [1.0, statistics.mean_age]])
        return [float(weight) for weight in np.linalg.solve(system, wanted)[:count]]

    return _annealed(betas.tolist(), weights(start), weights(end), beta, begin)


def _log_spaced(count: int, ages: tuple[float, float]) -> list[float]:
    """Return `count` log-spaced mean ages from `ages[0]` to `ages[1]`. Raise ValueError if `ages` is not in
    ascending order.
    """
    youngest, oldest = ages
    if count < 2 or not 0 < youngest < oldest:
        raise ValueError(
            f"at least 2 mean ages, in ascending order and above 0, are required, got {count} in the range {ages}"
        )
    return [youngest * (oldest / youngest) ** (k / (count - 1)) for k in range(count)]


def _annealed(
    betas: Sequence[float], start: Sequence[float], end: Sequence[float], beta: float, begin: float
) -> list[dict[str, Any]]:
    """Return the field `means` of a `MomentumMixture`: for each mean, a schedule of its decay and a schedule of its
    weight.

    Until the fraction `begin` of the run all decays are `beta`, and the weights are `start`. Then the decays are
    `betas`, and until the end of the run the weights change linearly from `start` to `end`.
    """

    def jump(before: float, after: float) -> list[dict[str, float]]:
        return [{"from": before, "to": before, "fraction": begin}, {"from": after, "to": after, "steps": 1}]

    def ramp(before: float, after: float) -> list[dict[str, float]]:
        return [{"from": before, "to": before, "fraction": begin}, {"from": before, "to": after, "fraction": 1 - begin}]

    rows = zip(betas, start, end, strict=True)
    return [{"beta": jump(beta, own), "weight": ramp(first, last)} for own, first, last in rows]
