"""Measures of factors that `Optimizer.inspect` reports: condition numbers, and errors of bases and roots.

All measures are computed in float64. The measure of a matrix that is not finite is nan.

Legend: A `[N, d, d]` are statistics; Q `[N, d, r]`, r <= d, are bases; M = Q^T A Q `[N, r, r]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eigengraft.numerics import per_block


def condition(a: Tensor, symmetric: bool = True) -> Tensor:
    """Return the ratio of the largest to the smallest singular value of each matrix, `[N]`.

    A ratio above 1 / u, where u is the machine epsilon of a's dtype, is replaced by 1 / u. For a matrix of zeros the
    result is nan.

    a: matrices `[N, d, d]`, or diagonals `[N, d]`.
    symmetric: True if the matrices are positive semi-definite. Negative eigenvalues are then treated as zeros with
        rounding errors. False for any square matrices.
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
    """Return ||M - diag M||_F / ||M||_F of each matrix M = Q^T A Q, `[N]`, for a statistic A and its basis Q.

    This share of off-diagonal entries is 0 if the columns of Q are eigenvectors of A. It is at most 1, and nan where M
    is zero.

    m: M `[N, r, r]`.
    """
    known, m = _finite(m)
    rest = m - torch.diag_embed(m.diagonal(dim1=-2, dim2=-1))
    return torch.where(known, torch.linalg.matrix_norm(rest) / torch.linalg.matrix_norm(m), torch.nan)


def turning_angle(a: Tensor, q: Tensor) -> Tensor:
    """Return for each basis Q the mean angle in degrees between a column q and A q, `[N]`, where A is the statistic.

    A column has the weight q^T A q in the mean. The angle is 0 if all columns are eigenvectors.
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
    """Return ||Q^T Q - I||_F / sqrt(r), `[N]`, of each basis Q `[N, d, r]`.

    It is 0 if the columns of Q are orthonormal.
    """
    known, q = _finite(q)
    gram = torch.bmm(q.mT, q)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return torch.where(known, torch.linalg.matrix_norm(gram) / gram.shape[-1] ** 0.5, torch.nan)


def root_residual(a: Tensor, root: Tensor, powers: tuple[int, int]) -> Tensor:
    """Return the error ||A (X^m A^n - I)||_F / ||A||_F of each root X of A^(-n/m), `[N]`.

    An exact root has X^m A^n = I on the range of A, and the error 0. If X is a root of A + r I, with a ridge r, the
    error is larger by at most r / ||A||.

    a: A `[N, d, d]`, or diagonals `[N, d]`.
    root: X, in the same form as A.
    powers: (m, n).
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
    """Return (known, x64): the matrices of a stack x that are finite, and x converted to float64.

    known: bool `[N]`, True for matrices of x that are finite.
    x64: x in float64, with ones in place of every matrix that is not finite.
    """
    known = x.flatten(1).isfinite().all(-1)
    return known, torch.where(per_block(known, x), x, 1.0).double()
