"""What a run tells while it goes and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tick:
    """What a progress callback hears after every step; `seconds` is training time so far, evaluation left out."""

    step: int
    steps: int
    loss: float
    val_loss: float | None
    step_ms: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """The outcome of a run. A diverged run has no validation loss and ends at the step that lost it.

    Of several ranks: times are the first's, state_bytes those of the rank that holds most.
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


@dataclass
class Window:
    """What happened since the last row of metrics: the loss and the milliseconds of every step."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
