"""Inverse roots by every solver against float64, what they do with bad matrices, and the facts their rules rest on."""

import math
from fractions import Fraction
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from torch import Tensor

from eigengraft.component import families, validated
from eigengraft.preconditioners import (
    CANS,
    Chebyshev,
    CoupledMinimax,
    CoupledNewton,
    Eigh,
    GuaranteedBound,
    HigherOrder,
    NewtonDB,
    PowerIteration,
    RootSolver,
)
from eigengraft.preconditioners.roots.iterative import Iterative, Solved

from ...laws.rows import Row
from ...laws.table import TABLE
from ...trajectories import normal

pytestmark = pytest.mark.slow  # sweeps over solvers; the laws of solvers are quick

QUARTER, HALF, ONE = Fraction(1, 4), Fraction(1, 2), Fraction(1)
UNIT = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
DTYPES = pytest.mark.parametrize("dtype", UNIT, ids=["float32", "float64"])


def turned(values: Tensor, seed: int = 0) -> Tensor:
    """Symmetric float64 matrices `[N, d, d]` with these eigenvalues `[N, d]` and random eigenvectors."""
    q = torch.linalg.qr(normal(*values.shape, values.shape[1], seed=seed)).Q
    return (q * values.unsqueeze(1)) @ q.mT


def spectra(d: int, condition: float) -> Tensor:
    """`[5, d]`, largest 1: geometric, one large, one small, equally spaced, half and half; down to 1 / condition."""
    steps, low = torch.linspace(0, 1, d, dtype=torch.float64), 1 / condition
    large, small = torch.full_like(steps, low), torch.ones_like(steps)
    large[0], small[-1] = 1.0, low if d > 1 else 1.0
    halves = torch.where(torch.arange(d) < (d + 1) // 2, 1.0, low).double()
    return torch.stack([low**steps, large, small, 1 - (1 - low) * steps, halves])


def defined(a: Tensor, exponent: Fraction, ridge: Tensor | float = 0.0) -> Tensor:
    """(A + ridge I)^-e in float64; ridge: a number or `[N]`."""
    values, q = torch.linalg.eigh(a.double())
    values = values + (ridge[:, None] if isinstance(ridge, Tensor) else ridge)
    return (q * values.pow(-float(exponent)).unsqueeze(1)) @ q.mT


def errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """Relative, in the Frobenius norm, `[N]`."""
    return torch.linalg.matrix_norm(ours.double() - theirs) / torch.linalg.matrix_norm(theirs)


def ridge_of(solver: Any, a: Tensor) -> Tensor:
    """The ridge as documented, `[N]` in float64: max(eps * size, floor), or max(eps, floor)."""
    size = (solver.relative_to or solver.scaling).upper(a).double() if solver.relative else torch.ones(len(a)).double()
    return (solver.eps * size).clamp_min(solver.floor)


def truncation(solver: Any, exponent: Fraction, d: int) -> float:
    """What the method itself leaves, relative: d^(1/2) e times its tolerance on M - I, the band of the schedule of CANS
    (Z C Z - I at 4e-5), the tail of the Chebyshev series, K^(1/p) exp(-2 degree / K^(1/2)) at K = 1 / eps, 4 times."""
    if solver.kind == "chebyshev":
        k = 1 / solver.eps
        return 4 * float(exponent.numerator * k ** (1 / exponent.denominator) * math.exp(-2 * solver.degree / k**0.5))
    left = {"cans": 1e-4, "coupled_minimax": 2e-6}
    return d**0.5 * max(float(exponent), 1.0) * (left.get(solver.kind) or solver.tolerance)


SOLVERS: tuple[Any, ...] = (
    CoupledNewton(max_iterations=60),
    CoupledMinimax(),
    HigherOrder(),
    NewtonDB(),
    CANS(),
    Chebyshev(degree=200),
)
each_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: s.kind)
ALL = [Fraction(1, p) for p in (1, 2, 3, 4, 6, 8)] + [Fraction(*q) for q in ((3, 4), (2, 3), (3, 2), (2, 1))]
TAKEN = [(solver, exponent) for solver in SOLVERS for exponent in ALL if solver.check(exponent) is None]


@DTYPES
@pytest.mark.parametrize("d", [1, 7, 64])
@pytest.mark.parametrize(("solver", "exponent"), TAKEN, ids=[f"{solver.kind} {exponent}" for solver, exponent in TAKEN])
def test_roots_are_those_of_the_matrix_with_its_ridge(
    solver: Any, exponent: Fraction, d: int, dtype: torch.dtype
) -> None:
    """All conditions in one stack. A rounding u in A is one of K u in its smallest eigenvalue, e times that in the
    root; K is the condition with the ridge. 20: the dimension and several products."""
    conditions = torch.tensor([1.0, 1e2, 1e5, 1e8], dtype=torch.float64).repeat_interleave(5)
    a = torch.cat([turned(spectra(d, float(condition))) for condition in conditions[::5]]).to(dtype)
    ridge = ridge_of(solver, a)
    root = solver.root(a, exponent)
    assert root.ok.all() and root.definite.all() and root.value.dtype == dtype
    rounding = 20 * (1 + float(exponent)) * torch.minimum(conditions, 1 / ridge.min()) * UNIT[dtype]
    found = errors(root.value, defined(a, exponent, ridge))
    assert bool((found <= rounding + truncation(solver, exponent, d)).all()), (found / rounding).tolist()


