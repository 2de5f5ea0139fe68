"""Inverse roots by the Chebyshev series of x^(-1/p): one polynomial, no iteration (DASH, arXiv:2602.02016)."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from eigengraft.numerics import identity_like

from .bounds import EigenvalueBound, GuaranteedBound
from .coupled import rational
from .iterative import Iterative, Solved, largest_entry, product


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class Chebyshev(Iterative):
    """sum over k <= degree of c_k T_k(S),  S = (2 C - (low + high) I) / (high - low)

    c_k are the coefficients of x^(-1/p) on [low, high]; C^(-q/p) is the q-th power (DASH, arXiv:2602.02016). Summed by
    Clenshaw's recurrence, one product of `[N, d, d]` for each degree. The interval, in units of the size t, must hold
    the eigenvalues of C, [r / t, 1] with r the ridge and t the size with it. Takes e = q/p with p <= 64 and q <= 8.

    The error falls as exp(-2 degree sqrt(low / high)), so that a ridge of 1e-3 takes about a hundred terms. A fit on a
    wider interval has a bias: [1e-10, 1] with 20 terms, as in DASH, is off by more than a tenth already at condition 9.
    The residual is max |X^p C - I|.
    """

    kind: Literal["chebyshev"] = "chebyshev"
    eps: float = Field(default=1e-3, ge=0, le=1, description="ridge, in units of the matrix, or of its size")
    degree: int = Field(default=100, ge=1, le=1000, description="degree of the polynomial")
    interval: Annotated[tuple[float, float] | None, BeforeValidator(_pair)] = Field(
        default=None, description="[low, high], in units of the size; default: from the relative ridge to 1"
    )
    scaling: EigenvalueBound = Field(
        default=GuaranteedBound(), description="size that a matrix is divided by before it is solved"
    )

    @model_validator(mode="after")
    def _knows_its_interval(self) -> Self:
        if self.interval is not None and not 0 < self.interval[0] < self.interval[1]:
            raise ValueError(f"chebyshev: an interval [low, high] with 0 < low < high is required, got {self.interval}")
        if self.interval is None and not (self.relative and self.relative_to is None and self.eps > 0):
            raise ValueError(
                "chebyshev: the default interval needs a ridge relative to `scaling` (relative: true, "
                "relative_to: null, eps > 0), otherwise give `interval`"
            )
        return self

    def check(self, exponent: Fraction) -> str | None:
        return rational(self.kind, exponent)

    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        below, above = self.interval or (ridge / (1 + ridge * self._size_of_identity(c.shape[-1])), 1.0)
        p = exponent.denominator
        first, *coefficients = _coefficients(self.degree, below, above, 1 / p)
        eye = identity_like(c)
        s = (2 * c - (below + above) * eye) / (above - below)
        b, before = coefficients[-1] * eye, torch.zeros_like(c)
        for coefficient in reversed(coefficients[:-1]):
            b, before = coefficient * eye + 2 * product(s, b, self.precision) - before, b
        x = first * eye + product(s, b, self.precision) - before
        residual = largest_entry(torch.bmm(torch.linalg.matrix_power(x, p), c) - eye)
        steps = torch.full_like(residual, self.degree, dtype=torch.int32)
        return Solved(x, residual, steps, exponent.numerator)

    def _size_of_identity(self, d: int) -> float:
        """What a ridge of 1 adds to the size, at most, in units of the ridge: asked of no device."""
        return float(self.scaling.upper(torch.eye(d, dtype=torch.float64, device="cpu")[None]))


@lru_cache(maxsize=256)
def _coefficients(degree: int, low: float, high: float, exponent: float) -> tuple[float, ...]:
    """c_0 .. c_degree of the Chebyshev series of x^-exponent on [low, high], by the cosine sum over many nodes."""
    nodes = max(10_000, 8 * degree)
    angles = (np.arange(nodes) + 0.5) * np.pi / nodes
    values = ((high + low) / 2 + (high - low) / 2 * np.cos(angles)) ** -exponent
    sums = [2 / nodes * float(np.dot(values, np.cos(k * angles))) for k in range(degree + 1)]
    return (sums[0] / 2, *sums[1:])
