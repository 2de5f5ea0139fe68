"""Rows of the bench of eigenbases."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.results import BenchRow


@dataclass(frozen=True)
class BasisRow(BenchRow):
    """One solver on one stack after `refresh` refreshes; the worst of the stack, with B = Q^T A Q in float64.

    orthogonality: max |Q^T Q - I|.
    offdiagonal: ||offdiag(B)||_F / ||B||_F.
    eigenvalues: sum |diag(B) - lambda| / sum lambda over the largest lambda of A, as many as Q has columns.
    """

    spectrum: str
    size: int
    dtype: str
    refresh: int
    columns: int
    orthogonality: float
    offdiagonal: float
    eigenvalues: float
    ok: float
    milliseconds: float