def difficult(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Stacks of three: the first and last are harmless, the one between is what its name says."""
    good = turned(spectra(8, 1e2))[:3]
    vector, generic = normal(1, 8, 1, seed=3), turned(10.0 ** torch.linspace(0, -12, 8, dtype=torch.float64)[None])
    middles = {
        "harmless": good[1:2],
        "rank one": vector @ vector.mT,
        "zero": torch.zeros(1, 8, 8, dtype=torch.float64),
        "huge": good[1:2] * 1e30,
        "tiny": good[1:2] * 1e-30,
        "condition 1e12": generic,
        "indefinite by rounding": turned(
            torch.tensor([[1, 0.1, 1e-3, 0, 0, -1e-8, -1e-8, -3e-8]], dtype=torch.float64)
        ),
        "at the end of the range": good[1:2] * 3e38,
        "nan": torch.full((1, 8, 8), torch.nan, dtype=torch.float64),
        "one inf": good[1:2]
        .clone()
        .index_put_((torch.tensor(0), torch.tensor(2), torch.tensor(2)), torch.tensor(torch.inf).double()),
    }
    return {name: torch.cat([good[:1], middle, good[2:]]).to(dtype) for name, middle in middles.items()}


SURE = ("rank one", "huge", "tiny", "indefinite by rounding")


def taken(row: Row) -> list[Fraction]:
    """The exponents 1/4 and 1/2, and 1 for a solver that takes neither."""
    solver: Any = validated(RootSolver, dict(row.make))  # type: ignore[type-abstract]
    return [e for e in (QUARTER, HALF) if not solver.check(e)] or [ONE]


every_row = pytest.mark.parametrize("row", TABLE["root_solver"], ids=str)


@pytest.mark.parametrize(("row", "exponent"), [(row, e) for row in TABLE["root_solver"] for e in taken(row)], ids=str)
def test_no_matrix_is_too_difficult(row: Row, exponent: Fraction) -> None:
    """No exception; what is called ok is finite, symmetric and definite; what is not finite is rejected, and the
    neighbors in the stack keep every bit. Each difficult matrix stands between two harmless ones, all in one stack."""
    solver: Any = validated(RootSolver, dict(row.make))  # type: ignore[type-abstract]
    given = difficult()
    harmless = given["harmless"].repeat(len(given), 1, 1)
    root, plain = solver.root(torch.cat([*given.values()]), exponent), solver.root(harmless, exponent)
    neighbors = torch.arange(len(harmless)) % 3 != 1
    assert plain.ok.all() and root.ok[neighbors].all()
    assert torch.equal(root.value[neighbors], plain.value[neighbors])
    assert root.value.isfinite().all() or row.kind == "eigh"
    ridged = (
        row.make.get("ratio", 1)
        and row.make.get("relative", row.kind != "eigh")
        and row.make.get("precision", "input") == "input"
    )
    for case, value, ok, definite in zip(given, root.value[1::3], root.ok[1::3], root.definite[1::3], strict=True):
        if case in ("nan", "one inf"):
            assert not ok, case
        if ok:
            assert value.isfinite().all(), case
            assert torch.allclose(value, value.mT, rtol=0, atol=1e-5 * float(value.abs().max())), case
            if row.kind != "eigh":  # which knows the eigenvalues, and may be asked for roots of any condition
                assert float(torch.linalg.eigvalsh(value.double()).min()) > 0 and definite, case
        if ridged and "interval" not in row.make and case in (*SURE, "zero"):
            assert ok, f"a relative ridge makes every finite matrix solvable, also if it is {case}"


@every_row
def test_a_matrix_alone_is_the_same_as_in_a_stack_up_to_rounding(row: Row) -> None:
    """Products of one matrix and of a stack may sum in another order: 1e-4 is that in float32 at condition 1e2."""
    solver: Any = validated(RootSolver, dict(row.make))  # type: ignore[type-abstract]
    a = difficult()["harmless"]
    together = solver.root(a, QUARTER)
    alone = [solver.root(a[i : i + 1], QUARTER) for i in range(3)]
    assert float(errors(torch.cat([r.value for r in alone]), together.value.double()).max()) <= 1e-4


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e18, 1e30])
@each_solver
def test_size_does_not_matter(solver: Any, scale: float) -> None:
    """(c A)^-1/4 = c^-1/4 A^-1/4 in float32 from 1e-30 to 1e30; 1e-4: rounding at condition 1e2."""
    a = turned(spectra(7, 1e2)).float()
    root, scaled = solver.root(a, QUARTER), solver.root(a * scale, QUARTER)
    assert root.ok.all() and scaled.ok.all()
    assert float(errors(scaled.value * scale**0.25, root.value.double()).max()) <= 1e-4


@pytest.mark.parametrize("solver", [*SOLVERS, Eigh(eps=1e-12), Eigh(deficiency="perturb_before")], ids=lambda s: s.kind)
@pytest.mark.parametrize("size", [0.0, 1e-9])
def test_the_ridge_is_added_once(solver: Any, size: float) -> None:
    """Where the ridge is all there is the root is r^-1/4. Added twice it would be 2^-1/4 of that, 16 % less."""
    extra = {"interval": (0.4, 1.0)} if solver.kind == "chebyshev" else {}
    once = solver.replace(
        eps=1e-2, relative=False, **({"relative_to": None} if solver.kind == "higher_order" else {}), **extra
    )
    a = turned(spectra(6, 1e2)) * size
    root = once.root(a, QUARTER)
    eye = torch.eye(6, dtype=torch.float64).expand(5, -1, -1)
    assert root.ok.all() and float(errors(root.value, eye * 1e-2**-0.25).max()) <= 1e-4
    twice = defined(a + 1e-2 * eye, QUARTER, 1e-2)
    assert 0.12 < float(errors(twice, root.value).min()) < 0.18


@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_floor_is_the_least_ridge(p: int) -> None:
    a = turned(spectra(6, 1e6)) * torch.tensor([1e-6, 1.0, 1.0, 1e-6, 1.0], dtype=torch.float64)[:, None, None]
    for solver in (HigherOrder(eps=1e-6, floor=1e-5), CoupledNewton(eps=1e-6, floor=1e-5, relative=False)):
        root = solver.root(a, Fraction(1, p))
        assert (
            root.ok.all() and float(errors(root.value, defined(a, Fraction(1, p), ridge_of(solver, a))).max()) <= 1e-5
        )
        assert float(ridge_of(solver, a).min()) == 1e-5


# -------------------------------------------------------------------------------------------------- eigendecomposition
def test_the_ridge_before_the_decomposition_is_the_rule_of_the_reference() -> None:
    """(L, Q) = eigh(A + eps I); if min L < eps: L <- L - min L + eps. float32, where rounding makes A indefinite."""
    x = normal(3, 12, 4, seed=1).float()
    a, eps = x @ x.mT, 1e-6
    values, q = torch.linalg.eigh(a + eps * torch.eye(12))
    least = values.amin(1, keepdim=True)
    assert bool((least < eps).any())
    values = torch.where(least < eps, values - least + eps, values)
    root = Eigh(eps=eps, deficiency="perturb_before").root(a, QUARTER)
    assert root.ok.all()
    # 1e-5: rounding of the product; the eigenvalues are the same numbers
    assert float(errors(root.value, ((q * values.pow(-0.25).unsqueeze(1)) @ q.mT).double()).max()) <= 1e-5


@DTYPES
@pytest.mark.parametrize(
    "solver", [{"rtol": None}, {"rtol": 1e-3}, {"atol": 2e-2}, {"rtol": 1e-3, "atol": 2e-2}], ids=str
)
def test_the_pseudo_inverse_drops_what_is_below_its_cutoff(solver: dict[str, Any], dtype: torch.dtype) -> None:
    """cutoff = max(rtol * lambda_max, atol); rtol None: d * machine epsilon, between which and 1e-3 nothing lies."""
    values = torch.tensor([[4.0, 1.0, 1e-2, 1e-9 if dtype == torch.float32 else 1e-18, 0.0]], dtype=torch.float64)
    a = turned(values).to(dtype)
    cutoff = max(
        4 * (5 * UNIT[dtype] if solver.get("rtol", 0.0) is None else solver.get("rtol", 0.0)), solver.get("atol", 0.0)
    )
    root = Eigh(eps=0.0, deficiency="pseudo_inverse", **solver).root(a, HALF)
    kept = values > cutoff
    assert kept.sum() == (2 if "atol" in solver else 3)
    expected = turned(torch.where(kept, values.pow(-0.5), 0.0))
    assert root.ok.all() and not root.definite.any()
    # the smallest eigenvalue kept is 1e-2: rounding of A is 400 times larger in it
    assert float(errors(root.value, expected).max()) <= 2e4 * UNIT[dtype]


@pytest.mark.parametrize(
    ("deficiency", "relative"),
    [(rule, relative) for rule in ("add", "clip_shift", "floor", "pseudo_inverse") for relative in (False, True)]
    + [("perturb_before", False)],
)
def test_diagonals_are_treated_as_matrices(deficiency: Any, relative: bool) -> None:
    """The root of a diagonal matrix is diagonal, by the same rule, in any order of the entries."""
    a = torch.tensor([[0.5, 2.0, 0.0, 1e-3], [1.0, -1e-9, 3.0, 1e-9]], dtype=torch.float64)
    solver = Eigh(eps=1e-4, relative=relative, deficiency=deficiency)
    ours, dense = solver.diagonal_root(a, QUARTER), solver.root(torch.diag_embed(a), QUARTER)
    assert ours.ok.all() and float((torch.diag_embed(ours.value) - dense.value).abs().max()) <= 1e-12 * float(
        ours.value.max()
    )
    assert torch.equal(ours.definite, dense.definite)


@each_solver
def test_diagonals_take_the_ridge_of_the_solver(solver: Any) -> None:
    a = torch.tensor([[0.5, 2.0, 0.0, 1e-3], [0.0, 0.0, 0.0, 0.0], [1.0, -1e-9, 3.0, torch.inf]], dtype=torch.float64)
    root = solver.diagonal_root(a, HALF)
    assert root.ok.tolist() == [True, True, False] and root.value.isfinite().all()
    assert torch.allclose(root.value[0], (a[0] + solver.eps * 2.0).pow(-0.5), rtol=1e-12)
    floored = HigherOrder(eps=1e-6, floor=1e-2).diagonal_root(a, HALF)
    assert torch.allclose(floored.value[:2], (a[:2] + 1e-2).pow(-0.5), rtol=1e-12)


# --------------------------------------------------------------------------------------------------- reference solvers
def statistics(d: int = 12, n: int = 6) -> Tensor:
    """Gram matrices in float32 of sizes 1e-4 to 1e4 and of conditions up to 1e5."""
    x = normal(n, d, 4 * d, seed=d) * 10 ** torch.linspace(0, -2, d, dtype=torch.float64)[:, None]
    return (x @ x.mT * 10.0 ** torch.linspace(-4, 4, n, dtype=torch.float64)[:, None, None]).float()


def plain_newton(a: Tensor, p: int, steps: int = 100, growth: float = 1.2) -> tuple[Tensor, Tensor]:
    """(A^(-1/p), error) of one matrix, as the JAX Distributed Shampoo iterates: stops above `growth`, one step back."""
    eye, z = torch.eye(len(a), dtype=a.dtype), (1 + p) / (2 * a.norm())
    m, x = a * z, torch.eye(len(a), dtype=a.dtype) * z ** (1 / p)
    error = (m - eye).abs().max()
    for _ in range(steps):
        t = (1 + 1 / p) * eye - m / p
        after, before = x @ t, x
        m = torch.linalg.matrix_power(t, p) @ m
        new = (m - eye).abs().max()
        if new > growth * error:
            return before, new
        x, error = after, new
        if error <= 1e-6:
            break
    return x, error


JAX = CoupledNewton(
    relative_to=PowerIteration(steps=100, vectors=1),
    max_iterations=100,
    growth=1.2,
    norm="max",
    stop="rise",
    retries=5,
    retry_above=0.05,
)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_newton_with_a_relative_ridge_is_that_of_the_jax_reference(p: int) -> None:
    """Ridge 1e-6 of lambda_max, 100 iterations, tolerance 1e-6. 1e-2 to 1e-3: each has float32's error at condition
    1e5, above; 1e-5 where the condition is 1e1."""
    a = statistics()
    ridge = 1e-6 * torch.linalg.eigvalsh(a.double())[:, -1]
    root = JAX.root(a, Fraction(1, p))
    assert root.ok.all()
    for i in range(len(a)):
        theirs, error = plain_newton(a[i] + ridge[i].float() * torch.eye(12), p)
        assert error < 0.1
        assert float(errors(root.value[i : i + 1], theirs[None].double())) <= 1e-2 / p
    assert float(errors(root.value, defined(a, Fraction(1, p), ridge)).max()) <= 1e-2 / p
    mild = turned(spectra(12, 1e1)).float()
    for i, x in enumerate(JAX.root(mild, Fraction(1, p)).value):
        theirs, _ = plain_newton(mild[i] + 1e-6 * torch.eye(12), p)
        assert float(errors(x[None], theirs[None].double())) <= 1e-5


@pytest.mark.parametrize("p", [2, 4])
def test_newton_with_an_absolute_ridge_is_that_of_the_pytorch_reference(p: int) -> None:
    """A + eps I, z = (p + 1) / (2 ||A||_F), until max |M - I| <= 1e-6; in float64, so that only the stop differs."""
    a = statistics()[2:5].double()
    root = CoupledNewton(eps=1e-3, relative=False, max_iterations=100, norm="max").root(a, Fraction(1, p))
    for i in range(len(a)):
        theirs, _ = plain_newton(a[i] + 1e-3 * torch.eye(12, dtype=torch.float64), p)
        assert float(errors(root.value[i : i + 1], theirs[None])) <= 1e-5


@pytest.mark.parametrize("order", [2, 3, 4, 6])
@pytest.mark.parametrize("exponent", [QUARTER, Fraction(3, 4), ONE], ids=str)
def test_higher_orders_are_the_series_written_out(order: int, exponent: Fraction) -> None:
    """After every step: one of Newton's, then T = sum b_i (I - M)^i, from X = z^(1/p) I, M = z A, z = 1 / trace. 1e-9:
    rounding at condition 1e3. A higher order takes fewer steps."""
    a, p = turned(spectra(9, 1e3)), exponent.denominator
    solver = HigherOrder(order=order, eps=0.0, max_error=1e9)
    eye = torch.eye(9, dtype=torch.float64).expand_as(a)
    z = 1 / a.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    x, m = z ** (1 / p) * eye, z * a
    for steps in range(1, 8):
        b, t, power = 1.0, eye, eye
        for i in range(1, order if steps > 1 else 2):
            b, power = b * (1 + (i - 1) * p) / (i * p), power @ (eye - m)
            t = t + b * power
        x, m = x @ t, torch.linalg.matrix_power(t, p) @ m
        root = solver.replace(max_iterations=steps, check_every=1).root(a, exponent)
        assert float(errors(root.value, torch.linalg.matrix_power(x, exponent.numerator)).max()) <= 1e-9
    converged = solver.root(a, exponent)
    assert float(errors(converged.value, defined(a, exponent)).max()) <= 1e-7  # the tolerance, 1e-8, on entries of M
    if order > 2:
        assert bool((converged.iterations < solver.replace(order=2).root(a, exponent).iterations).all())


# ---------------------------------------------------------------------------------------------------- documented facts
def unguarded(a: Tensor, p: int, steps: int) -> list[float]:
    """max |M - I| along the coupled Newton iteration that nobody stops."""
    eye, z = torch.eye(len(a)), (1 + p) / (2 * a.norm())
    m, path = a * z, []
    for _ in range(steps):
        t = ((p + 1) * eye - m) / p
        m = torch.linalg.matrix_power(t, p) @ m
        path.append(float((m - eye).abs().max()))
    return path


@pytest.mark.parametrize("spectrum", ["linear", "one large"])
def test_newton_is_not_carried_past_convergence(spectrum: str) -> None:
    """At condition 1e8 in float32 the plain iteration of some matrices turns before it has converged, and is lost. Ours
    keeps its best iterate, whose error is at most that of M = 0, and calls it a root only if it has converged."""
    values = torch.linspace(1, 1e-8, 16, dtype=torch.float64)[None] if spectrum == "linear" else spectra(16, 1e8)[1:2]
    a = turned(values.expand(12, -1), seed=1).float()
    paths = [unguarded(matrix, 4, 80) for matrix in a]
    assert any(min(path) > 0.1 and not path[-1] < 1e3 for path in paths)
    root = CoupledNewton(eps=0.0, max_iterations=80).root(a, QUARTER)
    assert root.value.isfinite().all() and bool((root.residual <= 4).all()) and bool((root.iterations < 80).all())
    assert torch.equal(root.ok, (root.residual < 0.1) & root.definite)


@pytest.mark.parametrize("norm", ["frobenius", "max"])
@pytest.mark.parametrize("solver", [CoupledNewton, NewtonDB, HigherOrder], ids=lambda s: s.__name__)
def test_nothing_is_done_after_rounding_is_reached(solver: Any, norm: Any) -> None:
    """Without a tolerance in the way: ten steps or so at condition 1e2, and one that shows that the error stands."""
    a = turned(spectra(12, 1e2)).float()
    root = solver(eps=0.0, norm=norm, tolerance=1e-30, max_iterations=200).root(a, HALF)
    assert root.ok.all() and bool((root.iterations <= 25).all())


@pytest.mark.parametrize("solver", [CoupledNewton, NewtonDB, HigherOrder], ids=lambda s: s.__name__)
def test_one_eigenvalue_far_from_converged_is_noticed(solver: Any) -> None:
    """d = 64, one eigenvalue 1e-6, too few steps: an error of 1 / d in the largest entry, and of 1 in the norm."""
    a = turned(spectra(64, 1e6)[2:3])
    few = solver(eps=0.0, max_iterations=6, check_every=1)
    root = few.root(a, HALF)
    assert float(errors(root.value, defined(a, HALF))) > 0.5
    assert not root.ok.any() and float(root.residual) > 0.9
    assert float(few.replace(norm="max").root(a, HALF).residual) < 0.3
    assert solver(eps=0.0, norm="max").root(a, HALF).ok.all() and solver(eps=0.0).root(a, HALF).ok.all()


@pytest.mark.parametrize("seed", range(3))
def test_an_underestimated_size_gives_roots_of_the_wrong_sign_that_residuals_pass(seed: int) -> None:
    """Eigenvalues between 0.97 and 1 of the largest: at 0.97 of it as size the first pair of CANS turns their sign, and
    Z C Z = I all the same. A bound, or the largest eigenvalue and 1 %, does not."""
    values = torch.cat([torch.linspace(1, 0.97, 4), torch.logspace(-0.5, -4, 28)]).double()[None]
    a = turned(values, seed)
    exact = defined(a, HALF)
    low = CANS(eps=0.0, safety=1.0, scaling=PowerIteration(steps=200, factor=0.97))
    root = low.root(a, HALF)
    inner = low.solve(a / low.scaling.upper(a)[:, None, None], HALF, 0.0)
    assert int((torch.linalg.eigvalsh(inner.root) < 0).sum()) == 3
    assert float(inner.residual) < 1e-3 and not root.definite.any() and not root.ok.any()
    assert float(errors(inner.root / low.scaling.upper(a).sqrt()[:, None, None], exact)) > 1e-2
    for scaling in (GuaranteedBound(), PowerIteration(steps=200, factor=1.01)):
        right = CANS(eps=0.0, scaling=scaling).root(a, HALF)
        assert right.ok.all() and right.definite.all()
        assert float(errors(right.value, exact)) < 1e-4  # the band of the schedule


WISHART = torch.linspace(1, 0, 64, dtype=torch.float64)[None] ** 1.5
"""Many eigenvalues of the order of the largest, which the Frobenius norm exceeds 4 times."""


@pytest.mark.parametrize(
    ("eps", "steps", "band"),
    [
        (2e-3, 10, (1e-3, 0.1)),
        (2e-3, 15, (0.0, 1e-5)),
        (2e-7, 10, (0.5, 1.1)),
        (2e-7, 15, (0.3, 1.1)),
        (2e-7, 25, (0.0, 0.02)),
    ],
)
def test_denman_beavers_needs_steps_by_its_ridge(eps: float, steps: int, band: tuple[float, float]) -> None:
    """float32: a step raises the smallest eigenvalue 9/4 times, from the ridge to 1."""
    a = turned(WISHART).float()
    solver = NewtonDB(eps=eps, relative=False, scaling=PowerIteration(factor=2.0), max_iterations=steps, max_error=1e9)
    root = solver.root(a, HALF)
    assert band[0] <= float(errors(root.value, defined(a, HALF, eps))) <= band[1]
    assert (float(root.residual) < 0.1) == (band[1] < 0.5)


@pytest.mark.parametrize(("solver", "exponent"), [(CoupledNewton, QUARTER), (NewtonDB, HALF)])
def test_a_tight_size_saves_steps_unless_the_ridge_needs_them_all(solver: Any, exponent: Fraction) -> None:
    """10 steps at twice the power iteration instead of the Frobenius norm: an error at least halved at a ridge of 2e-3,
    no difference at 2e-7."""
    a = turned(WISHART).float()
    found = {}
    for eps in (2e-3, 2e-7):
        for scaling in (PowerIteration(factor=2.0), "frobenius"):
            made = solver(eps=eps, relative=False, scaling=scaling, max_iterations=10, max_error=1e9)
            found[eps, scaling == "frobenius"] = float(errors(made.root(a, exponent).value, defined(a, exponent, eps)))
    assert found[2e-3, True] >= 2 * found[2e-3, False]
    assert 0.8 < found[2e-7, True] / found[2e-7, False] < 1.25 and found[2e-7, True] > 0.3


@pytest.mark.parametrize("scaling", ["guaranteed", "frobenius", "trace"])
def test_the_series_covers_the_ridge_of_a_null_space(scaling: Any) -> None:
    """A ridge of 1e-2 of the size becomes 1e-2 / (1 + 1e-2 s) of the size with it, s that of the identity: 64 for the
    trace. All but one eigenvalue lie there, so that a fit from 1e-2 would be seen. 1e-5: exp(-2 200 (6e-3)^(1/2))."""
    a = turned(torch.eye(64, dtype=torch.float64)[:1])
    solver = Chebyshev(eps=1e-2, degree=200, scaling=scaling)
    root = solver.root(a, QUARTER)
    assert root.ok.all() and float(errors(root.value, defined(a, QUARTER, ridge_of(solver, a)))) <= 1e-5


@pytest.mark.parametrize(("condition", "biased", "fitted"), [(9.0, 0.1, 1e-6), (1e3, 0.3, 0.08), (1e6, 0.45, 1.0)])
def test_a_series_on_too_wide_an_interval_is_biased(condition: float, biased: float, fitted: float) -> None:
    """20 terms on [1e-10, 1 + 1e-10] against 20 terms on [1 / condition, 1]."""
    a = turned(spectra(64, condition)[:1])
    size = {"degree": 20, "max_error": 1e9, "scaling": PowerIteration(steps=300), "eps": 0.0}
    wide = Chebyshev(interval=(1e-10, 1 + 1e-10), **size).root(a, QUARTER)
    narrow = Chebyshev(interval=(1 / condition, 1 + 1e-10), **size).root(a, QUARTER)
    assert float(errors(wide.value, defined(a, QUARTER))) > biased
    assert float(errors(narrow.value, defined(a, QUARTER))) < fitted


# ----------------------------------------------------------------------------------------------- rejection and retries
def test_what_fails_is_solved_again_with_ten_times_the_ridge() -> None:
    """12 steps take p = 2 to eigenvalues of 1e-4. The first matrix needs no second attempt and keeps every bit; the
    second fails at 1e-8 ... and is solved at the first ridge times 10^i that suffices."""
    a = torch.stack([turned(spectra(6, 1e2))[0], turned(spectra(6, 1e12))[0], torch.full((6, 6), torch.nan).double()])
    first = CoupledNewton(eps=1e-8, max_iterations=12)
    once, again = first.root(a, HALF), first.replace(retries=6).root(a, HALF)
    assert once.ok.tolist() == [True, False, False] and again.ok.tolist() == [True, True, False]
    assert torch.equal(again.value[0], once.value[0]) and again.iterations[0] == once.iterations[0]
    size = torch.linalg.matrix_norm(a[1])
    tried = [float(errors(again.value[1:2], defined(a[1:2], HALF, float(size) * 1e-8 * 10**i))) for i in range(7)]
    attempt = tried.index(min(tried))
    assert attempt >= 2 and tried[attempt] < 0.05  # a residual of 0.1 at most, half of it in the root
    assert not first.replace(retries=attempt - 1).root(a, HALF).ok[1]
    assert first.replace(retries=attempt).root(a, HALF).ok[1]


class AttemptForTest(Iterative):
    """I, with a residual by attempt where the first entry of C is near 1; (ridge, matrices) given are remembered."""

    kind: Literal["attempt_for_test"] = "attempt_for_test"
    residuals: tuple[float, ...] = Field(default=(0.5, 0.01, 0.02), strict=False, description="of attempts 0, 1, ...")
    seen: ClassVar[list[tuple[float, int]]] = []

    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        attempt = len(self.seen)
        self.seen.append((ridge, len(c)))
        residual = torch.where(c[:, 0, 0] > 0.9, c.new_tensor(self.residuals[attempt]), 1e-3)
        return Solved(
            torch.eye(2).to(c).expand_as(c), residual, torch.full_like(residual, attempt + 1, dtype=torch.int32)
        )


@pytest.mark.parametrize(
    ("fields", "calls", "kept", "ok"),
    [
        ({}, 1, 0, False),
        ({"retries": 5}, 2, 1, True),
        ({"retries": 2, "retry_above": 0.005}, 3, 1, True),
        ({"retries": 2, "residuals": (0.5, 0.4, 0.3)}, 3, 0, False),
        ({"retries": 1, "retry_above": 0.01, "residuals": (0.05, 0.06)}, 2, 0, True),
        ({"retries": 2, "retry_above": 0.6}, 1, 0, False),
    ],
)
def test_attempts_take_the_failed_only_and_keep_the_better(
    fields: dict[str, Any], calls: int, kept: int, ok: bool
) -> None:
    AttemptForTest.seen.clear()
    a = torch.diag_embed(torch.tensor([[4.0, 0.0], [1.0, 3.0], [torch.nan, 0.0]], dtype=torch.float64))
    solver = AttemptForTest(eps=1e-4, scaling="frobenius", **fields)
    root = solver.root(a, HALF)
    ridges, matrices = zip(*AttemptForTest.seen, strict=True)
    assert ridges == pytest.approx([1e-4 * 10**i for i in range(calls)]) and matrices == (3, 1, 1)[:calls]
    assert root.ok.tolist() == [ok, True, False] and root.iterations[:2].tolist() == [kept + 1, 1]
    assert float(root.residual[0]) == solver.residuals[kept]


def test_a_root_may_be_accepted_and_still_worth_another_attempt() -> None:
    """`retry_above` below `max_error`: the better of the two is kept."""
    a = turned(spectra(6, 1e12))[:1]
    solver = CoupledNewton(eps=1e-4, max_iterations=13, max_error=0.9)
    once = solver.root(a, HALF)
    again = solver.replace(retries=1, retry_above=1e-5).root(a, HALF)
    assert (
        once.ok.all()
        and again.ok.all()
        and float(once.residual) > 1e-5
        and float(again.residual) < float(once.residual)
    )
    assert torch.equal(solver.replace(retries=1).root(a, HALF).value, once.value)


def test_a_fourth_root_is_no_better_than_the_square_root_it_is_made_of() -> None:
    a = turned(spectra(12, 1e4)).float()
    half, quarter = NewtonDB().root(a, HALF), NewtonDB().root(a, QUARTER)
    assert bool((quarter.residual >= half.residual).all()) and bool((quarter.iterations > half.iterations).all())


@pytest.mark.parametrize(
    "solver", [s for s in SOLVERS if s.kind not in ("cans", "coupled_minimax")], ids=lambda s: s.kind
)
def test_a_root_that_is_not_good_enough_is_rejected(solver: Any) -> None:
    few = {"degree": 5} if solver.kind == "chebyshev" else {"max_iterations": 2}
    a = turned(spectra(7, 1e8))
    root = solver.replace(**few).root(a, HALF)
    assert not root.ok.any() and root.value.isfinite().all() and bool((root.residual >= 0.1).all())


# ----------------------------------------------------------------------------------------------------------- precision
LOW = {
    (CoupledNewton, QUARTER): 1.0,
    (CoupledNewton, HALF): 1.0,
    (CoupledMinimax, QUARTER): 1.0,
    (CoupledMinimax, HALF): 1.0,
    (HigherOrder, QUARTER): 1.0,
    (NewtonDB, QUARTER): 1.0,
    (NewtonDB, HALF): 1.0,
    (CANS, HALF): 10.0,
    (Chebyshev, QUARTER): 2.0,
}
"""Error allowed, in units of e * condition * rounding unit. CANS: ten steps whose first multiplies by 5."""


@pytest.mark.parametrize(("precision", "unit"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
@pytest.mark.parametrize(("solver", "exponent"), LOW, ids=lambda x: getattr(x, "__name__", str(x)))
def test_products_of_low_precision(solver: Any, exponent: Fraction, precision: Any, unit: float) -> None:
    """Rounding the factors to u is a change of u in A, hence of K u in its smallest eigenvalue, e K u in the root; a
    ridge of 1e-2 makes K at most 1e2. It is seen: float32 is a hundred times better."""
    a = turned(spectra(32, 1e6)).float()
    low = solver(eps=1e-2, precision=precision, max_error=1e9)
    exact = defined(a, exponent, ridge_of(low, a))
    worst = float(errors(low.root(a, exponent).value, exact).max())
    assert worst <= LOW[solver, exponent] * float(exponent) * 1e2 * unit
    assert worst >= 20 * float(errors(low.replace(precision="input").root(a, exponent).value, exact).max())


@pytest.mark.parametrize("exponent", [HALF, ONE], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_float16_neither_overflows_nor_vanishes(scale: float, exponent: Fraction) -> None:
    """A size overestimated a million times makes C 1e-6, below the smallest normal float16, 6e-5, and its inverse 1e6,
    above the largest, 65504. Their sizes are taken out of products: 4 e K u at condition 10, u = 2^-11."""
    a = turned(spectra(16, 10.0)).float()
    solver = CoupledNewton(eps=1e-9, precision="float16", scaling=PowerIteration(factor=1e6), max_iterations=60)
    root = solver.root(a * scale, exponent)
    assert root.ok.all()
    worst = errors(root.value * scale ** float(exponent), defined(a, exponent, ridge_of(solver, a)))
    assert float(worst.max()) <= 4 * float(exponent) * 10 * 2.0**-11


# -------------------------------------------------------------------------------------------------------------- bounds
BOUNDS = ("guaranteed", "frobenius", "infinity", "trace")


def bound(kind: str, **fields: Any) -> Any:
    return validated(families()["eigenvalue_bound"], {"kind": kind, **fields})


@st.composite
def semidefinite(draw: st.DrawFn) -> Tensor:
    """`[1, d, d]` float64: random, low rank, constant, diagonal, block, with signs, sizes of rows up to 1e8 apart."""
    d, rank = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    x = normal(d, rank, seed=draw(st.integers(0, 10_000)))
    x = draw(st.sampled_from([x, x.abs(), x.sign(), torch.ones_like(x), x * (x > 1.0), torch.eye(d, rank).double()]))
    span = draw(st.floats(0.0, 8.0))
    x = x * 10 ** (-span * torch.linspace(0, 1, d, dtype=torch.float64))[:, None]
    return (x @ x.T)[None] * 2.0 ** draw(st.integers(-60, 60))


@pytest.mark.parametrize("kind", BOUNDS)
@DTYPES
@given(a=semidefinite())
def test_bounds_are_bounds(kind: str, dtype: torch.dtype, a: Tensor) -> None:
    """At least the largest eigenvalue of the very matrix given, in float64; only the guaranteed one owes its rounding
    margin to nobody, the others are allowed 2 d roundings. Tight where one eigenvalue dominates or all are equal."""
    a = a.to(dtype)
    a = (a + a.mT) / 2
    largest = float(torch.linalg.eigvalsh(a.double())[0, -1])
    allowed = 1e-14 if kind == "guaranteed" else 2 * a.shape[-1] * UNIT[dtype]
    upper = float(bound(kind).upper(a)[0])
    assert upper >= largest * (1 - allowed)
    assert upper <= largest * a.shape[-1] * (1 + 1e-4)
    if kind == "guaranteed":
        others = [float(bound(other).upper(a)[0]) for other in BOUNDS[1:]]
        assert upper <= min(others) * (1 + 2e-5)  # the margin, (2 d + 10) u, and the floor of 2^-20 in the row weights


def test_the_guaranteed_bound_is_the_less_of_two_formulas() -> None:
    """Once each. 1e-10: the margin, and row weights that are at least 2^-20 of the largest."""
    mixed = torch.tensor([[2.0, -1.0, 0.5], [-1.0, 3.0, 0.0], [0.5, 0.0, 1.0]], dtype=torch.float64)
    apart = torch.tensor([[3.0, 0.1, 0.0], [0.1, 2.9, 0.0], [0.0, 0.0, 0.1]], dtype=torch.float64)
    for a, tighter in ((mixed, "traces"), (apart, "rows")):
        mean, x = float(a.trace()) / 3, a.abs() @ torch.ones(3, dtype=torch.float64)
        spread = (float((a @ a).trace()) / 3 - mean**2) ** 0.5
        values = {"traces": mean + spread * 2**0.5, "rows": float(((a.abs() @ x) / x).max())}
        assert min(values, key=lambda name: values[name]) == tighter
        assert abs(float(bound("guaranteed").upper(a[None])) - values[tighter]) < 1e-10


@pytest.mark.parametrize("row", TABLE["eigenvalue_bound"], ids=str)
@DTYPES
def test_a_bad_matrix_leaves_the_bounds_of_others(row: Row, dtype: torch.dtype) -> None:
    made, a = bound(**row.make), turned(spectra(9, 1e4)).to(dtype)
    spoiled = torch.cat([a[:1], torch.full_like(a[:1], torch.nan)])
    assert abs(float(made.upper(spoiled)[0] / made.upper(a)[0]) - 1) < 1e-6


@pytest.mark.parametrize("vectors", [1, 16])
def test_power_iteration_is_an_estimate_from_below(vectors: int) -> None:
    """At most the largest eigenvalue, better with more steps, within 1e-6 after 100 at a gap of a tenth."""
    a = turned(0.9 ** torch.arange(12.0).double().expand(3, -1))
    found = [float(PowerIteration(steps=steps, vectors=vectors).upper(a).max()) for steps in (1, 10, 100)]
    assert all(x <= 1 + 1e-12 for x in found) and found[0] < found[1] < found[2] and found[2] > 1 - 1e-6
    twice = PowerIteration(steps=10, factor=2.0).upper(a)
    assert torch.allclose(twice, 2 * PowerIteration(steps=10).upper(a))
    assert torch.equal(twice, PowerIteration(steps=10, factor=2.0).upper(a))
