"""Claims of a paper as data, results of the runs that test them, and verdicts with tests corrected for all claims.

One kind of claim is about the ratio of the steps that two methods need for the same loss. This ratio is computed from
curves that are fitted to runs of several lengths. Each run has a learning rate schedule of its own length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.loading import read_yaml

from ..files import make_directory, read_json, write_text
from ..reports.records import METRICS, RESULT_NUMBERS, Run, learning_rate, read_records
from ..reports.seed_statistics import holm, mean_test, reaches, summarize
from ..studies.plan import cells
from ..studies.study import Labels, Study, Where, as_label, inside, load_study, require_known

Verdict = Literal["holds", "fails", "undecided"]

ClaimMetric = Literal[
    "val_loss",
    "val_accuracy",
    "train_loss",
    "steps_to_loss",
    "fitted_steps",
    "state_bytes_per_parameter",
    "optimizer_ms",
]

CLAIMS = "claims.yaml"
"""Name of the file with claims in the folder of a paper."""


class CellPair(Component):
    """Cells of a study to measure, and their partners with which they are compared.

    The partner of a cell has the labels of the cell, except those that `than` replaces.
    """

    of: Where = Field(
        min_length=1,
        description="cells to measure: axis -> label or list of labels; an axis that is not named has all its labels",
    )
    than: Labels = Field(
        min_length=1, description="labels of the partner that replace those of the cell: axis -> label"
    )

    def require_axes(self, study: Study, where: str) -> None:
        """Raise ValueError if `of` or `than` names an axis or a label that the study does not have.

        where: path of this pair in the file of claims, for the error.
        """
        wanted = [("of", axis, label) for axis, some in self.of.items() for label in some]
        for side, axis, label in [*wanted, *(("than", *one) for one in self.than.items())]:
            require_known(f"{where}.{side}", "axis", axis, study.axes)
            require_known(f"{where}.{side}.{axis}", "label", label, study.axes[axis])


class PaperClaim(CellPair):
    """One claim: the measured difference or ratio of cells, seed by seed, is between `least` and `most`.

    If `of` selects several cells, the value of a seed is the mean over these cells. If `beside` is given, the
    difference of this second pair of cells is subtracted, or the ratio is divided by that of the second pair. For
    `steps_to_loss`, the value is the step at which a run first reaches the final loss of its partner, divided by the
    steps of the partner. For `fitted_steps`, the value is the ratio of steps to an equal loss (`fitted_steps_ratio`).
    """

    says: str = Field(min_length=1, description="claim of the paper in one sentence")
    source: str = Field(min_length=1, description="section, table or figure")
    published: str = Field("", description="number that the paper gives, with its unit; empty: it gives none")
    study: str = Field("study", description="study file of the folder, without .yaml")
    metric: ClaimMetric = Field("val_loss", description="metric of the comparison")
    compare: Literal["difference", "ratio"] = Field(
        "difference", description="comparison of the metric of a cell with that of its partner"
    )
    beside: CellPair | None = Field(
        None,
        description="second pair of cells, whose difference is subtracted from the measured one, or by whose ratio "
        "the measured one is divided; none: no second pair",
    )
    least: float | None = Field(
        None, description="lower end of the required interval, in the unit of the metric; none: no lower end"
    )
    most: float | None = Field(None, description="upper end of the required interval; none: no upper end")
    expected: Verdict = Field("holds", description="the verdict that the folder's page reports")

    @model_validator(mode="after")
    def _interval(self) -> Self:
        low, high = self.required
        if (self.least is None and self.most is None) or low >= high:
            raise ValueError(
                f"least, most: one or both ends of an interval are required, with least < most, got {self.least} to "
                f"{self.most}"
            )
        if self.compare == "ratio" and high <= 0:
            raise ValueError(f"most: must be positive for a ratio, got {self.most}")
        if self.metric in ("steps_to_loss", "fitted_steps") and self.compare == "difference":
            raise ValueError(
                f"compare: 'difference' cannot be combined with metric '{self.metric}', which is compared as a ratio "
                "of steps; use 'ratio'"
            )
        return self

    @property
    def required(self) -> tuple[float, float]:
        """Interval in which the true value must be for the claim to hold."""
        return -math.inf if self.least is None else self.least, math.inf if self.most is None else self.most


class PaperClaims(Component):
    """Statements of a paper, each with the study that tests it, as the file claims.yaml of a folder in papers/ declares
    them.
    """

    paper: str = Field(min_length=1, description="authors, year, title and number of the paper")
    claims: dict[str, PaperClaim] = Field(min_length=1, description="claims by name")
    measured: dict[str, str] = Field(
        default={},
        description="study -> file with the runs of the study, in the paper's folder; it is used if "
        "results/STUDY.json does not exist",
    )

    @property
    def studies(self) -> list[str]:
        """Names of the studies that claims refer to, each once."""
        return list(dict.fromkeys(claim.study for claim in self.claims.values()))


def load_claims(folder: Path) -> PaperClaims:
    """Return the claims of a folder. Raises RecipeError with the file and the fault."""
    path = folder / CLAIMS
    if not path.is_file():
        raise RecipeError(f"reproduce: the folder '{folder}' has no {CLAIMS}; give a folder such as papers/soap_2024")
    try:
        claims = validated(PaperClaims, read_yaml(path))
    except RecipeError as error:
        raise RecipeError(f"{path} does not describe claims:\n{error}") from error
    studies = {name: load_study(folder / f"{name}.yaml") for name in claims.studies}
    for name, claim in claims.claims.items():
        for where, pair in ((f"claims.{name}", claim), (f"claims.{name}.beside", claim.beside)):
            if pair is not None:
                pair.require_axes(studies[claim.study], f"{path}: {where}")
    return claims


@dataclass(frozen=True)
class ResultRow:
    """The results of one run of a study.

    labels: label by axis (setting that the study varies).
    numbers: results such as "val_loss", by name; None for a number that the run does not have.
    """

    labels: Mapping[str, str]
    seed: int
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class StudyResults:
    """The runs of a study.

    rows: one row for each run.
    made: date, machine and versions, as far as they were recorded.
    timed: True if all runs train for equal seconds, with different numbers of steps.
    compare: the axis of the study along which methods are compared; "" if it is not known.
    """

    rows: tuple[ResultRow, ...]
    made: Mapping[str, str]
    timed: bool = False
    compare: str = ""

    def row(self, labels: Mapping[str, str], seed: int) -> ResultRow:
        """Return the run of a cell with a seed. Raises ValueError if there is none."""
        for row in self.rows:
            if row.labels == labels and row.seed == seed:
                return row
        raise ValueError(f"results: there is no run of {dict(labels)} with seed {seed}")


def collect_results(directory: Path) -> dict[str, Any]:
    """Return the results of the finished runs under `directory`, as the content of a file of results.

    The content has a few numbers for each run, the date, the machine and the versions (see `keep_results`).

    Raises ValueError if a run is not finished, or if runs with the same labels differ in configuration, code or data.
    """
    records = read_records(directory)
    if records.apart:
        raise ValueError(f"results: {records.apart[0]}; keep runs of one kind in {directory}, and run the study again")
    rows = [_row(run, records.rate_edge(run.labels)) for run in records.runs]
    last = max((run.directory / "result.json").stat().st_mtime for run in records.runs)
    seen = [run.environment for run in records.runs]
    made = {"date": datetime.fromtimestamp(last, UTC).date().isoformat()}
    for key in ("cpu", "device", "threads", "python", "torch", "eigengraft"):
        made[key] = ", ".join(dict.fromkeys(str(one.get(key, "")) for one in seen))
    return {"study": records.name, "made": made, "rows": rows}


def keep_results(content: Mapping[str, Any], path: Path) -> None:
    """Write the result of `collect_results` to a JSON file, with one line for each run."""
    make_directory(path.parent)
    rows = ",\n".join(json.dumps(row) for row in content["rows"])
    head = f'"study": {json.dumps(content["study"])},\n"made": {json.dumps(content["made"])}'
    write_text(path, f'{{{head},\n"rows": [\n{rows}\n]}}\n')


def read_results(path: Path, study: Study) -> StudyResults:
    """Return the runs in a file of results. Raises ValueError if they are not the runs that the study plans.

    A file of an older version may be only the list of runs, without date, machine and versions. `made` of the result is
    then empty.
    """
    if not path.is_file():
        raise ValueError(f"reproduce: the file of results '{path}' does not exist; run the study first")
    content = read_json(path)
    listed = content if isinstance(content, list) else content["rows"]
    made = {} if isinstance(content, list) else content["made"]
    found = StudyResults(tuple(_read(row, study) for row in listed), made, study.equal == "seconds", study.compared[0])
    planned = {(tuple(cell.labels.values()), seed) for cell in cells(study) for seed in study.seeds}
    measured = [(tuple(row.labels.values()), row.seed) for row in found.rows]
    if len(measured) != len(planned) or set(measured) != planned:
        lacking, others = sorted(planned.difference(measured)), sorted(set(measured) - planned)
        values, seed = (lacking or others or [max(measured, key=measured.count)])[0]
        fault = "is missing" if lacking else "is not in the study" if others else "is there more than once"
        raise ValueError(
            f"{path}: must have one run for each cell and seed of the study {study.name}, but the run of cell "
            f"{', '.join(values)} with seed {seed} {fault}; run the study again"
        )
    return found


def _row(run: Run, edge: str) -> dict[str, Any]:
    if not run.result:
        raise ValueError(f"reproduce: the run in '{run.directory}' is not finished; give the same command again")
    losses = run.evaluations(METRICS["val_loss"])
    rate = {"lr": learning_rate(run.config), **({"edge": edge} if edge else {})}
    numbers = {key: _short(run.result.get(key)) for key in RESULT_NUMBERS}
    data, curve = run.data[1][:16], [list(losses), list(map(_short, losses.values()))]
    return {"labels": run.labels, "seed": run.seed, **rate, **numbers, "data": data, "curve": curve}


def _read(row: Mapping[str, Any], study: Study) -> ResultRow:
    """Return the run that a row in a file of results describes.

    A row of an older version has no entry `labels`. It has an entry for each axis instead, whose key is the name of the
    axis, or the last part of this name if it is a dotted path.
    """
    known = row.get("labels", row)
    labels = {axis: as_label(known[axis if axis in known else axis.rpartition(".")[2]]) for axis in study.axes}
    return ResultRow(labels, row["seed"], row)


def _short(value: Any) -> Any:
    """Return a float rounded to seven digits, the precision of float32, or None if the float is not finite.

    Return a value that is no float unchanged.
    """
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if abs(value) < float("inf") else None


_EXPONENTS = (0.01, 4.0)
"""Range in which the exponent of a fit is searched."""


class LossCurve(NamedTuple):
    """The last loss of a run of n steps, floor + scale n^-exponent."""

    floor: float
    scale: float
    exponent: float

    def loss(self, steps: float) -> float:
        """Return the last loss of a run of `steps` steps."""
        return float(self.floor + self.scale * steps**-self.exponent)

    def steps(self, loss: float) -> float:
        """Return the length of a run that ends with this loss, infinity if there is none."""
        ratio = (loss - self.floor) / self.scale if self.scale > 0 else -1.0
        return float(ratio ** (-1 / self.exponent)) if ratio > 0 else math.inf


def fit_loss_curve(steps: Sequence[float], losses: Sequence[float]) -> LossCurve:
    """Fit a `LossCurve` to losses by least squares: a search for the exponent, and a linear fit of floor and scale.

    Raises ValueError for fewer than four lengths of runs, because the curve has three parameters.

    steps, losses: for each run, its number of steps and its last loss.
    """
    if len(set(steps)) < 4:
        raise ValueError(
            f"fitted_steps: needs runs with at least four different numbers of steps, got {sorted(set(steps))}"
        )
    from scipy import optimize  # not at the top of the file, because importing it takes half a second

    n, y = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)

    def linear(exponent: float) -> tuple[float, float, float]:
        """Return the squared error, the floor and the scale of the best fit with this exponent.

        The fitted curve is floor + scale (n / N)^-exponent, for n steps, with N the steps of the longest run.
        """
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
    """Return the steps that one method needs for a loss, divided by the steps that another method needs for this loss.

    A power law in the steps is fitted to the losses of each method (Vyas et al. 2024, arXiv:2409.11321). The loss is
    the higher of the two fitted losses at the longest lengths, so that neither law is extrapolated to longer runs. If a
    method needs fewer steps than its shortest run, the steps of the shortest run are used, which brings the ratio
    closer to 1. Return nan if a loss is not finite.

    own, other: for each of the two methods, number of steps of a run -> last loss of this run.
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
    verdict: `holds` if the mean is in the required interval, `fails` if it is outside, and `undecided` if p > 0.05 or
        if the value is random and has only one seed. If a run diverged or did not reach a loss, `fails` if there are
        several values and all are outside, else `undecided`.
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

    p is that of a two-sided t-test whether the true mean is the nearest end of the required interval. The verdict says
    if the mean is in the required interval, and does not depend on p. A single random value allows no test: the width
    and p are None, and the verdict is `undecided`. If a value is not finite, there is no test either. The verdict is
    then `fails` if there are several values and all are outside of the interval, else `undecided`.

    values: value of each seed, at least one; without a value, ValueError is raised.
    exact: True if the values are not random. No test is made then, the width is 0, and p is None. Several values that
        are all equal are treated in the same way.
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
    _, p, half = mean_test(values, min((low, high), key=lambda end: abs(summary.mean - end)))
    return summary.mean, half, p, within


def _by_seed(claim: PaperClaim, pair: CellPair, results: StudyResults) -> dict[int, float]:
    """Return for each seed the difference of a metric between two methods, or the logarithm of the ratio.

    `pair.of` selects the runs of the first method. The partner of a run is the run of the second method whose labels
    are the same, except those in `pair.than`. `claim.compare` chooses difference or ratio. The result is the mean over
    all pairs of a run and its partner. For the metric `fitted_steps` it is the logarithm of one ratio, which is fitted
    to all pairs.
    """
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
    """Return the logarithm of the ratio of the steps that two methods need for the same loss.

    The ratio is computed from curves fitted to the runs of each method (`fitted_steps_ratio`).

    pairs: for each number of steps, the run of the one method and that of the other. All have the same seed.
    """
    own, other = (
        {int(row.numbers["steps"]): _number(row, "val_loss") for row in rows} for rows in zip(*pairs, strict=True)
    )
    if len(own) < len(pairs):
        raise ValueError(
            f"claims: fitted_steps needs one pair of cells for each number of steps, got {len(pairs)} pairs for "
            f"{len(own)} different numbers of steps; name cells of which `steps` is the only varied field"
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
