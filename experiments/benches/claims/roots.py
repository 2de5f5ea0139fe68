"""Claims about inverse roots."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from eigengraft.preconditioners import RootSolver

from ..common.timing import inverse_power, relative_error
from ..problems.spectra import Geometric, orthogonal
from . import published_iterations as published
from .registry import Measured, claim

QUARTER, HALF = Fraction(1, 4), Fraction(1, 2)
ONLINE_KL_SHAMPOO = (
    (5.1825, -5.1781), (2.5861, -0.64795), (2.5674, -0.6455), (2.5206, -0.63935), (2.4108, -0.62487),
    (2.1883, -0.5952), (1.8596, -0.55045), (1.5890, -0.51266), (1.5052, -0.50074), (1.5, -0.5),
)  # fmt: skip
"""The pairs of Online KL-Shampoo (Tilde 2026)."""


def solver(**fields: object) -> RootSolver:
    """A root solver from its declaration."""
    return RootSolver.model_validate(fields)


@claim("roots")
def underestimated_eigenvalue(quick: bool) -> Iterator[Measured]:
    """An eigenvalue above the assumed largest one gives a CANS root with an eigenvalue of the wrong sign, while the
    residual of X A X looks converged: only the check of definiteness sees it.

    Source: Online KL-Shampoo (Tilde 2026), whose schedule it is; measured.
    """
    a = _with(Geometric(condition=30.0).eigenvalues(128))[None]
    for name, size in (("0.97 of the largest", 0.97), ("1.01 of the largest", 1.01)):
        x = published.cans(a[0], size, ONLINE_KL_SHAMPOO)
        wrong = float((torch.linalg.eigvalsh(x) < 0).sum())
        residual = float((x @ a[0] @ x - published.eye_like(x)).abs().max())
        error = float(relative_error(x[None], inverse_power(a, 0.5)))
        low, high = (2, 2) if size < 1 else (0, 0)
        yield Measured(f"size {name}: eigenvalues of the wrong sign", wrong, low, high)
        yield Measured(f"size {name}: max |X A X - I|", residual, high=1e-3)
        yield Measured(f"size {name}: relative error", error, *((0.05, 0.2) if size < 1 else (0.0, 1e-4)))
    for name, scaling, safety, accepted in (
        ("underestimated", {"kind": "power_iteration", "factor": 0.97}, 1.0, 0),
        ("guaranteed bound", {"kind": "guaranteed"}, 1.01, 1),
    ):
        found = solver(kind="cans", eps=0.0, scaling=scaling, safety=safety, max_error=0.5).root(a, HALF)
        yield Measured(f"ours, {name}: accepted", float(found.ok[0]), accepted, accepted)


@claim("roots")
def newton_past_convergence(quick: bool) -> Iterator[Measured]:
    """Where rounding has made an eigenvalue negative, the coupled Newton iteration comes near to a root and then leaves
    it for infinity: steps beyond the best one are harmful. On a definite matrix it stays where it has converged. Ours
    stops, and rejects the root; a ridge larger than rounding cures it.

    Source: measured in float32, p = 4, condition 1e8; the iteration is Iannazzo's (2006).
    """
    values = Geometric(condition=1e8).eigenvalues(64)
    definite = _with(Geometric(condition=1e6).eigenvalues(64)).float()
    errors = [error for _, error in published.coupled_newton(definite, 4, 40)]
    yield Measured("definite, condition 1e6: max |M - I| after 40 steps", errors[-1], high=1e-5)
    indefinite = _with(torch.cat([values[:-1], torch.tensor([-2e-8], dtype=torch.float64)])).float()
    errors = [error for _, error in published.coupled_newton(indefinite, 4, 40)]
    last = errors[-1] if math.isfinite(errors[-1]) else 1e300
    yield Measured("indefinite: least max |M - I|", min(errors), 0.01, 0.5)
    yield Measured("indefinite: max |M - I| after 40 steps, infinity as 1e300", last, low=10)
    for ridge, accepted in ((0.0, 0), (1e-6, 1)):
        found = solver(kind="coupled_newton", eps=ridge, max_iterations=60).root(indefinite[None], QUARTER)
        yield Measured(f"ours, ridge {ridge:g}: accepted", float(found.ok[0]), accepted, accepted)


@claim("roots")
def denman_beavers_and_conditioning(quick: bool) -> Iterator[Measured]:
    """In float32 Denman and Beavers' iteration converges in 15 steps with a ridge of 2e-3 of the largest eigenvalue.
    With one of 2e-7 it has not after 20, and more steps do not make it clean.

    Source: measured on a rank-deficient matrix with the ridge added, size twice the largest eigenvalue, A^(-1/2).
    """
    cases: tuple[tuple[float, dict[int, tuple[float, float]]], ...] = (
        (2e-3, {10: (1e-3, 0.5), 15: (0.0, 1e-4)}),
        (2e-7, {10: (0.5, 2.0), 20: (0.02, 2.0), 40: (0.01, 2.0)}),
    )
    for ridge, bands in cases:
        a = _deficient(ridge)
        exact = inverse_power(a[None], 0.5)
        for steps, (low, high) in bands.items():
            x = published.denman_beavers(a.float(), 2.0, steps)
            error = float(relative_error(x[None], exact))
            yield Measured(f"ridge {ridge:g}, {steps} steps: relative error", error, low, high)
    found = solver(kind="newton_db", eps=0.0).root(_deficient(2e-3)[None].float(), HALF)
    error = float(relative_error(found.value, inverse_power(_deficient(2e-3)[None], 0.5)))
    yield Measured("ours, ridge 0.002: relative error", error, high=1e-4)


@claim("roots")
def chebyshev_bias(quick: bool) -> Iterator[Measured]:
    """The Chebyshev series of x^(-1/4) fitted on [1e-10, 1] with 20 terms is off by more than a tenth even for a
    matrix of condition 9, and useless at 1e6; fitted on the spectrum it is exact enough.

    Source: DASH (arXiv:2602.02016), whose settings they are; measured.
    """
    for condition, low, high in ((9.0, 0.1, 0.2), (1e6, 0.5, 0.95)):
        values = Geometric(condition=condition).eigenvalues(64)
        found = published.chebyshev(values, 0.25, 1e-10, 1 + 1e-10, 20)
        yield Measured(f"on [1e-10, 1], condition {condition:g}: relative error", _spectral(found, values), low, high)
    values = Geometric(condition=9.0).eigenvalues(64)
    found = published.chebyshev(values, 0.25, 1 / 9, 1.0, 20)
    yield Measured("on [1/9, 1], condition 9: relative error", _spectral(found, values), high=1e-6)
    a = Geometric(condition=9.0).stack(1, 64, 0)
    assert a is not None
    ours = solver(kind="chebyshev").root(a, QUARTER)
    yield Measured("ours, condition 9: relative error", float(relative_error(ours.value, inverse_power(a, 0.25))),
                   high=0.02)  # fmt: skip


@claim("roots")
def double_ridge(quick: bool) -> Iterator[Measured]:
    """A ridge added to the matrix and again to its eigenvalues makes roots of small eigenvalues 2^(-1/4) = 0.841 of
    what one ridge gives. All solvers here add it once.

    Source: DASH (arXiv:2602.02016), inv_evd.py, after Distributed Shampoo's eigenvalue heuristic; measured.
    """
    ridge, a = 1e-4, torch.zeros(1, 8, 8, dtype=torch.float64)
    a[0, 0, 0] = 1e-8
    eye = published.eye_like(a[0])
    values, q = torch.linalg.eigh(a[0] + ridge * eye)
    twice = (q * (values - values.min().clamp_max(0) + ridge) ** -0.25) @ q.T
    yield Measured("added twice: root of 0 over ridge^(-1/4)", float(twice[1, 1] * ridge**0.25), 0.84, 0.842)
    for kind in sorted(set(RootSolver.members) & {"eigh", "coupled_newton", "higher_order", "newton_db", "cans"}):
        fields = {"relative": False} | ({"relative_to": None} if kind == "higher_order" else {})
        ours = solver(kind=kind, eps=ridge, **fields).root(a, QUARTER).value
        yield Measured(f"{kind}: root of 0 over ridge^(-1/4)", float(ours[0, 1, 1] * ridge**0.25), 0.999, 1.001)
    for deficiency in ("add", "clip_shift", "floor"):
        ours = solver(kind="eigh", eps=ridge, deficiency=deficiency).root(a, QUARTER).value
        yield Measured(
            f"eigh {deficiency}: root of 0 over ridge^(-1/4)", float(ours[0, 1, 1] * ridge**0.25), 0.999, 1.001
        )


def _with(values: Tensor) -> Tensor:
    """A matrix `[d, d]` with these eigenvalues, float64."""
    q = orthogonal(1, len(values), 3)[0]
    return (q * values) @ q.T


def _deficient(ridge: float) -> Tensor:
    """64 x 64 with 16 eigenvalues from 1 to 0.01, the others 0, plus the ridge."""
    values = torch.zeros(64, dtype=torch.float64)
    values[:16] = torch.logspace(0, -2, 16, dtype=torch.float64)
    return _with(values + ridge)


def _spectral(found: Tensor, values: Tensor) -> float:
    exact = values**-0.25
    return float((found - exact).norm() / exact.norm())
