"""Rows of the bench of magnitudes."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.results import BenchRow


@dataclass(frozen=True)
class GraftingRow(BenchRow):
    """One chain on one shape at its last step, the mean over the stack: RMS, Frobenius and spectral norm of updates."""

    m: int
    n: int
    rms: float
    norm: float
    spectral: float
    milliseconds: float
