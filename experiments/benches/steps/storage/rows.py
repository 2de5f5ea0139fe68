"""Rows of the bench of storage."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.results import BenchRow


@dataclass(frozen=True)
class StorageRow(BenchRow):
    """One recipe.

    stored_ms, plain_ms: milliseconds of each measured step, with and without coded slots.
    ratio: mean of stored_ms over mean of plain_ms, refreshes included.
    ordinary: median of stored_ms over median of plain_ms.
    bytes: bytes of the state as stored over bytes with nothing coded.
    """

    steps: int
    ratio: float
    ordinary: float
    bytes: float
    stored_ms: list[float]
    plain_ms: list[float]
