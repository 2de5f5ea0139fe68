"""Whether claims hold: paired values over seeds, their interval, and a test of each, corrected for all of a folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from scipy import special

from ..reports.seed_statistics import holm, reaches, summarize
from ..studies.axes import inside
from .claims import CellPair, ClaimMetric, PaperClaim, Verdict
from .length_fits import fitted_steps_ratio
from .results import ResultRow, StudyResults


@dataclass(frozen=True)
class ClaimFinding:
    """What was measured of a claim.

    values: by seed, the difference or ratio.
    mean: of the values; the geometric mean of ratios; nan where a run diverged or reached no loss.
    low, high: the interval of the mean that covers the true value in 95 of 100 studies; None where there is none.
    p: of the test that the true value lies on the other side of the nearest end of what is required, two-sided, and
        corrected for all claims of the folder; None where the value has no chance in it, or no test exists.
    verdict: `holds` where the mean lies in what is required and p <= 0.05, `fails` where it does not and p <= 0.05.
    """

    values: Mapping[int, float]
    mean: float
    low: float | None
    high: float | None
    p: float | None
    verdict: Verdict


def judge(claims: Mapping[str, PaperClaim], results: Mapping[str, StudyResults]) -> dict[str, ClaimFinding]:
    """The findings of all claims of a folder, from the results of its studies."""
    found = {name: measure_claim(claim, results[claim.study]) for name, claim in claims.items()}
    corrected = holm({name: finding.p for name, finding in found.items() if finding.p is not None})
    for name, p in corrected.items():
        verdict: Verdict = found[name].verdict if p <= 0.05 else "undecided"
        found[name] = replace(found[name], p=p, verdict=verdict)
    return found


def measure_claim(claim: PaperClaim, results: StudyResults) -> ClaimFinding:
    """The finding of one claim by itself; its verdict is what the mean says, where there is a test."""
    ratio = claim.compare == "ratio"
    to, back = (_log, math.exp) if ratio else (float, float)
    values = _by_seed(claim, claim, results)
    if claim.beside is not None:
        other = _by_seed(claim, claim.beside, results)
        values = {seed: value - other[seed] for seed, value in values.items()}
    low, high = map(to, claim.required) if ratio else claim.required
    exact = claim.metric == "state_bytes_per_parameter"
    mean, half, p, verdict = interval_test(list(values.values()), low, high, exact)
    shown = {seed: _back(value, back) for seed, value in values.items()}
    below, above = (None if half is None else _back(mean + side * half, back) for side in (-1, 1))
    return ClaimFinding(shown, _back(mean, back), below, above, p, verdict)


def interval_test(
    values: list[float], low: float, high: float, exact: bool = False
) -> tuple[float, float | None, float | None, Verdict]:
    """Mean, half of its 95 % interval, p, and the side on which the mean lies of what is required, [low, high].

    t is the distance of the mean from the nearest end in standard errors, p = 2 P(T > t) with n - 1 degrees of freedom.
    Where the mean lies inside, the larger p of both ends is that of the nearest one. Values that are `exact`, or equal
    for two seeds or more, need no test. A run that diverged decides nothing unless every seed lies outside.
    """
    if not all(map(math.isfinite, values)):
        outside = len(values) > 1 and all(value < low or value > high for value in values)
        return math.nan, None, None, "fails" if outside else "undecided"
    summary = summarize(values)
    if summary is None:
        raise ValueError("values: one of a seed at least is required, got none")
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
    """The difference, or the logarithm of the ratio, by seed: the mean over the cells of the pair, or of their fits."""
    pairs: dict[int, list[tuple[ResultRow, ResultRow]]] = {}
    for row in results.rows:
        if inside(pair.of, row.labels):
            partner = results.row({**row.labels, **pair.than}, row.seed)
            pairs.setdefault(row.seed, []).append((row, partner))
    if not pairs:
        raise ValueError(f"claims: cells of the study are required, got {pair.of}, which are excluded")
    if claim.metric == "fitted_steps":
        return {seed: _fitted(some) for seed, some in sorted(pairs.items())}
    found = {seed: [_compared(claim, *rows) for rows in some] for seed, some in sorted(pairs.items())}
    return {seed: math.fsum(some) / len(some) for seed, some in found.items()}


def _fitted(pairs: list[tuple[ResultRow, ResultRow]]) -> float:
    """The logarithm of the ratio of steps to an equal loss, from the runs of one seed, each pair of one length."""
    own, other = (
        {int(row.numbers["steps"]): _number(row, "val_loss") for row in rows} for rows in zip(*pairs, strict=True)
    )
    if len(own) < len(pairs):
        raise ValueError(f"claims: cells that differ in their steps alone are required, got {len(pairs)} pairs")
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
        raise ValueError(f"results: {metric} is required of every run, not so for {dict(row.labels)}")
    return float(value) if value is not None else -math.inf if metric == "val_accuracy" else math.inf


def _steps_ratio(row: ResultRow, partner: ResultRow) -> float:
    """Where the run first reaches the loss its partner ends with, over the partner's steps; infinite if nowhere."""
    steps, losses = row.numbers["curve"]
    curve = [math.inf if loss is None else loss for loss in losses]
    reached = reaches(steps, curve, _number(partner, "val_loss"))
    return math.inf if reached is None else reached / float(partner.numbers["steps"])


def _log(value: float) -> float:
    return -math.inf if value <= 0 else math.inf if math.isinf(value) else math.log(value)


def _back(value: float, back: Callable[[float], float]) -> float:
    return back(value) if value < math.inf else value


def disproved(claims: Mapping[str, PaperClaim], found: Mapping[str, ClaimFinding]) -> Iterator[str]:
    """Names of claims that the folder says to hold and whose verdict is another."""
    return (name for name, claim in claims.items() if claim.expected == "holds" != found[name].verdict)
