"""Bounds of the largest eigenvalue of symmetric matrices in O(d^2) operations, and an estimate of it by power steps.

Legend: N is the number of matrices; d is the order of a matrix; u is the rounding unit of the dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.component import Component
from eigengraft.numerics import products, tiny


class EigenvalueBound(Component, ABC, family="eigenvalue_bound"):
    """An upper bound of the largest eigenvalue of positive semi-definite A `[N, d, d]`, or an estimate of it."""

    @final
    def upper(self, a: Tensor) -> Tensor:
        """Return the bound `[N]` for matrices a `[N, d, d]`, in units of a. The bound of a zero matrix is 0.

        Each matrix is divided by its largest entry first, so that no intermediate result overflows.
        """
        if a.numel() == 0:
            return a.new_zeros(a.shape[0])
        peak = a.abs().amax((-2, -1))
        return self.of_scaled(a / peak.clamp_min(tiny(a.dtype))[:, None, None]) * peak

    @abstractmethod
    def of_scaled(self, a: Tensor) -> Tensor:
        """Return the bound `[N]` for matrices whose largest absolute entry is 1. The bound of a zero matrix is 0."""


class GuaranteedBound(EigenvalueBound):
    """min(m + s sqrt(d - 1),  max_i (|A| x)_i / x_i) (1 + margin),  m = tr A / d,  s^2 = ||A - m I||_F^2 / d

    The first term is the bound from the traces of A and A^2 (Wolkowicz & Styan 1980, theorem 2.1). It is exact if all
    eigenvalues except the largest are equal. For positive semi-definite A it exceeds neither the trace nor the
    Frobenius norm.

    The second term bounds the spectral radius of |A|, hence of A, for every vector x > 0 (Collatz 1942). Here x = |A| 1
    is the vector of row sums, with which the second term is Minc's (1988) row-sum bound and at most the largest row
    sum. Entries of x below 2^-20 times the largest entry are raised to that value.

    margin = (2 d + 10) machine epsilon makes up for rounding errors. A sum of d terms in any order has a relative error
    of at most d u. The errors of three such sums add up in the second term, and those of two sums in the first term. s
    is computed as a norm, because a difference of two traces would lose digits. The bound is valid down to the smallest
    normal number.
    """

    kind: Literal["guaranteed"] = "guaranteed"

    def of_scaled(self, a: Tensor) -> Tensor:
        d, size = a.shape[-1], a.abs()
        mean = a.diagonal(dim1=-2, dim2=-1).mean(-1)
        rest = a - torch.diag_embed(mean[:, None].expand(-1, d))
        traces: Tensor = mean + torch.linalg.vector_norm(rest, dim=-1).norm(dim=-1) * ((d - 1) / d) ** 0.5
        x = size.sum(-1)
        x = torch.maximum(x, x.amax(-1, keepdim=True) * 2.0**-20).clamp_min(tiny(a.dtype))
        rows = (products(size, x.unsqueeze(-1)).squeeze(-1) / x).amax(-1)
        return torch.minimum(traces, rows) * (1 + (2 * d + 10) * torch.finfo(a.dtype).eps)


class FrobeniusBound(EigenvalueBound):
    """||A||_F, at least the largest eigenvalue and at most sqrt(rank) times the largest eigenvalue."""

    kind: Literal["frobenius"] = "frobenius"

    def of_scaled(self, a: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(a, dim=(-2, -1))
        return norm


class PowerIteration(EigenvalueBound):
    """factor * max_j ||A v_j|| after `steps` of  v_j <- A v_j / ||A v_j||,  for several start vectors v_j at once

    This is an estimate, not a bound. Without the factor, the estimate is at most the largest eigenvalue. An accurate
    estimate needs many steps if the second eigenvalue is close to the largest. A factor of 2 makes up for few steps
    (DASH, arXiv:2602.02016). The start vectors are deterministic: fractional parts of multiples of the golden ratio. If
    `steps` is 32 or more, one product with A^4 replaces four steps, and vectors are normalized after every fourth
    product.
    """

    kind: Literal["power_iteration"] = "power_iteration"
    steps: int = Field(default=10, ge=1, le=1000, description="number of products with A")
    vectors: int = Field(default=16, ge=1, le=1024, description="number of start vectors; the largest result counts")
    factor: float = Field(default=1.0, gt=0, description="factor of the estimate")

    def of_scaled(self, a: Tensor) -> Tensor:
        rows = torch.arange(1, a.shape[-1] + 1, dtype=a.dtype, device=a.device)
        columns = torch.arange(1, self.vectors + 1, dtype=a.dtype, device=a.device)
        # the mean of start vectors is 0.25, not 0, because leading eigenvectors of statistics are often nearly constant
        v = (0.6180339887498949 * rows[:, None] * columns) % 1.0 - 0.25
        v = v.expand(len(a), -1, -1)
        factors, apart = [a] * self.steps, 1
        if self.steps >= _SQUARED:
            rest = (self.steps - 1) % 4 + 1  # at least 1: the last product must be A v, whose norm is the estimate
            factors, apart = [_scaled_square(_scaled_square(a))] * ((self.steps - rest) // 4) + [a] * rest, _SAFE
        for k, factor in enumerate(factors):
            if k % apart == 0 or k == len(factors) - 1:
                v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(tiny(a.dtype))
            v = torch.bmm(factor, v)
        largest: Tensor = torch.linalg.vector_norm(v, dim=1).amax(-1)
        return largest * self.factor


_SQUARED = 32
"""Least number of power steps for which A^4 is computed first, so that one product makes four steps. For fewer steps
the two squares would cost more operations than the steps that they replace.
"""
_SAFE = 4
"""Number of products between normalizations of the vectors. Because no entry of A or A^4 is above 1, vectors grow by at
most d^4, and squares of their entries do not overflow in float32 for d up to 40,000.
"""


def _scaled_square(a: Tensor) -> Tensor:
    """Return A^2 / max(A^2), with max over the entries of each matrix, for positive semi-definite A `[N, d, d]`."""
    square = torch.bmm(a, a)
    peak = square.diagonal(dim1=-2, dim2=-1).amax(-1)  # the largest entry is on the diagonal
    return square / peak.clamp_min(tiny(a.dtype))[:, None, None]
