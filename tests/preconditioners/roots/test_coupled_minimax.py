"""The polynomials of `coupled_minimax`, its number of products, and its accuracy beside `coupled_newton`."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eigengraft.preconditioners import CoupledMinimax, CoupledNewton, PowerIteration, RootSolver
from eigengraft.preconditioners.roots.coupled_minimax import minimax, polynomials

from ...trajectories import normal

F32, F64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


class Products(TorchDispatchMode):
    """Counts products of two stacks of square matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.count += args[-2].shape == args[-1].shape
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("low", "unit"), [(3e-8, F32), (1e-2, F32), (0.5, F32), (1e-17, F64), (0.99, F64)])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 8, 31, 64])
def test_all_eigenvalues_tend_to_one_and_the_root_stays_positive(p: int, low: float, unit: float) -> None:
    """80 units: rounding of a power p of numbers in float64."""
    x = torch.logspace(0, 1, 500, base=low, dtype=torch.float64)
    for a, b, c in polynomials(p, low, unit):
        f = a + b * (1 - x) + c * (1 - x) ** 2
        assert float(f.min()) > 0
        x = f**p * x
        assert float(x.max()) <= 1 + 1e-13
    assert float(x.min()) >= 1 - 80 * unit


@pytest.mark.parametrize("low", [1e-3, 0.1, 0.9])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_the_error_of_a_best_polynomial_has_four_extrema_of_one_size(p: int, low: float) -> None:
    """By the alternation theorem no polynomial of the second degree has a smaller error."""
    (a, b, c), error = minimax(p, low)
    x = torch.linspace(low, 1, 200_001, dtype=torch.float64)
    rest = x ** (1 / p) * (a + b * (1 - x) + c * (1 - x) ** 2) - 1
    assert float(rest.abs().max()) == pytest.approx(error, rel=1e-6)
    signs = rest[rest.abs() > 0.999 * error].sign()
    assert int((signs[1:] != signs[:-1]).sum()) == 3


def statistic(d: int, rank: int, steps: int) -> Tensor:
    """Averages of Gram matrices of `steps` gradients whose singular values fall as 1 / i."""
    fall = 1 / torch.arange(1.0, d + 1)
    a = torch.zeros(2, d, d)
    for step in range(steps):
        g = fall[:, None] * normal(2, d, rank, seed=step).float()
        a = 0.95 * a + 0.05 * g @ g.mT
    return a


@pytest.mark.parametrize(("p", "products"), [(2, 33), (3, 36), (4, 36), (6, 43), (8, 43)])
@pytest.mark.parametrize(("rank", "steps"), [(1, 1), (4, 10), (8, 100)])
def test_it_needs_fewer_products_than_newton_and_is_as_exact(p: int, products: int, rank: int, steps: int) -> None:
    """Two of the products are squares for the size of the ridge."""
    a = statistic(96, rank, steps)
    values, q = torch.linalg.eigh(a.double())
    values = values.clamp_min(0) + 1e-6 * values[:, -1:]
    exact = (q * values.unsqueeze(1) ** (-1 / p)) @ q.mT

    def solved(solver: RootSolver) -> tuple[int, Tensor]:
        with Products() as counted:
            root = solver.root(a, Fraction(1, p))
        assert root.ok.all()
        return counted.count, torch.linalg.matrix_norm(root.value - exact) / torch.linalg.matrix_norm(exact)

    ridge = PowerIteration(steps=100)
    count, error = solved(CoupledMinimax(relative_to=ridge))
    others, theirs = solved(CoupledNewton(relative_to=ridge))
    assert count == products <= 0.7 * others
    assert bool((error <= 1.5 * theirs + 1e-6).all())


def test_a_matrix_whose_eigenvalues_are_below_the_ridge_counts_as_failed() -> None:
    """An eigenvalue of -2 ridges makes C indefinite; no iterate of it is the root of a positive definite matrix."""
    q = torch.linalg.qr(normal(1, 16, 16, seed=0)).Q.float()
    values = torch.linspace(0.1, 1, 16)
    values[0] = -2e-6
    root = CoupledMinimax(relative_to=PowerIteration(steps=100)).root((q * values) @ q.mT, Fraction(1, 4))
    assert not root.ok.any() and bool(root.value.isfinite().all())
