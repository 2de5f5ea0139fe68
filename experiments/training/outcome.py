"""Progress and outcome of a run: a record for each step (`Tick`), metrics of the latest steps, and the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from ..tasks import Metrics


@dataclass(frozen=True)
class Tick:
    """The progress after one step, for callbacks.

    step: number of the step, from 1.
    steps: length of the run.
    loss: training loss of the step, the mean over ranks.
    val_loss: validation loss after the step; None: there was no evaluation.
    step_ms: milliseconds of the step.
    seconds: training seconds so far, without evaluation.
    """

    step: int
    steps: int
    loss: float
    val_loss: float | None
    step_ms: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """The outcome of a run. On several ranks, times are those of rank 0, and state_bytes is the largest of all ranks.

    diverged: True if the run ended at a step with a loss that is not finite, or after too many steps in a row without a
        usable gradient.
    val_loss: validation loss at the end; None if the run diverged.
    val_accuracy: validation accuracy at the end; None if the task reports none or the run diverged.
    steps: number of steps that were made.
    seconds: training seconds, without evaluation.
    parameters: number of entries of all parameters.
    state_bytes: bytes of optimizer state.
    state_bytes_per_parameter: state_bytes divided by parameters.
    step_ms: median milliseconds of a step.
    optimizer_ms: median milliseconds of the optimizer in a step.
    train_loss: mean loss over the steps of the last row of metrics; None if it was not finite.
    diagnosis: in a diverged run, the first value that was not finite and its usual cause. In a run that got worse, the
        rise of the training loss. Empty in other runs.
    first_loss: training loss of the first step; None if it was not finite.
    metrics: metrics that the task reports at the end besides loss and accuracy, by column `val.NAME`. None stands for a
        number that is not finite. Empty if the task reports no such metrics or the run diverged.
    """

    diverged: bool
    val_loss: float | None
    val_accuracy: float | None
    steps: int
    seconds: float
    parameters: int
    state_bytes: int
    state_bytes_per_parameter: float
    step_ms: float
    optimizer_ms: float
    train_loss: float | None = None
    diagnosis: str = ""
    first_loss: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass
class MetricsWindow:
    """Losses, milliseconds and events of the steps since the last row of metrics, from which the next row is made.

    cpu_ms: processor time of each step in this process, summed over threads.
    skipped: number of updates of a parameter that were skipped because its gradient was not finite.
    clipped: number of steps in which `grad_clip` shortened the gradient.
    """

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    skipped: int = 0
    clipped: int = 0

    def row(
        self, step: int, metrics: Metrics | None, spent: Mapping[str, float], layers: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a row of metrics.jsonl: mean loss, median times, counts, metrics of an evaluation, norms of layers.

        spent: columns with the learning rate of this step, and with seconds, tokens and FLOPs up to this step.
        metrics: result of an evaluation after this step; None: there was none.
        layers: columns with the norms of layers.
        """
        return {
            "step": step,
            "loss": finite_or_none(fmean(self.losses)),
            "val_loss": None if metrics is None else finite_or_none(metrics.val_loss),
            "val_accuracy": metrics.val_accuracy if metrics is not None else None,
            **further_metrics(metrics),
            **spent,
            "step_ms": median(self.step_ms),
            "cpu_ms": median(self.cpu_ms),
            "optimizer_ms": median(self.optimizer_ms),
            "skipped": self.skipped,
            "clipped": self.clipped,
            **layers,
        }


def further_metrics(metrics: Metrics | None) -> dict[str, float | None]:
    """Return the columns of all metrics except loss and accuracy, with None for numbers that are not finite.

    Returns {} without an evaluation.
    """
    return {} if metrics is None else {name: finite_or_none(value) for name, value in metrics.columns.items()}


def finite_or_none(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None
