"""Steps to an equal loss from runs of several lengths: laws that are known are found again."""

import math

import pytest

from eigengraft.experiments.reproduction.claims import (
    LossCurve,
    PaperClaim,
    ResultRow,
    StudyResults,
    fit_loss_curve,
    fitted_steps_ratio,
    measure_claim,
)

from ..refusals import refused

LENGTHS = (75, 100, 130, 180, 250)


def ends(law: LossCurve) -> dict[int, float]:
    return {n: law.loss(n) for n in LENGTHS}


@pytest.mark.parametrize("law", [LossCurve(2.0, 20.0, 0.5), LossCurve(0.0, 9.0, 1.3), LossCurve(1.5, 3.0, 0.1)])
def test_a_power_law_is_found_again(law: LossCurve) -> None:
    """And its inverse. The search ends within 1e-6 of the exponent, which moves a fitted loss by less than 1e-6."""
    found = fit_loss_curve(LENGTHS, list(ends(law).values()))
    assert found.exponent == pytest.approx(law.exponent, abs=1e-5)
    assert [found.loss(n) for n in LENGTHS] == pytest.approx(list(ends(law).values()), abs=1e-6)
    assert found.steps(law.loss(111.0)) == pytest.approx(111.0, rel=1e-4)
    assert found.steps(found.floor) == math.inf


def test_no_other_exponent_fits_noisy_losses_better() -> None:
    losses = [3.1, 2.92, 2.85, 2.66, 2.61]
    found = fit_loss_curve(LENGTHS, losses)

    def error(law: LossCurve) -> float:
        return sum((law.loss(n) - y) ** 2 for n, y in zip(LENGTHS, losses, strict=True))

    for exponent in (found.exponent * 0.99, found.exponent * 1.01):
        assert error(found) <= error(found._replace(exponent=exponent))


def test_the_ratio_is_that_of_the_laws_at_the_higher_of_both_last_losses() -> None:
    """2 + 14 n^-1/2 is, at every loss, 2 + 20 n^-1/2 at (14/20)^2 of the steps; the inverse the other way round."""
    fast, slow = ends(LossCurve(2.0, 14.0, 0.5)), ends(LossCurve(2.0, 20.0, 0.5))
    assert fitted_steps_ratio(fast, slow) == pytest.approx(0.49, rel=1e-4)
    assert fitted_steps_ratio(slow, fast) == pytest.approx(1 / 0.49, rel=1e-4)


def test_a_law_is_not_extended_to_shorter_runs() -> None:
    """2 + 10 n^-1/2 needs 62 steps for what 2 + 20 n^-1/2 has after 250; the shortest run is one of 75 and counts."""
    fast, slow = ends(LossCurve(2.0, 10.0, 0.5)), ends(LossCurve(2.0, 20.0, 0.5))
    assert fitted_steps_ratio(fast, slow) == pytest.approx(75 / 250, rel=1e-4)
    assert fitted_steps_ratio(slow, fast) == pytest.approx(250 / 75, rel=1e-4)


def test_a_run_without_a_finite_loss_leaves_no_ratio() -> None:
    assert math.isnan(
        fitted_steps_ratio({**ends(LossCurve(2.0, 14.0, 0.5)), 75: math.inf}, dict.fromkeys(LENGTHS, 1.0))
    )
    with refused(ValueError, "[1, 2, 3]"):
        fit_loss_curve([1, 2, 3], [3.0, 2.0, 1.5])


def results(**losses: dict[int, float]) -> StudyResults:
    rows = [
        ResultRow({"method": method, "steps": str(n)}, 0, {"val_loss": loss, "steps": n})
        for method, own in losses.items()
        for n, loss in own.items()
    ]
    return StudyResults(tuple(rows), {})


def test_a_claim_about_fitted_steps_pairs_the_lengths_of_a_seed() -> None:
    runs = results(a=ends(LossCurve(2.0, 14.0, 0.5)), b=ends(LossCurve(2.0, 20.0, 0.5)))
    claim = PaperClaim(
        says="s", source="t", of={"method": "a"}, than={"method": "b"}, most=0.6, metric="fitted_steps", compare="ratio"
    )
    assert measure_claim(claim, runs).values == {0: pytest.approx(0.49, rel=1e-4)}
    twice = [ResultRow({"method": m, "steps": "again"}, 0, {"val_loss": 1.0, "steps": 75}) for m in "ab"]
    with refused(ValueError, 6):
        measure_claim(claim, StudyResults((*runs.rows, *twice), {}))
    with refused(ValueError, "ratio", "fitted_steps"):
        PaperClaim.model_validate({**claim.model_dump(), "compare": "difference"})
