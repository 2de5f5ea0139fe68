"""Rows of the bench of polar factors."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.results import BenchRow


@dataclass(frozen=True)
class PolarRow(BenchRow):
    """One solver on one stack G = U diag(s) V^T, s from `condition`^-1 to 1 in equal ratios; the worst of the stack.

    low, high: the band of singular values of the result X.
    distance: ||X - U V^T||_F / ||U V^T||_F.
    """

    m: int
    n: int
    condition: float
    dtype: str
    low: float
    high: float
    distance: float
    milliseconds: float
