"""Root and basis solvers against their definitions in float64, over spectra, conditions, sizes and exponents."""

from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from eigengraft.preconditioners import CoupledNewton, Eigh, EighBasis, PowerQR

from ...refusals import lacking
from ...trajectories import normal

pytestmark = pytest.mark.slow  # sweeps over solvers; the laws of solvers are quick

EXPONENTS = [Fraction(1, p) for p in range(1, 9)] + [Fraction(*q) for q in ((3, 4), (2, 3), (3, 2), (2, 1), (5, 8))]
EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
DTYPES = pytest.mark.parametrize("dtype", EPS, ids=["float32", "float64"])


def turned(values: Tensor, seed: int = 0) -> Tensor:
    """Symmetric float64 matrices `[N, d, d]` with these eigenvalues `[N, d]` and random eigenvectors."""
    n, d = values.shape
    q = torch.linalg.qr(normal(n, d, d, seed=seed)).Q
    return (q * values.unsqueeze(1)) @ q.mT


def spectra(d: int, condition: float) -> Tensor:
    """`[4, d]`: geometric, one large, one small, equally spaced; from 1 down to 1 / condition, sizes 1e-3 to 1e3."""
    low = 1 / condition
    steps = torch.linspace(0, 1, d, dtype=torch.float64)
    geometric, linear = low**steps, 1 - (1 - low) * steps
    large, small = torch.full_like(steps, low), torch.ones_like(steps)
    large[0], small[-1] = 1.0, low
    sizes = torch.tensor([1e-3, 1.0, 1e3, 1.0], dtype=torch.float64)
    return torch.stack([geometric, large, small, linear]) * sizes[:, None]


def defined(a: Tensor, exponent: Fraction, ridge: Tensor | float = 0.0) -> Tensor:
    """(A + ridge I)^-e in float64; ridge: a number or `[N, 1]`."""
    values, q = torch.linalg.eigh(a.double())
    return (q * (values + ridge).pow(-float(exponent)).unsqueeze(1)) @ q.mT


def errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """Relative, in the Frobenius norm, `[N]`."""
    return torch.linalg.matrix_norm(ours.double() - theirs) / torch.linalg.matrix_norm(theirs)


def error(ours: Tensor, theirs: Tensor) -> float:
    """The worst relative error in the Frobenius norm over the stack."""
    return float(errors(ours, theirs).max())


