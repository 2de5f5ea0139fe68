"""Verdicts about claims: paired values over seeds, their interval, and tests corrected for all claims of a folder.

The ratio of steps to an equal loss is computed from fits to runs of several lengths, each with a learning rate schedule
of its length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from ..reports.seed_statistics import holm, reaches, summarize
from ..studies.axes import inside
from .claims import CellPair, ClaimMetric, PaperClaim, Verdict
from .results import ResultRow, StudyResults

_EXPONENTS = (0.01, 4.0)
"""Range in which the exponent of a fit is searched."""


class LossCurve(NamedTuple):
    """The last loss of a run of n steps, floor + scale n^-exponent."""

    floor: float
    scale: float
    exponent: float

    def loss(self, steps: float) -> float:
        """Return the last loss of a run of this length."""
        return float(self.floor + self.scale * steps**-self.exponent)

    def steps(self, loss: float) -> float:
        """Return the length of a run that ends with this loss, infinity if there is none."""
        ratio = (loss - self.floor) / self.scale if self.scale > 0 else -1.0
        return float(ratio ** (-1 / self.exponent)) if ratio > 0 else math.inf


def fit_loss_curve(steps: Sequence[float], losses: Sequence[float]) -> LossCurve:
    """Fit a `LossCurve` to losses by least squares: a search for the exponent, and a linear fit of floor and scale.

    Raises ValueError for fewer than four lengths of runs, because the curve has three parameters.
    """
    if len(set(steps)) < 4:
        raise ValueError(f"fitted_steps: needs runs of at least four lengths, got {sorted(set(steps))}")
    n, y = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)

    def linear(exponent: float) -> tuple[float, float, float]:
        """Return squared error, floor and scale of the best fit, for steps in units of the longest run."""
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
    """Return the steps of one method over those of another at an equal loss, given the last losses by length of a run.

    A power law in the steps is fitted to the losses of each method (Vyas et al. 2024, arXiv:2409.11321). The equal loss
    is the higher of the two fitted losses at the longest lengths, so that neither law is extrapolated to longer runs.
    If a method needs fewer steps than its shortest run, the steps of the shortest run are used, which brings the ratio
    closer to 1. Returns nan if a loss is not finite.
    """
    if not all(map(math.isfinite, (*own.values(), *other.values()))):
        return math.nan
    laws = [fit_loss_curve(list(some), list(some.values())) for some in (own, other)]
    level = max(law.loss(max(some)) for law, some in zip(laws, (own, other), strict=True))
    mine, others = (max(law.steps(level), min(some)) for law, some in zip(laws, (own, other), strict=True))
    return mine / others


@dataclass(frozen=True)
class ClaimFinding:
    """The measured value of a claim and its verdict.

    values: difference or ratio by seed.
    mean: mean of the values, the geometric mean for ratios; nan if a run diverged or did not reach a loss.
    low, high: ends of the interval that covers the true value in 95 of 100 studies; None if there is none.
    p: p-value of the two-sided test that the true value is the nearest end of the required interval, corrected for all
        claims of the folder; None if the value is not random or no test exists.
    verdict: `holds` if the mean is in the required interval and p <= 0.05, `fails` if it is outside and p <= 0.05, else
        `undecided`.
    """

    values: Mapping[int, float]
    mean: float
    low: float | None
    high: float | None
    p: float | None
    verdict: Verdict


def judge(claims: Mapping[str, PaperClaim], results: Mapping[str, StudyResults]) -> dict[str, ClaimFinding]:
    """Return the findings of all claims of a folder, given the results of its studies."""
    found = {name: measure_claim(claim, results[claim.study]) for name, claim in claims.items()}
    corrected = holm({name: finding.p for name, finding in found.items() if finding.p is not None})
    for name, p in corrected.items():
        verdict: Verdict = found[name].verdict if p <= 0.05 else "undecided"
        found[name] = replace(found[name], p=p, verdict=verdict)
    return found


def measure_claim(claim: PaperClaim, results: StudyResults) -> ClaimFinding:
    """Return the finding of one claim before the correction for several claims.

    The p-value is not corrected. The verdict of a claim with a test does not use p yet: it says only if the mean is in
    the required interval.
    """
    to, back = (_log, math.exp) if claim.compare == "ratio" else (float, float)
    values = _by_seed(claim, claim, results)
    if claim.beside is not None:
        other = _by_seed(claim, claim.beside, results)
        values = {seed: value - other[seed] for seed, value in values.items()}
    low, high = map(to, claim.required)
    exact = claim.metric == "state_bytes_per_parameter"
    mean, half, p, verdict = interval_test(list(values.values()), low, high, exact)
    shown = {seed: back(value) for seed, value in values.items()}
    below, above = (None if half is None else back(mean + side * half) for side in (-1, 1))
    return ClaimFinding(shown, back(mean), below, above, p, verdict)


def interval_test(
    values: list[float], low: float, high: float, exact: bool = False
) -> tuple[float, float | None, float | None, Verdict]:
    """Return the mean, half the width of its 95 % interval, p, and the verdict about the required interval [low, high].

    t is the distance of the mean from the nearest end of the required interval, in standard errors, and p = 2 P(T > t)
    with n - 1 degrees of freedom. If a run diverged, the verdict is undecided unless the values of all seeds are
    outside the interval.

    exact: True if the values are not random. No test is made then, and p is None. This is also the case if there are
        several values and all are equal.
    """
    if not all(map(math.isfinite, values)):
        outside = len(values) > 1 and all(value < low or value > high for value in values)
        return math.nan, None, None, "fails" if outside else "undecided"
    summary = summarize(values)
    if summary is None:
        raise ValueError("values: must have the value of at least one seed, got none")
    within: Verdict = "holds" if low <= summary.mean <= high else "fails"
    if exact or (summary.n > 1 and not summary.spread):
        return summary.mean, 0.0, None, within
    if summary.spread is None:
        return summary.mean, None, None, "undecided"
    error, freedom = summary.spread / math.sqrt(summary.n), summary.n - 1
    t = min(abs(summary.mean - end) for end in (low, high)) / error
    half = error * float(special.stdtrit(freedom, 0.975))
    return summary.mean, half, 2 * float(special.stdtr(freedom, -t)), within


def _by_seed(claim: PaperClaim, pair: CellPair, results: StudyResults) -> dict[int, float]:
    """Return, by seed, the mean difference or mean log ratio over the pair's cells, or the log of a fitted ratio."""
    pairs: dict[int, list[tuple[ResultRow, ResultRow]]] = {}
    for row in results.rows:
        if inside(pair.of, row.labels):
            partner = results.row({**row.labels, **pair.than}, row.seed)
            pairs.setdefault(row.seed, []).append((row, partner))
    if not pairs:
        raise ValueError(f"claims: the study excludes all cells of {pair.of}; name other cells")
    if claim.metric == "fitted_steps":
        return {seed: _fitted(some) for seed, some in sorted(pairs.items())}
    found = {seed: [_compared(claim, *rows) for rows in some] for seed, some in sorted(pairs.items())}
    return {seed: math.fsum(some) / len(some) for seed, some in found.items()}


