"""A statistic whose eigenbasis turns slowly, as it does in training."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .spectra import Synthetic, orthogonal


class Course(Protocol):
    """How the statistic moves; the fields of the bench of bases."""

    @property
    def refreshes(self) -> tuple[int, ...]:
        """Refreshes after which is measured."""

    @property
    def every(self) -> int:
        """Steps between refreshes."""

    @property
    def beta(self) -> float:
        """Decay of the statistic."""

    @property
    def drift(self) -> float:
        """Radians a step."""

    @property
    def count(self) -> int:
        """Matrices in the stack."""

    @property
    def seed(self) -> int:
        """Of all random numbers."""


def drifting(course: Course, spectrum: Synthetic, d: int) -> list[Tensor]:
    """The statistic `[N, d, d]` at every refresh, float64, bias corrected.

    A <- beta A + (1 - beta) G G^T / d,  G = U_t diag(sqrt lambda) Z_t,  Z_t standard normal `[d, d]`,
    U_t = U_0 exp(t drift K) with K antisymmetric of spectral norm 1.
    """
    random = np.random.default_rng((course.seed, d, 1))
    skew = torch.from_numpy(random.standard_normal((course.count, d, d)))
    skew = skew - skew.mT
    skew = skew / torch.linalg.matrix_norm(skew, ord=2).clamp_min(1e-300)[:, None, None]
    turn = torch.linalg.matrix_exp(course.drift * skew)
    u, scale = orthogonal(course.count, d, course.seed), spectrum.eigenvalues(d).sqrt()
    a, path = torch.zeros(course.count, d, d, dtype=torch.float64), []
    for step in range(1, max(course.refreshes) * course.every + 1):
        g = (u * scale) @ torch.from_numpy(random.standard_normal((course.count, d, d)))
        a = torch.baddbmm(a, g, g.mT, beta=course.beta, alpha=(1 - course.beta) / d)
        u = u @ turn
        if step % course.every == 0:
            path.append(a / (1 - course.beta**step))
    return path
