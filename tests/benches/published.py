"""The Kronecker factors that are optimal by published divergences, as definitions that tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from eigengraft.experiments.benches.matrices import matrix_power

FLOOR = 1e-12
"""Ratio to the largest eigenvalue to which smaller eigenvalues are raised before powers, as in the bench."""


def gram_factors(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return L = E[G G^T] and R = E[G^T G]."""
    return torch.einsum("kij,klj->il", g, g) / len(g), torch.einsum("kij,kil->jl", g, g) / len(g)


def fixed_point(g: Tensor, q: float, rounds: int = 30) -> tuple[Tensor, Tensor]:
    """Return L = E[G R^(q-1) G^T] / tr(R^q),  R = E[G^T L^(q-1) G] / tr(L^q),  by alternation from the identity.

    The trace-power Bregman optimum: q = 2 Frobenius, 1 von Neumann, 1/2 square root, 0 Kullback-Leibler.
    """
    m, n = g.shape[1:]
    left, right = torch.eye(m, dtype=g.dtype), torch.eye(n, dtype=g.dtype)
    for _ in range(rounds):
        whitened = g @ matrix_power(right, q - 1, FLOOR)
        left = torch.einsum("kij,klj->il", whitened, g) / len(g) / matrix_power(right, q, FLOOR).trace()
        whitened = matrix_power(left, q - 1, FLOOR) @ g
        right = torch.einsum("kij,kil->jl", whitened, g) / len(g) / matrix_power(left, q, FLOOR).trace()
    return left, right
