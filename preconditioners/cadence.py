"""When a refresh is due: decided on the host from steps alone, so that no device is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from eigengraft.component import Component
from eigengraft.step_context import StepContext

_Numbers = TypeVar("_Numbers", float, NDArray[np.float64])


_FEW = 16
"""Blocks that are asked one by one in less time than all together."""


ROUNDED = 1e-9
"""Part of a step that a phase may be short of it: n times k / n may be less than k."""


class Cadence(Component, ABC, family="cadence"):
    """Says which blocks of a stack are due, as contiguous spans."""

    number: ClassVar[tuple[str, str] | None] = ("every", "steps")

    @property
    def interval(self) -> float:
        """Steps between two refreshes of a block, on average; blocks are divided over ranks by it."""
        return 1.0

    @property
    def period(self) -> int | None:
        """Steps after which the same blocks are due again; None: no fixed number."""
        return None

    def steps_due(self, phases: NDArray[np.float64]) -> NDArray[np.int64]:
        """The step of a period, 0 .. period - 1, at which blocks of these phases are due."""
        return np.zeros(len(phases), dtype=np.int64)

    def possible(self, step: int, earliest: int) -> bool:
        """Whether a block may be due at its update of that number; default: always. earliest: as in `due`."""
        return True

    @property
    def spread(self) -> bool:
        """Whether the blocks are due at different steps of a period, in waves that the field `at_once` declares."""
        return False

    def waves(self, refreshes: float) -> int | None:
        """Return in how many equal parts of a period the blocks are due. None: in as many as it has steps.

        refreshes: work of all refreshes in a period, in units of the costliest one.
        """
        return None

    @abstractmethod
    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, first) spans of due blocks; `first` where it is their first refresh.

        earliest: the step of the first refresh where the cadence itself does not say: 0, the priming, if lagged.
        """


class Every(Cadence):
    """Due at t = start and then whenever (t - offset) % steps == 0, shifted within the interval by the block's phase.

    t is the block's own step. With `stagger: cost` the phases spread the blocks over the interval in equal waves, as
    many as leave each the work of `at_once` blocks; with `none` all are due at once, as in the published codes. Ranks
    refresh a wave side by side: where fewer blocks are due than there are ranks, the others wait. With `at_once: 1`
    every step pays about the same.
    """

    kind: Literal["every"] = "every"
    steps: int = Field(default=10, ge=1, description="interval between refreshes, in updates of the block")
    start: int | None = Field(
        default=None, ge=1, description="update of the first refresh; default: as soon as the stage can"
    )
    offset: int = Field(default=0, ge=0, description="which updates: offset, offset + steps, offset + 2 steps, ...")
    stagger: Literal["cost", "none"] = Field(
        default="cost", description="spread refreshes over the interval, or do all at once"
    )
    at_once: int = Field(
        default=8,
        ge=1,
        description="least refresh work in one wave, in units of the costliest block: at least the number of ranks, so "
        "that none waits for another; 1 for the smoothest steps",
    )

    @model_validator(mode="after")
    def _spreads(self) -> Self:
        if self.stagger == "none" and self.at_once != type(self).model_fields["at_once"].default:
            raise ValueError(
                f"at_once: `stagger: cost` is required, without which all blocks are due at once, got {self.at_once}"
            )
        return self

    @property
    def interval(self) -> float:
        return float(self.steps)

    @property
    def period(self) -> int:
        return self.steps

    def steps_due(self, phases: NDArray[np.float64]) -> NDArray[np.int64]:
        return self._place(phases).astype(np.int64)

    def _place(self, phase: _Numbers) -> _Numbers:
        """The step of a period, a whole number, at which a phase is due; of one, or of an array."""
        spread = phase if self.stagger == "cost" else phase * 0
        return ((spread * self.steps + ROUNDED) // 1 + self.offset) % self.steps

    def possible(self, step: int, earliest: int) -> bool:
        start = self.start if self.start is not None else earliest
        every = self.stagger == "cost" or (step - self.offset) % self.steps == 0
        return step == start or (step > start and every)

    @property
    def spread(self) -> bool:
        return self.stagger == "cost" and self.steps > 1

    def waves(self, refreshes: float) -> int | None:
        return max(1, min(self.steps, int(refreshes / self.at_once))) if self.spread and self.at_once > 1 else None

    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        start = self.start if self.start is not None else earliest
        steps, uniform = context.steps, context.uniform
        if uniform is not None and uniform <= start:
            yield from [(0, len(steps), True)] if uniform == start else []
            return
        if uniform is not None and len(steps) <= _FEW:  # most steps of most stacks end here, without an array
            place = uniform % self.steps
            if not any(self._place(phase) == place for phase in context.phases.tolist()):
                return
        again = (steps - self.steps_due(context.phases)) % self.steps == 0
        if uniform is not None and not again.any():
            return
        yield from spans(np.where(steps == start, 2, (again & (steps > start)).astype(np.int64)))


def spans(codes: NDArray[np.int64]) -> Iterator[tuple[int, int, bool]]:
    """Runs of equal nonzero codes as (start, stop, code == 2)."""
    edges = np.flatnonzero(np.diff(codes)) + 1
    for start, stop in zip([0, *edges], [*edges, len(codes)], strict=True):
        if codes[start]:
            yield int(start), int(stop), bool(codes[start] == 2)
