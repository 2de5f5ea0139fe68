"""Claims about polar factors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from eigengraft.preconditioners import NewtonSchulz, PolarSolver
from eigengraft.preconditioners.polar.coefficients import NAMED_COEFFICIENTS, CoefficientName

from ..problems.spectra import orthogonal
from . import published_iterations as published
from .registry import Measured, claim


@claim("polar")
def gram_form_of_newton_schulz(quick: bool) -> Iterator[Measured]:
    """The iteration on the Gram matrix alone gives the same polar factor as Newton-Schulz, up to rounding.

    Source: Gram Newton-Schulz (Dao AI Lab), restart after two steps.
    """
    g = orthogonal(1, 32, 0)[0] @ torch.diag(torch.logspace(0, -2, 32, dtype=torch.float64))
    g = torch.cat([g, g.flip(0), g.flip(1), g.T], dim=1)
    g = g / torch.linalg.matrix_norm(g)
    direct = NewtonSchulz().polar(g.unsqueeze(0))[0]
    for name, restart in (("with a restart", 2), ("without", -1)):
        found = published.gram_newton_schulz(g, NAMED_COEFFICIENTS["jordan"] * 5, restart)
        yield Measured(f"published, {name}: relative difference, float64", _relative(found, direct), high=1e-10)
    if "gram_newton_schulz" in PolarSolver.members:
        for restart in (1, 2, 5):
            ours = PolarSolver.model_validate({"kind": "gram_newton_schulz", "restart": restart})
            difference = _relative(ours.polar(g.unsqueeze(0))[0], direct)
            yield Measured(f"ours, restart {restart}: relative difference, float64", difference, high=1e-10)


@claim("polar")
def newton_schulz_bands(quick: bool) -> Iterator[Measured]:
    """Singular values from [0.01, 1] end up in a known band, which is not 1: steps are schedules, not iterations.

    Source: Jordan et al. 2024 (Muon); J. You (modded-nanogpt); Amsel et al. 2025, arXiv:2505.16932; bands measured.
    """
    bands: tuple[tuple[CoefficientName, int, tuple[float, float]], ...] = (
        ("jordan", 5, (0.682, 1.134)),
        ("you", 5, (0.978, 1.032)),
        ("polar_express", 5, (0.870, 1.124)),
        ("polar_express", 8, (1.0, 1.0)),
        ("polar_express_5", 5, (0.859, 1.141)),
        ("cubic", 8, (0.25, 1.0)),
    )
    for name, steps, (low, high) in bands:
        values = image(name, steps, 1000 if quick else 20_000)
        yield Measured(f"{name}, {steps} steps: least", float(values.min()), low - 0.005, low + 0.005)
        yield Measured(f"{name}, {steps} steps: largest", float(values.max()), high - 0.005, high + 0.005)


def image(coefficients: CoefficientName, steps: int, points: int) -> torch.Tensor:
    """Images of singular values from 0.01 to 1 under steps with these coefficients.

    The matrices are diag(cos t, sin t): their Frobenius norm is 1, so that the solver's scaling changes no value.
    """
    t = torch.logspace(-2, 0, points, dtype=torch.float64).clamp(0.01, 1).asin()
    values = torch.stack([t.cos(), t.sin()], dim=-1)
    solver = NewtonSchulz(steps=steps, coefficients=coefficients)
    return solver.polar(torch.diag_embed(values)).diagonal(dim1=-2, dim2=-1)[values >= 0.01]


def _relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(x - reference) / torch.linalg.matrix_norm(reference))
