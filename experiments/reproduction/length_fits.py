"""Steps to an equal loss, from runs of several lengths of which each has a learning rate schedule of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

_EXPONENTS = (0.01, 4.0)
"""Range of the exponent of a fit."""


class LossCurve(NamedTuple):
    """The last loss of a run of n steps, floor + scale n^-exponent."""

    floor: float
    scale: float
    exponent: float

    def loss(self, steps: float) -> float:
        """The loss after a run of this length."""
        return float(self.floor + self.scale * steps**-self.exponent)

    def steps(self, loss: float) -> float:
        """The length of a run that ends with this loss; infinite where no run does."""
        ratio = (loss - self.floor) / self.scale if self.scale > 0 else -1.0
        return float(ratio ** (-1 / self.exponent)) if ratio > 0 else math.inf


def fit_loss_curve(steps: Sequence[float], losses: Sequence[float]) -> LossCurve:
    """The power law of least squares: the exponent by search in [0.01, 4], floor and scale linear given it.

    Raises ValueError with fewer than four lengths, one more than the law has numbers.
    """
    if len(set(steps)) < 4:
        raise ValueError(f"fitted_steps: runs of four lengths at least are required, got {sorted(set(steps))}")
    n, y = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)

    def linear(exponent: float) -> tuple[float, float, float]:
        """Squared error, floor and scale of the best fit with an exponent; steps in units of the longest run."""
        columns = np.stack([np.ones_like(n), (n / n.max()) ** -exponent], axis=1)
        (floor, scale), *_ = np.linalg.lstsq(columns, y, rcond=None)
        return float(((columns @ [floor, scale] - y) ** 2).sum()), float(floor), float(scale)

    found = optimize.minimize_scalar(
        lambda exponent: linear(exponent)[0], bounds=_EXPONENTS, method="bounded", options={"xatol": 1e-6}
    )
    exponent = float(found.x)
    _, floor, scale = linear(exponent)
    return LossCurve(floor, scale * float(n.max()) ** exponent, exponent)


def fitted_steps_ratio(own: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Steps of one method over those of another at an equal loss, from last losses by length of run.

    Both losses are fitted by power laws in the steps, and solved for the higher of the two fitted losses at the
    longest lengths, so that neither law is extended to longer runs (Vyas et al. 2024, arXiv:2409.11321). Nor is one to
    shorter runs: steps below those of the shortest run count as these, which brings the ratio nearer to 1. nan where a
    loss is not finite.
    """
    if not all(map(math.isfinite, (*own.values(), *other.values()))):
        return math.nan
    laws = [fit_loss_curve(list(some), list(some.values())) for some in (own, other)]
    level = max(law.loss(max(some)) for law, some in zip(laws, (own, other), strict=True))
    mine, others = (max(law.steps(level), min(some)) for law, some in zip(laws, (own, other), strict=True))
    return mine / others