def every_condition(d: int, conditions: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(matrices `[N, d, d]` of all spectra at all of these conditions, the condition of each `[N]`)."""
    a = torch.cat([turned(spectra(d, condition)) for condition in conditions]).to(dtype)
    return a, torch.tensor(conditions, dtype=torch.float64).repeat_interleave(len(a) // len(conditions))


def bound(exponent: Fraction, condition: Any, dtype: torch.dtype) -> Any:
    """A relative error u in A is one of condition * u in the smallest eigenvalue, e times that in the root. 20: the
    dimension, and several roundings."""
    return 20 * (1 + float(exponent)) * condition * EPS[dtype]


@DTYPES
@pytest.mark.parametrize("d", [1, 2, 7, 32])
@pytest.mark.parametrize("exponent", EXPONENTS, ids=str)
def test_eigh_is_the_inverse_root(exponent: Fraction, d: int, dtype: torch.dtype) -> None:
    a, conditions = every_condition(d, (1.0, 1e2, 1e4), dtype)
    root, ok = Eigh(eps=0.0).root(a, exponent)[:2]
    assert ok.all() and root.dtype == dtype
    assert bool((errors(root, defined(a, exponent)) <= bound(exponent, conditions, dtype)).all())


def test_eigh_in_float64_for_float32_matrices() -> None:
    """`precision: float64` leaves the rounding of the result alone: 1e-6 where float32 throughout gives 1e-2."""
    a = turned(spectra(16, 1e5)).float()
    exact = defined(a, Fraction(1, 2))
    precise = Eigh(eps=0.0, precision="float64").root(a, Fraction(1, 2)).value
    assert precise.dtype == torch.float32
    assert error(precise, exact) <= 1e-6
    assert error(Eigh(eps=0.0).root(a, Fraction(1, 2)).value, exact) <= bound(Fraction(1, 2), 1e5, torch.float32)


POLICIES: dict[str, Any] = {
    "add": lambda values, r: values.clamp_min(0) + r,
    "floor": torch.clamp_min,
    "clip_shift": lambda values, r: values - values.min().clamp_max(0) + r,
    "pseudo_inverse": lambda values, r: torch.where(values > r, values, torch.inf),
}
DEFICIENT = {
    "full": [1.0, 0.5, 0.1, 0.01],
    "rank 2": [1.0, 0.5, 0.0, 0.0],
    "rank 1": [3.0, 0.0, 0.0, 0.0],
    "indefinite by rounding": [1.0, 0.5, -1e-9, -1e-8],
    "negative": [-1.0, -0.5, -0.1, -0.01],
}


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("spectrum", DEFICIENT)
@pytest.mark.parametrize("policy", POLICIES)
def test_deficiency_policies(policy: str, spectrum: str, relative: bool) -> None:
    """Each policy is its rule on the eigenvalues. 1e-7: a zero eigenvalue is 1e-16, against a ridge of 1e-5."""
    values = torch.tensor([DEFICIENT[spectrum]], dtype=torch.float64)
    a, eps, exponent = turned(values), 1e-5, Fraction(1, 4)
    ridge = eps * max(float(values.max()), 0.0) if relative else eps
    root, ok = Eigh(eps=eps, relative=relative, deficiency=policy).root(a, exponent)[:2]
    assert ok.all() and root.isfinite().all()
    if spectrum == "negative" and (relative or policy == "pseudo_inverse"):
        return  # no eigenvalue above zero: no scale for a relative ridge, nothing to invert; finite is enough
    ridged = POLICIES[policy](torch.linalg.eigvalsh(a)[0], ridge)
    _, q = torch.linalg.eigh(a[0])
    assert error(root, ((q * ridged.pow(-0.25)) @ q.T)[None]) <= 1e-7


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("eps", [0.0, 1e-12])
@DTYPES
def test_a_zero_matrix_has_a_finite_root(policy: str, eps: float, dtype: torch.dtype) -> None:
    """A zero gradient times it is zero. Without a ridge the root is that of the smallest invertible number."""
    root, ok = Eigh(eps=eps, deficiency=policy).root(torch.zeros(2, 3, 3, dtype=dtype), Fraction(1, 2))[:2]
    assert ok.all() and root.isfinite().all()
    assert bool((root == 0).all()) == (policy == "pseudo_inverse")


def refuse(limit: torch.dtype | None, silent: bool) -> Any:
    """A torch.linalg.eigh that fails for matrices whose first entry is 7 (`limit` None) or for one dtype: with an error
    or with nan, which LAPACK gives for some finite singular matrices in float32."""
    real = torch.linalg.eigh

    def eigh(a: Tensor) -> Any:
        bad = a[..., 0, 0] == 7 if limit is None else torch.full(a.shape[:-2], a.dtype == limit)
        if bad.any() and not silent:
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        values, vectors = real(a)
        values[bad], vectors[bad] = torch.nan, torch.nan
        return values, vectors

    return eigh


SILENT = pytest.mark.parametrize("silent", [False, True], ids=["an error", "nan"])


@SILENT
def test_a_failed_decomposition_is_tried_again_in_float64(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a = turned(spectra(5, 1e2)).float()
    expected = defined(a, Fraction(1, 4))
    monkeypatch.setattr(torch.linalg, "eigh", refuse(torch.float32, silent))
    root, ok = Eigh(eps=0.0).root(a, Fraction(1, 4))[:2]
    assert ok.all() and root.dtype == torch.float32
    assert error(root, expected) <= bound(Fraction(1, 4), 1e2, torch.float32)


@SILENT
@pytest.mark.parametrize("solver", [Eigh(), EighBasis(), PowerQR()], ids=lambda s: type(s).__name__)
def test_what_fails_in_float64_too_is_flagged_alone(solver: Any, silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a = turned(0.4 ** torch.arange(5.0).double().expand(4, 5)).float()
    a[2, 0, 0] = 7
    good = apply(solver, a)
    monkeypatch.setattr(torch.linalg, "eigh", refuse(None, silent))
    root = apply(solver, a)
    assert root.ok.tolist() == [True, True, False, True]
    assert root.value.isfinite().all()
    assert torch.allclose(root.value[[0, 1, 3]].abs(), good.value[[0, 1, 3]].abs(), rtol=1e-3, atol=1e-4)


class Solved(NamedTuple):
    value: Tensor
    ok: Tensor


def apply(solver: Any, a: Tensor) -> Solved:
    """The root of power 1/4, or the first basis."""
    if hasattr(solver, "root"):
        return Solved(*solver.root(a, Fraction(1, 4))[:2])
    q, _, ok = solver.basis(a, torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a), True)
    return Solved(q, ok)


SOLVERS = [Eigh(), CoupledNewton(), EighBasis(), PowerQR(), PowerQR(bootstrap=False)]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e38])
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: f"{type(s).__name__}{getattr(s, 'bootstrap', '')}")
def test_a_bad_matrix_is_flagged_and_spoils_no_other(solver: Any, bad: float) -> None:
    """1e38: finite, but its square is not. Whoever can take it may; whoever cannot must say so."""
    a = turned(spectra(6, 1e2)).float()
    good = apply(solver, a)
    spoiled = a.clone()
    spoiled[1, 2, 3] = spoiled[1, 3, 2] = bad
    root = apply(solver, spoiled)
    assert root.ok[[0, 2, 3]].all() and good.ok.all()
    assert torch.equal(root.value[[0, 2, 3]], good.value[[0, 2, 3]])
    if bad == 1e38:
        assert not root.ok[1] or root.value[1].isfinite().all()
    else:
        assert not root.ok[1]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: f"{type(s).__name__}{getattr(s, 'bootstrap', '')}")
@pytest.mark.parametrize("shape", [(0, 3, 3), (3, 1, 1)])
def test_empty_and_single_matrices(solver: Any, shape: tuple[int, int, int]) -> None:
    root = apply(solver, torch.ones(shape))
    assert root.value.shape == shape and root.ok.shape == shape[:1] and root.ok.all()


NEWTON = {torch.float32: 1e-6, torch.float64: 1e-12}


@DTYPES
@pytest.mark.parametrize("d", [1, 2, 6, 24])
@pytest.mark.parametrize("exponent", EXPONENTS, ids=str)
def test_coupled_newton_is_the_inverse_root(exponent: Fraction, d: int, dtype: torch.dtype) -> None:
    """Of the matrix with its ridge, relative to the Frobenius norm. Rounding in M reaches X with the condition."""
    solver = CoupledNewton(eps=1e-6, tolerance=NEWTON[dtype], max_iterations=200)
    a, conditions = every_condition(d, (1.0, 1e2, 1e8), dtype)
    root, ok = solver.root(a, exponent)[:2]
    ridge = 1e-6 * torch.linalg.matrix_norm(a.double())
    assert ok.all() and root.dtype == dtype
    converged = d * float(exponent) * NEWTON[dtype]  # what is left when max |M - I| is within the tolerance
    worst = bound(exponent, conditions.clamp_max(1e6), dtype) + converged
    assert bool((errors(root, defined(a, exponent, ridge[:, None])) <= worst).all())


@pytest.mark.parametrize("d", [2, 3, 6, 8])
def test_coupled_newton_does_not_stop_at_the_first_step(d: int) -> None:
    """M_0 has eigenvalues on both sides of 1, and the first step may raise max |M - I|: no reason to stop. Each of
    500 well-conditioned matrices has a root."""
    values = 10 ** -torch.rand(500, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    a = turned(values, seed=d)
    for exponent in (Fraction(1, 2), Fraction(1, 4)):
        root, ok = CoupledNewton(eps=0.0, tolerance=1e-10).root(a, exponent)[:2]
        assert ok.all()
        assert error(root, defined(a, exponent)) <= 1e-8


@DTYPES
@pytest.mark.parametrize("condition", [1e1, 1e4, 1e8])
@pytest.mark.parametrize("p", range(1, 9))
def test_coupled_newton_never_goes_past_convergence(p: int, condition: float, dtype: torch.dtype) -> None:
    """max |A X^p - I| does not grow with the number of steps allowed, up to rounding: the best iterate is kept. Without
    that the iteration diverges in float32 within 100 steps."""
    a = turned(spectra(12, condition)).to(dtype)
    ridge = 1e-6 * torch.linalg.matrix_norm(a.double())
    exact = defined(a, Fraction(1, p), ridge[:, None])
    errors = []
    for steps in (5, 10, 20, 40, 80, 200):
        solver = CoupledNewton(tolerance=1e-30, max_iterations=steps, max_error=1e30, check_every=1)
        root, ok = solver.root(a, Fraction(1, p))[:2]
        assert ok.all()
        errors.append(error(root, exact))
    settled = bound(Fraction(1, p), min(condition, 1e6), dtype)
    assert errors[-1] <= settled
    assert all(later <= earlier + settled for earlier, later in pairwise(errors))


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@DTYPES
def test_coupled_newton_on_rank_deficient_matrices(p: int, dtype: torch.dtype) -> None:
    """The ridge alone decides in the null space: (r / d-norm)^-1/p there, and finite."""
    values = torch.tensor([[1.0, 0.3, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    a = turned(values).to(dtype)
    root, ok = CoupledNewton(eps=1e-4, max_iterations=100).root(a, Fraction(1, p))[:2]
    ridge = 1e-4 * torch.linalg.matrix_norm(a.double())
    assert ok.all()
    assert error(root, defined(a, Fraction(1, p), ridge[:, None])) <= max(bound(Fraction(1, p), 2e4, dtype), 1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("solver", [Eigh(eps=1e-6, relative=True), CoupledNewton()], ids=lambda s: type(s).__name__)
def test_roots_scale_with_the_matrix(solver: Any, scale: float) -> None:
    """(c A)^-1/4 = c^-1/4 A^-1/4 in float32 from 1e-30 to 1e30. 1e-4: float32 with an effective condition of 1e2."""
    a = turned(spectra(6, 1e2)).float()
    root, ok = solver.root(a, Fraction(1, 4))[:2]
    scaled, fine = solver.root(a * scale, Fraction(1, 4))[:2]
    assert ok.all() and fine.all()
    assert error(scaled * scale**0.25, root.double()) <= 1e-4


def test_coupled_newton_says_when_it_did_not_converge() -> None:
    a = turned(spectra(6, 1e8))
    root, ok = CoupledNewton(eps=0.0, max_iterations=3).root(a, Fraction(1, 4))[:2]
    assert not ok[:3].any()
    assert root.isfinite().all()


@pytest.mark.parametrize("exponent", [Fraction(1, 65), Fraction(9, 1)])
def test_coupled_newton_refuses_exponents_it_cannot_iterate(exponent: Fraction) -> None:
    assert lacking(str(CoupledNewton().check(exponent)), "coupled_newton", exponent) == []
    assert CoupledNewton().check(Fraction(3, 4)) is None and Eigh().check(exponent) is None


def off_diagonal(a: Tensor, q: Tensor) -> float:
    """||B - diag B|| / ||B|| for B = Q^T A Q."""
    b = q.mT @ a @ q
    return float(torch.linalg.matrix_norm(b - torch.diag_embed(b.diagonal(dim1=-2, dim2=-1))).max() / b.norm())


@pytest.mark.parametrize(
    ("condition", "ratios"),
    [(1e2, {1: 0.5, 8: 0.1, 64: 1e-4}), (1e6, {1: 0.5, 8: 0.05, 64: 1e-10})],
    ids=["1e2", "1e6"],
)
@pytest.mark.parametrize("start", ["identity", "warm"])
def test_one_power_step_a_refresh_converges(start: str, condition: float, ratios: dict[int, float]) -> None:
    """Fixed A, n = 32, geometric spectrum. Orthogonal iteration with columns in descending order is known to reach .43,
    .05, 1e-5 (condition 1e2) and .35, .008, 1e-13 (1e6) after 1, 8, 64 steps from the identity; in ascending order it
    never settles."""
    a = turned(spectra(32, condition)[:1])
    solver = PowerQR(bootstrap=False)
    q = torch.eye(32, dtype=torch.float64)[None]
    if start == "warm":
        nudge = torch.matrix_exp(1e-3 * (skew := normal(1, 32, 32, seed=3)) - 1e-3 * skew.mT)
        q = EighBasis().basis(a, q, True).q @ nudge
    began = off_diagonal(a, q)
    for refresh in range(1, 65):
        q, _, ok = solver.basis(a, q, False)
        assert ok.all()
        if refresh in ratios:
            allowed = ratios[refresh] if start == "identity" else min(ratios[refresh], 1.5 * began)
            assert off_diagonal(a, q) <= allowed


@pytest.mark.parametrize("d", [16, 32])
def test_a_basis_stays_orthogonal(d: int) -> None:
    """2,000 refreshes in float32 of slowly changing statistics: Householder vectors each time, no product to drift."""
    q, worst = torch.eye(d)[None], 0.0
    a = turned(spectra(d, 1e4)[:1]).float()
    for refresh in range(2_000):
        if refresh % 100 == 0:
            x = normal(d, 3, seed=refresh).float()
            a = 0.9 * a + 0.1 * (x @ x.T)
        q, _, _ = PowerQR().basis(a, q, False)
        worst = max(worst, float((q.mT @ q - torch.eye(d)).abs().max())) if refresh % 50 == 0 else worst
    assert worst < 1e-5


@pytest.mark.parametrize("steps", [1, 3])
def test_power_qr_orders_columns_and_says_where_they_came_from(steps: int) -> None:
    """A diagonal A in the wrong order: the columns are permuted, `order` is that permutation, signs are kept."""
    diagonal = torch.tensor([[0.1, 3.0, 1.0, 2.0]], dtype=torch.float64)
    start = torch.diag_embed(torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64))
    q, order, ok = PowerQR(steps=steps).basis(torch.diag_embed(diagonal), start, False)
    assert ok.all() and order is not None and order.tolist() == [[1, 3, 2, 0]]
    assert torch.allclose(q, start[:, :, order[0]])


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-30, 1e30])
def test_power_qr_takes_matrices_of_any_size(scale: float) -> None:
    """Columns are scaled before QR; a zero matrix leaves the span of the basis where it is."""
    a = (turned(spectra(5, 1e2)).float() * scale).clamp(-3e38, 3e38)
    q, _, ok = PowerQR().basis(a, torch.linalg.qr(normal(4, 5, 5, seed=9).float()).Q, False)
    assert ok.all()
    assert float((q.mT @ q - torch.eye(5)).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "solver", [EighBasis(), PowerQR(), EighBasis(order="ascending")], ids=["eigh", "qr", "ascending"]
)
@DTYPES
def test_the_first_basis_is_the_eigenvectors_in_order(solver: Any, dtype: torch.dtype) -> None:
    a = turned(spectra(8, 1e2)).to(dtype)
    q, order, ok = solver.basis(a, torch.eye(8, dtype=dtype).expand_as(a), True)
    b = (q.mT @ a @ q).double()
    values = b.diagonal(dim1=1, dim2=2)
    assert ok.all() and order is None and q.dtype == dtype
    assert max(off_diagonal(x, y) for x, y in zip(a, q, strict=True)) <= 100 * EPS[dtype]
    steps = values.diff(dim=1) * (1 if getattr(solver, "order", "descending") == "ascending" else -1)
    assert bool((steps >= -100 * EPS[dtype] * values.abs().amax(1, keepdim=True)).all())
