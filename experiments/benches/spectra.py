"""Symmetric positive semi-definite test matrices with a known spectrum, and factors recorded from training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from eigengraft.component import Component, validated

from .bench import Declaration

FILE = Path(__file__).with_name("recorded.npz")
"""File of the recorded factors. `record_factors.py` writes it."""


@cache
def recorded_factors() -> Tensor:
    """Return all recorded factors `[N, 64, 64]` in float32, in the order of training. Cached: do not write into it."""
    with np.load(FILE) as file:
        triangles = torch.from_numpy(np.stack([file[name] for name in sorted(file.files) if name != "made"]))
    d = int((2 * triangles.shape[1]) ** 0.5)
    upper = triangles.new_zeros(len(triangles), d, d)
    rows, columns = torch.triu_indices(d, d)
    upper[:, rows, columns] = triangles
    return upper + upper.triu(1).mT


def with_unit_norm(a: Tensor) -> Tensor:
    """Return symmetric matrices `[N, d, d]` in float64, each divided by its largest eigenvalue."""
    a = a.double()
    size: Tensor = torch.linalg.matrix_norm(a, ord=2)
    return a / size.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]


class Spectrum(Component, ABC, family="spectrum"):
    """A kind of test matrices, made as stacks `[N, d, d]` in float64 whose largest eigenvalue is 1.

    Equal arguments of `stack` give equal stacks.
    """

    singular: ClassVar[bool] = False
    """True if some matrices have no inverse."""

    @abstractmethod
    def stack(self, count: int, d: int, seed: int) -> Tensor | None:
        """Return at most `count` matrices of order d, or None if the spectrum has no matrices of that order."""


class Synthetic(Spectrum):
    """Q diag(lambda) Q^T with Q uniform over the orthogonal matrices."""

    @abstractmethod
    def eigenvalues(self, d: int) -> Tensor:
        """Return the eigenvalues lambda `[d]`. The largest one is 1."""

    def stack(self, count: int, d: int, seed: int) -> Tensor | None:
        q = orthogonal(count, d, seed)
        return (q * self.eigenvalues(d).unsqueeze(0).unsqueeze(0)) @ q.mT


class Geometric(Synthetic):
    """lambda_i = condition^(-i / (d - 1)),  i = 0 .. d - 1"""

    kind: Literal["geometric"] = "geometric"
    condition: float = Field(1e4, ge=1, description="largest over smallest eigenvalue")

    def eigenvalues(self, d: int) -> Tensor:
        return torch.pow(self.condition, -torch.linspace(0, 1, d, dtype=torch.float64))


class PowerLaw(Synthetic):
    """lambda_i = i^(-power),  i = 1 .. d: similar to the spectra of factors of trained layers"""

    kind: Literal["power_law"] = "power_law"
    power: float = Field(2.0, ge=0, description="decay of the eigenvalues")

    def eigenvalues(self, d: int) -> Tensor:
        return torch.arange(1, d + 1, dtype=torch.float64) ** -self.power


class Clustered(Synthetic):
    """Two clusters: a share of the eigenvalues at 1, the rest at 1 / ratio.

    A small share leaves one large eigenvalue, a signal of rank one above a floor. A share near 1 leaves one small one.
    The default is the test matrix of 4-bit Shampoo (Wang et al. 2024, arXiv:2405.18144): of 1200 eigenvalues 800 are
    1000 and 400 are 1.
    """

    kind: Literal["clustered"] = "clustered"
    ratio: float = Field(1000.0, ge=1, description="upper over lower value")
    share: float = Field(2 / 3, gt=0, lt=1, description="share of the eigenvalues in the upper cluster")

    def eigenvalues(self, d: int) -> Tensor:
        upper = max(1, min(round(self.share * d), d - 1))  # at least one in each cluster
        values = torch.full((d,), 1 / self.ratio, dtype=torch.float64)
        values[:upper] = 1
        return values


class RankDeficient(Synthetic):
    """A share of the eigenvalues falls geometrically from 1 to 1 / condition, the rest is 0, as after few gradients."""

    kind: Literal["rank_deficient"] = "rank_deficient"
    singular: ClassVar[bool] = True
    share: float = Field(0.25, gt=0, le=1, description="rank over size")
    condition: float = Field(1e2, ge=1, description="largest over smallest nonzero eigenvalue")

    def eigenvalues(self, d: int) -> Tensor:
        rank = max(1, round(self.share * d))
        nonzero = self.condition ** -torch.linspace(0, 1, rank, dtype=torch.float64)
        return torch.cat([nonzero, torch.zeros(d - rank, dtype=torch.float64)])


class Recorded(Spectrum):
    """Factors of layers in training, recorded by `record_factors.py`. For sizes below 64 the leading d x d entries are
    used.
    """

    kind: Literal["recorded"] = "recorded"
    singular: ClassVar[bool] = True

    def stack(self, count: int, d: int, seed: int) -> Tensor | None:
        factors = recorded_factors()
        if d > factors.shape[-1]:
            return None
        start = seed % len(factors)
        return with_unit_norm(torch.roll(factors, -start, 0)[:count, :d, :d])


def orthogonal(count: int, d: int, seed: int) -> Tensor:
    """Return orthogonal matrices `[count, d, d]` in float64, drawn uniformly."""
    normal = np.random.default_rng((seed, d)).standard_normal((count, d, d))
    q, r = torch.linalg.qr(torch.from_numpy(normal))
    signed: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return signed


SPECTRA: tuple[Declaration, ...] = (
    *({"kind": "geometric", "condition": condition} for condition in (1e1, 1e2, 1e3, 1e4, 1e5, 1e6)),
    {"kind": "clustered", "ratio": 1e4, "share": 0.01},
    {"kind": "clustered", "ratio": 1e4, "share": 0.99},
    {"kind": "power_law"},
    {"kind": "clustered"},
    {"kind": "rank_deficient"},
    {"kind": "recorded"},
)


def default_spectra() -> tuple[Spectrum, ...]:
    """Return the spectra that benches have by default."""
    return tuple(validated(Spectrum, dict(item)) for item in SPECTRA)  # type: ignore[type-abstract]
