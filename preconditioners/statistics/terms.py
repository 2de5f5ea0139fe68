"""What one gradient adds to the factor of an axis, and powers of other factors that it may be made of."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from eigengraft.numerics import tiny

from ..algebra.symmetric import symmetric_product


class Power(NamedTuple):
    """(A_j / unit)^p as T^T U: left = T, right = U, `[N, d', d]`, or `[N, d]` for a diagonal factor; None: identity.

    unit `[N]`: the mean eigenvalue, so that powers of factors of any size are near 1.
    trace `[N]`: of (A_j / unit)^(p + 1). known `[N]`: False where nothing has been observed, or nothing made of it yet.
    """

    left: Tensor | None
    right: Tensor | None
    unit: Tensor
    trace: Tensor
    known: Tensor


Powers = Callable[[int, Fraction], Power]
"""(axis, p) -> A_axis^p as the stage that owns the statistic knows it now; for statistics with a `needs_power`."""


class Contribution(NamedTuple):
    """O_k = s Y Z^T, or s Y without a Z.

    y, z: the unfoldings `[N, d, rest]` along the axis; without z y is O_k / s itself, `[N, d, d]`.
    scale: s, a number or `[N]`.
    """

    y: Tensor
    z: Tensor | None
    scale: Tensor | float

    def multiplied(self) -> Contribution:
        """O_k / s as a matrix, its product Y Z^T taken in bfloat16."""
        if self.z is None:
            return self
        product = symmetric_product(self.y.bfloat16(), self.z.bfloat16())
        return Contribution(product.to(self.y.dtype), None, self.scale)


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """`[N]`, the mean of the diagonal of `[N, d, d]`, or of the diagonal itself, where it is not 0; else 1."""
    mean = (factor.diagonal(dim1=-2, dim2=-1) if factor.ndim == 3 else factor).mean(-1)
    return torch.where(mean > tiny(factor.dtype), mean, 1.0)


def has_data(factor: Tensor) -> Tensor:
    """`[N]`, whether anything has been observed: a factor that is still zero says nothing."""
    return factor.flatten(1).any(-1)
