"""A statistic whose eigenbasis turns slowly, as it does in training."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .spectra import Synthetic, orthogonal


class DriftSettings(Protocol):
    """The motion of the statistic; fields of the bench of bases."""

    @property
    def refreshes(self) -> tuple[int, ...]:
        """Numbers of refreshes after which the basis is measured."""

    @property
    def every(self) -> int:
        """Steps between refreshes."""

    @property
    def beta(self) -> float:
        """Decay of the statistic."""

    @property
    def drift(self) -> float:
        """Turn of the basis, in radians per step."""

    @property
    def count(self) -> int:
        """Matrices in the stack."""

    @property
    def seed(self) -> int:
        """Seed of all random numbers."""


def drifting_statistic(settings: DriftSettings, spectrum: Synthetic, d: int) -> list[Tensor]:
    """The statistic `[N, d, d]` at every refresh, float64, bias corrected.

    A <- beta A + (1 - beta) G G^T / d,  G = U_t diag(sqrt lambda) Z_t,  Z_t standard normal `[d, d]`,
    U_t = U_0 exp(t drift K) with K antisymmetric of spectral norm 1.
    """
    random = np.random.default_rng((settings.seed, d, 1))
    skew = torch.from_numpy(random.standard_normal((settings.count, d, d)))
    skew = skew - skew.mT
    skew = skew / torch.linalg.matrix_norm(skew, ord=2).clamp_min(1e-300)[:, None, None]
    turn = torch.linalg.matrix_exp(settings.drift * skew)
    u, scale = orthogonal(settings.count, d, settings.seed), spectrum.eigenvalues(d).sqrt()
    a, path = torch.zeros(settings.count, d, d, dtype=torch.float64), []
    for step in range(1, max(settings.refreshes) * settings.every + 1):
        g = (u * scale) @ torch.from_numpy(random.standard_normal((settings.count, d, d)))
        a = torch.baddbmm(a, g, g.mT, beta=settings.beta, alpha=(1 - settings.beta) / d)
        u = u @ turn
        if step % settings.every == 0:
            path.append(a / (1 - settings.beta**step))
    return path
