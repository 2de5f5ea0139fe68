"""Measures of factors for inspection: condition numbers, and the distance of a basis from eigenvectors. All are
computed in float64.

Legend: A `[N, d, d]` statistics; Q `[N, d, r]` bases, r <= d; M = Q^T A Q `[N, r, r]`. The measure of a matrix that is
    not finite is nan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eigengraft.numerics import per_block


def condition(a: Tensor, symmetric: bool = True) -> Tensor:
    """Return `[N]`, the ratio of the largest to the least singular value. The ratio is at most 1 / u, where u is the
    machine epsilon of a's dtype.

    a: matrices, or diagonals `[N, d]`.
    symmetric: True if the matrices are positive semi-definite. Eigenvalues below zero then count as rounding.

    A matrix of zeros has no condition number: the result is nan.
    """
    known, x = _finite(a)
    if x.ndim == 2:
        values = x if symmetric else x.abs()
    else:
        values = torch.linalg.eigvalsh(x) if symmetric else torch.linalg.svdvals(x)
    peak = values.amax(-1)
    ratio = peak / torch.maximum(values.amin(-1), peak * torch.finfo(a.dtype).eps)
    return torch.where(known & (peak > 0), ratio, torch.nan)


def off_diagonal_share(m: Tensor) -> Tensor:
    """Return `[N]`, ||M - diag M||_F / ||M||_F. The share is 0 if Q holds eigenvectors, at most 1, and nan where M is
    zero.
    """
    known, m = _finite(m)
    rest = m - torch.diag_embed(m.diagonal(dim1=-2, dim2=-1))
    return torch.where(known, torch.linalg.matrix_norm(rest) / torch.linalg.matrix_norm(m), torch.nan)


def turning_angle(a: Tensor, q: Tensor) -> Tensor:
    """Return `[N]`, the mean angle in degrees between a column q of Q and A q, weighted by q^T A q. The angle is 0 for
    eigenvectors.
    """
    known, a = _finite(a)
    q = q.double()
    turned = torch.bmm(a, q)
    along = (q * turned).sum(-2)  # [N, r]
    across = torch.linalg.vector_norm(turned - q * along.unsqueeze(-2), dim=-2)
    weight = along.clamp_min(0)
    angles = torch.atan2(across, along).rad2deg()
    return torch.where(known, (weight * angles).sum(-1) / weight.sum(-1), torch.nan)


def orthogonality(q: Tensor) -> Tensor:
    """Return `[N]`, ||Q^T Q - I||_F / sqrt(r), the distance of the columns from orthonormal columns."""
    known, q = _finite(q)
    gram = torch.bmm(q.mT, q)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return torch.where(known, torch.linalg.matrix_norm(gram) / gram.shape[-1] ** 0.5, torch.nan)


def root_residual(a: Tensor, root: Tensor, powers: tuple[int, int]) -> Tensor:
    """Return `[N]`, ||A (X^m A^n - I)||_F / ||A||_F for X = A^(-n/m), a root `[N, d, d]` or its diagonal `[N, d]`.

    powers: (m, n). An exact root has X^m A^n = I on the range of A. A root that was computed with a ridge r changes the
    result by at most r / ||A||.
    """
    known, a = _finite(a)
    usable, x = _finite(root)
    if a.ndim == 2:
        a, x = torch.diag_embed(a), torch.diag_embed(x)
    size = torch.linalg.matrix_norm(a)
    m, n = powers
    unit = a / per_block(size, a)
    x = x * per_block(size ** (n / m), x)
    product = torch.bmm(torch.linalg.matrix_power(x, m), torch.linalg.matrix_power(unit, n))
    rest = torch.linalg.matrix_norm(torch.bmm(unit, product) - unit) / torch.linalg.matrix_norm(unit)
    return torch.where(known & usable, rest, torch.nan)


def _finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (known, x64). known: bool `[N]`, True for matrices of x that are finite. x64: x in float64, with ones in
    place of the matrices that are not.
    """
    known = x.flatten(1).isfinite().all(-1)
    return known, torch.where(per_block(known, x), x, 1.0).double()
