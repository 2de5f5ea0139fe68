"""Algebra of factors that may be full, `[N, d, d]`, or diagonal, `[N, d]`.

Legend: N blocks; d length of an axis; X unfolding of a block along it, `[N, d, rest]`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eigengraft.numerics import apply_aligned, per_block, tiny

from .products import fold, mode_product, unfold
from .symmetric import symmetric_product

Factors = Mapping[int, Tensor]


def factor_transposed(factor: Tensor) -> Tensor:
    """Q^T."""
    return factor if factor.ndim == 2 else factor.mT


def gram(x: Tensor, axis: int, full: bool) -> Tensor:
    """X X^T, or its diagonal."""
    y = unfold(x, axis)
    return symmetric_product(y, y) if full else y.square().sum(-1)


def solved(x: Tensor, factor: Tensor, axis: int) -> Tensor:
    """x times_axis Q^(-T), for Q upper triangular or diagonal."""
    if factor.ndim == 2:
        return mode_product(x, 1 / factor, axis)
    y = apply_aligned(_solved, unfold(x, axis), factor)
    return fold(y, axis, x.shape)


def _solved(x: Tensor, factor: Tensor) -> Tensor:
    y: Tensor = torch.linalg.solve_triangular(factor.mT, x, upper=False)
    return y


def spectral_norm(a: Tensor) -> Tensor:
    """||A||_2 `[N]` of positive semi-definite A, from below: the power method from the longest column.

    At least the largest entry of the diagonal; exact for a diagonal.
    """
    if a.ndim == 2:
        return a.amax(-1)
    peak = a.diagonal(dim1=-2, dim2=-1).amax(-1)
    a = a / peak.clamp_min(tiny(a.dtype))[:, None, None]
    longest = a.square().sum(-2).argmax(-1)  # [N]
    x = a.gather(-1, longest[:, None, None].expand(-1, a.shape[-1], 1))  # [N, d, 1]
    for _ in range(2):
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(tiny(a.dtype))
        x = (a * x.mT).sum(-1, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1)).clamp_min(1.0) * peak
    return norm


def balanced(factors: Factors) -> dict[int, Tensor]:
    """Factors of the same Kronecker product with one and the same largest entry, so that none over- or underflows."""
    peaks = {
        axis: factor.flatten(1).abs().amax(1).clamp_min(tiny(factor.dtype)).log() for axis, factor in factors.items()
    }
    mean = torch.stack(list(peaks.values())).mean(0)
    return {axis: scaled(factor, (mean - peaks[axis]).exp()) for axis, factor in factors.items()}


def scaled(factor: Tensor, values: Tensor) -> Tensor:
    """Each factor times its own number `[N]`."""
    return factor * per_block(values, factor)
