"""Rows of the spike study, and the constants that its runs and its figure share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...files import read_rows

SPIKE = 104
"""Step of the spike, counted from 1: between two refreshes."""
FACTOR = 1e4
"""Number that the gradients of that step are multiplied by."""
WINDOW = 20
"""Steps looked at on either side of the spike."""
BOUND = (1 - 0.95) ** 0.5
"""Size of Adam's update after one dominant gradient."""
LINES = ("exact", "marginals", "permute", "none", "none, momentum outside", "published")
LEARNING_RATES = (3e-3, 3.2e-2)
"""The recipe's own, and the best of the demo's grid on this kind of task."""
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class SpikeRow:
    """One run; size(t) is defined in `run.py`.

    ratio: largest size after the spike over the largest before it.
    ratio_to_median, ratio_to_last: largest size after the spike over the median and over the last before it.
    before, largest: largest size before and after the spike.
    largest_after: steps from the spike to the largest size.
    loss_before, loss_end: mean training loss of the last five steps before the spike and of the run.
    sizes: size(t) of the steps `spike - 2 WINDOW .. spike + WINDOW`.
    """

    line: str
    lr: float
    seed: int
    spike: int
    factor: float
    ratio: float
    ratio_to_median: float
    ratio_to_last: float
    before: float
    largest: float
    largest_after: int
    loss_before: float
    loss_end: float
    sizes: list[float]


def read_spike_rows(path: Path = RESULTS / "spike.jsonl") -> list[SpikeRow]:
    """Read rows that were written before."""
    return [SpikeRow(**row) for row in read_rows(path)]
