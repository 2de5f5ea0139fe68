"""What one gradient adds to the factor of an axis, and powers of other factors that it may be made of."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from torch import Tensor


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
