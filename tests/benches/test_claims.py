"""Published and measured claims about components, checked; `eigengraft bench claims` prints the same."""

import pytest
from eigengraft.experiments.benches.claims.registry import Measured, known_claims
from eigengraft.experiments.benches.common.bench import Bench

pytestmark = pytest.mark.slow

CLAIMS = known_claims()


@pytest.mark.parametrize("name", CLAIMS)
def test_the_claim_holds(name: str) -> None:
    finding = CLAIMS[name].verify(quick=True)
    assert finding.results
    wrong = [f"{r.name}: {r.value:.6g}, expected {r.expected}" for r in finding.results if not r.passed]
    assert wrong == [], finding.statement
    assert finding.passed and set(finding.measured) == set(finding.expected)


@pytest.mark.parametrize("name", CLAIMS)
def test_the_claim_has_a_statement_and_a_source_and_belongs_to_a_bench(name: str) -> None:
    text = " ".join((CLAIMS[name].check.__doc__ or "").split())
    statement, _, source = text.partition("Source: ")
    assert len(statement) > 40 and len(source) > 20
    assert CLAIMS[name].bench in Bench.members


def test_every_claim_of_the_list_is_there() -> None:
    assert set(CLAIMS) >= {
        "shampoo_is_adafactor_in_the_eigenbasis",
        "gram_form_of_newton_schulz",
        "newton_schulz_bands",
        "underestimated_eigenvalue",
        "newton_past_convergence",
        "denman_beavers_and_conditioning",
        "chebyshev_bias",
        "double_ridge",
        "jorge_drifts_when_the_basis_turns",
        "order_of_kronecker_approximations",
        "order_of_gain_errors",
    }


def test_a_number_outside_its_interval_or_no_number_does_not_pass() -> None:
    assert Measured("x", 1.0, 1.0, 1.0).passed and Measured("x", 1.0).passed
    assert not Measured("x", 1.0 + 1e-12, 1.0, 1.0).passed
    assert not Measured("x", float("nan")).passed
    assert Measured("x", 1.0, low=2.0).expected == "at least 2" and Measured("x", 1.0, high=2.0).expected == "at most 2"
