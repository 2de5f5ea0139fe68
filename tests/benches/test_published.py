"""Published claims about statistics and polar solvers, measured on gradients of a small language model."""

import itertools
from statistics import fmean

import pytest
import torch

from eigengraft.experiments.benches import statistics as kronecker
from eigengraft.experiments.benches.matrices import GRADIENT_LAYERS, layer_gradients, matrix_power
from eigengraft.preconditioners import NewtonSchulz
from eigengraft.preconditioners.polar.coefficients import CoefficientName

from .published import FLOOR, fixed_point, gram_factors

pytestmark = pytest.mark.slow

WIDTH, SAMPLES = 12, 300


def test_kronecker_approximations_are_ordered() -> None:
    """Cosines with C = E[vec G vec G^T]: the best Kronecker product > L x R > L^(1/2) x R^(1/2) > either side alone >
    the diagonal, and L x R has at least 0.95 of the best (Morwani et al. 2024, arXiv:2406.17748)."""
    seen, one = layer_gradients(WIDTH, SAMPLES + SAMPLES // 2)[:SAMPLES], torch.eye(WIDTH, dtype=torch.float64)
    for layer in range(len(GRADIENT_LAYERS)):
        c = kronecker.second_moment(seen[:, layer])
        left, right = gram_factors(seen[:, layer])
        best, product = kronecker.best_cosine(c, WIDTH, WIDTH), kronecker.cosine_product(c, left, right)
        root = kronecker.cosine_product(c, matrix_power(left, 0.5, FLOOR), matrix_power(right, 0.5, FLOOR))
        sides = [kronecker.cosine_product(c, left, one), kronecker.cosine_product(c, one, right)]
        assert best >= product >= 0.95 * best and product > root + 0.01 and root > max(sides) + 0.01
        assert min(sides) > kronecker.cosine(c, c.diagonal().diag()) + 0.005


@pytest.mark.parametrize("count", [SAMPLES, 40])
def test_gain_errors_are_ordered(count: int) -> None:
    """On held-out gradients: Frobenius > von Neumann > square root > Kullback-Leibler; by angle the reverse (Liu et al.
    2026)."""
    gradients = layer_gradients(WIDTH, SAMPLES + SAMPLES // 2)
    unseen, errors, cosines = gradients[SAMPLES:], [], []
    for q in (2.0, 1.0, 0.5, 0.0):
        factors = [fixed_point(g, q) for g in gradients[:count].unbind(1)]
        pairs = list(zip(unseen.unbind(1), factors, strict=True))
        errors.append(fmean(kronecker.gain_error(g, *f) for g, f in pairs))
        cosines.append(fmean(kronecker.cosine_product(kronecker.second_moment(g), *f) for g, f in pairs))
    assert all(one > 1.05 * other for one, other in itertools.pairwise(errors))
    if count == SAMPLES:
        assert errors[3] < 0.1 and cosines[0] > cosines[3] + 0.01


@pytest.mark.parametrize(
    ("name", "steps", "band"),
    [
        ("jordan", 5, (0.682, 1.134)),
        ("you", 5, (0.978, 1.032)),
        ("polar_express", 5, (0.870, 1.124)),
        ("polar_express", 8, (1.0, 1.0)),
        ("polar_express_5", 5, (0.859, 1.141)),
        ("cubic", 8, (0.25, 1.0)),
    ],
)
def test_singular_values_end_up_in_a_band(name: CoefficientName, steps: int, band: tuple[float, float]) -> None:
    """From [0.01, 1]: steps are schedules, not iterations (Jordan et al. 2024; J. You; Amsel et al. 2025).

    The matrices are diag(cos t, sin t): their Frobenius norm is 1, so that the solver's scaling changes no value.
    """
    t = torch.logspace(-2, 0, 1000, dtype=torch.float64).clamp(0.01, 1).asin()
    values = torch.stack([t.cos(), t.sin()], dim=-1)
    found = NewtonSchulz(steps=steps, coefficients=name).polar(torch.diag_embed(values))
    image = found.diagonal(dim1=-2, dim2=-1)[values >= 0.01]
    assert (float(image.min()), float(image.max())) == pytest.approx(band, abs=0.005)