def _fitted(pairs: list[tuple[ResultRow, ResultRow]]) -> float:
    """Return the logarithm of the ratio of steps to an equal loss, from the runs of one seed.

    pairs: for each length of a run, the run of the claim's cell and that of its partner.
    """
    own, other = (
        {int(row.numbers["steps"]): _number(row, "val_loss") for row in rows} for rows in zip(*pairs, strict=True)
    )
    if len(own) < len(pairs):
        raise ValueError(
            f"claims: fitted_steps needs one pair of cells for each number of steps, got {len(pairs)} pairs"
        )
    return _log(fitted_steps_ratio(own, other))


def _compared(claim: PaperClaim, row: ResultRow, partner: ResultRow) -> float:
    if claim.metric == "steps_to_loss":
        return _log(_steps_ratio(row, partner))
    own, other = (_number(one, claim.metric) for one in (row, partner))
    if claim.compare == "ratio":
        own, other = _log(own), _log(other)
    return own - other if math.isfinite(own) or math.isfinite(other) else math.nan


def _number(row: ResultRow, metric: ClaimMetric) -> float:
    value = row.numbers.get(metric)
    of_diverged = metric in row.numbers and metric in ("val_loss", "val_accuracy", "train_loss")
    if value is None and not of_diverged:
        raise ValueError(f"results: the run of {dict(row.labels)} has no {metric}; run its study again")
    return float(value) if value is not None else -math.inf if metric == "val_accuracy" else math.inf


def _steps_ratio(row: ResultRow, partner: ResultRow) -> float:
    """Return the step at which a run first reaches the final loss of its partner, divided by the steps of the partner.

    Infinity if the run never reaches it.
    """
    steps, losses = row.numbers["curve"]
    curve = [math.inf if loss is None else loss for loss in losses]
    reached = reaches(steps, curve, _number(partner, "val_loss"))
    return math.inf if reached is None else reached / float(partner.numbers["steps"])


def _log(value: float) -> float:
    return -math.inf if value <= 0 else math.inf if math.isinf(value) else math.log(value)


def disproved(claims: Mapping[str, PaperClaim], found: Mapping[str, ClaimFinding]) -> Iterator[str]:
    """Return the names of claims that are expected to hold and have another verdict."""
    return (name for name, claim in claims.items() if claim.expected == "holds" != found[name].verdict)
