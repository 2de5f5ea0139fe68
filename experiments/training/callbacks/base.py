"""What happens beside training: callbacks, named in an experiment or given to `train`, and one that stops runs."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from torch import nn

import eigengraft
from eigengraft.component import Component

from ...tasks import Batch
from ..outcome import Result, Tick


def no_batch() -> Batch:
    """Raise ValueError: no step has begun."""
    raise ValueError("batch: a step that has begun is required")


@dataclass(frozen=True)
class RunView:
    """What a callback sees of a run.

    model, optimizer: in training; the model holds the iterate that is trained.
    directory: of the run; files of one's own may be written there.
    rows: the rows of metrics.jsonl so far, the one of this step included if there is one.
    batch: returns this rank's rows of the batch of the step that is being made, or of the last step.
    """

    model: nn.Module
    optimizer: eigengraft.Optimizer
    directory: Path
    rows: Sequence[Mapping[str, Any]]
    batch: Callable[[], Batch] = no_batch


class Callback(Component, ABC, family="callback"):
    """Code that is called after steps that have a row of metrics, and at the end of a run; on rank 0 alone.

    `started` alone is called on every rank. A callback keeps nothing itself: what it needs is in the rows, so that a
    run that is continued goes on the same.
    """

    def started(self, run: RunView) -> None:
        """Before the first step of this process, on every rank, also where a run goes on.

        A signal of one's own is provided here: `run.optimizer.provide("sharpness", function)` calls the function before
        each step, when gradients are there and `run.batch()` is the batch that they are of.
        """

    def stepped(self, run: RunView, tick: Tick) -> bool:
        """After a step: whether the run ends here, as if it had no more steps."""
        return False

    def finished(self, run: RunView, result: Result) -> None:
        """After the last step; the model holds the iterate that is evaluated."""


class Patience(Callback):
    """Stop when the last `evaluations` validation losses are none better than the best before, by `least` or more."""

    kind: Literal["patience"] = "patience"
    evaluations: int = Field(default=5, ge=1, description="evaluations in a row without a better loss")
    least: float = Field(default=0.0, ge=0, description="how much lower a loss must be to count as better")

    def stepped(self, run: RunView, tick: Tick) -> bool:
        if tick.val_loss is None:
            return False
        losses = [row["val_loss"] for row in run.rows if row.get("val_loss") is not None]
        before, last = losses[: -self.evaluations], losses[-self.evaluations :]
        best, latest = min(before, default=math.inf), min(last, default=math.inf)
        return bool(before) and not (latest < best and latest <= best - self.least)


class StopAfter(Callback):
    """Stop after a step that has a row of metrics, with the learning rates of the whole run up to there."""

    kind: Literal["stop_after"] = "stop_after"
    step: int = Field(ge=1, description="the first step after which the run may end")

    def stepped(self, run: RunView, tick: Tick) -> bool:
        return tick.step >= self.step


class Limits(Callback):
    """Stop at an evaluation with a metric worse than the limit of its step; successive halving stops runs so."""

    kind: Literal["limits"] = "limits"
    metric: Literal["val_loss", "val_accuracy"] = Field(default="val_loss", description="the metric with limits")
    limits: tuple[tuple[int, float], ...] = Field(
        strict=False, description="(step, largest loss or least accuracy with which the run goes on there)"
    )

    @field_validator("limits", mode="before", json_schema_input_type=list[tuple[int, float]])
    @classmethod
    def _pairs(cls, limits: Any) -> Any:
        return tuple(map(tuple, limits)) if isinstance(limits, list) else limits

    def stepped(self, run: RunView, tick: Tick) -> bool:
        value = run.rows[-1].get(self.metric)
        return value is not None and self.exceeded(tick.step, value)

    def exceeded(self, step: int, value: float) -> bool:
        """Whether a metric at a step is worse than its limit."""
        better_is_more = self.metric == "val_accuracy"
        return any(step == at and (value < limit if better_is_more else value > limit) for at, limit in self.limits)
