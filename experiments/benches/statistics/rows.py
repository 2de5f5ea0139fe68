"""Rows of the bench of statistics."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.results import BenchRow


@dataclass(frozen=True)
class StatisticRow(BenchRow):
    """One statistic of one layer after some gradients, as S = L x R with its own estimates.

    Rows without a statistic: the best of all Kronecker products, and the diagonal of C, for the same gradients.
    cosine: between S and C, the second moment over all training gradients.
    cosine_root: between L^(1/2) x R^(1/2) and C.
    gain_error, gain_spread: on held-out gradients, see `dense_kronecker`; S of uncoupled factors is scaled to the
        trace of C.
    """

    layer: str
    samples: int
    cosine: float
    cosine_root: float | None
    gain_error: float | None
    gain_spread: float | None
    milliseconds: float | None


BEST, DIAGONAL = "best Kronecker product", "diagonal (Adam)"
"""Names of the rows without a statistic."""
