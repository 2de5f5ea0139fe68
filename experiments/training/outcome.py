"""Reports of a run: a tick per step, windows of metrics, diagnostics of the optimizer, and the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import eigengraft

from ..tasks import Metrics
from .rundir import RunDirectory


@dataclass(frozen=True)
class Tick:
    """Progress after one step, for callbacks; `seconds` is training time so far, without evaluation."""

    step: int
    steps: int
    loss: float
    val_loss: float | None
    step_ms: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    A diverged run has no validation loss. It ends at the first step without a finite loss, or when all gradients have
    been unusable for so many steps that it is lost.

    train_loss: mean over the steps of the last row of metrics; None: it was not finite.
    diagnosis: which value of a diverged run was not finite first, and its usual cause; or how far the training loss
        rose in a run that got worse. Empty: nothing was found.

    On several ranks, times are those of rank 0 and state_bytes those of the rank that holds most.
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


@dataclass
class MetricsWindow:
    """Losses and milliseconds of the steps since the last row of metrics."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)

    def row(self, step: int, lr: float, seconds: float, metrics: Metrics | None) -> dict[str, Any]:
        """One row of metrics.jsonl: mean loss and median times of the window, and the evaluation if there was one."""
        return {
            "step": step,
            "loss": _finite_or_none(fmean(self.losses)),
            "val_loss": _finite_or_none(metrics.val_loss) if metrics is not None else None,
            "val_accuracy": metrics.val_accuracy if metrics is not None else None,
            "lr": lr,
            "seconds": seconds,
            "step_ms": median(self.step_ms),
            "optimizer_ms": median(self.optimizer_ms),
        }


def numbers_of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a result says of the rows of metrics: median times of a step, and the training loss of the last row."""
    times = {key: median(row[key] for row in rows) for key in ("step_ms", "optimizer_ms")}
    return {**times, "train_loss": rows[-1]["loss"]}


@dataclass(frozen=True)
class Diagnostics:
    """What an optimizer tells of itself, at every so many steps of a run and at its last.

    every: steps between two tables; None: there are none.
    last: the last step.
    writes: whether this process owns the run's directory; all ranks make the tables.
    """

    optimizer: eigengraft.Optimizer
    directory: RunDirectory
    every: int | None
    last: int
    writes: bool = True

    def before(self, step: int) -> None:
        """Before a step, 1 .. last: watch it if it is due."""
        if self._due(step):
            self.optimizer.watch_next_step()

    def after(self, step: int) -> None:
        """After a step that was due: one line for each parameter, stage and measure, all blocks together."""
        if not self._due(step):
            return
        rows = self.optimizer.inspect().by_parameter().records()
        if self.writes:
            kept = [{key: value for key, value in row.items() if key != "block"} for row in rows]
            self.directory.append_diagnostics({"step": step, **row} for row in kept)

    def rewind(self, step: int) -> None:
        """Forget what was told after a step from which the run goes on."""
        if self.writes:
            self.directory.rewind_diagnostics(step)

    def _due(self, step: int) -> bool:
        return self.every is not None and (step % self.every == 0 or step == self.last)


def _finite_or_none(value: float) -> float | None:
    """The value, or None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None
