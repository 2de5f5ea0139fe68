"""Cadences: the steps in which a refresh is due, decided on the host from steps alone, without waiting for a device."""

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
"""Largest number of blocks whose phases `Every.due` tests one by one in Python. For so few blocks, a NumPy array is
slower.
"""

ROUNDED = 1e-9
"""Tolerance of a phase, in steps, because in floating point n * (k / n) may be slightly less than k."""


class Cadence(Component, ABC, family="cadence"):
    """The rule that decides which blocks of a stack are due for a refresh."""

    number: ClassVar[tuple[str, str] | None] = ("every", "steps")

    @property
    def interval(self) -> float:
        """Mean number of steps between two refreshes of a block.

        When blocks are assigned to ranks, a refresh counts as the fraction 1 / interval of its cost in every step.
        """
        return 1.0

    @property
    def period(self) -> int | None:
        """Number of steps after which the same blocks are due again. None: there is no fixed number."""
        return None

    def steps_due(self, phases: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the step of a period, 0 .. period - 1, at which blocks with these phases are due."""
        return np.zeros(len(phases), dtype=np.int64)

    def possible(self, step: int, earliest: int) -> bool:
        """Return True if a block may be due at its update number `step`. The default is always True.

        earliest: as in `due`.
        """
        return True

    @property
    def spread(self) -> bool:
        """True if blocks are due at different steps of a period, in waves, to even out the work of the steps."""
        return False

    def waves(self, refreshes: float) -> int | None:
        """Return the number of waves of refreshes in a period. None: there is one wave for each step of the period.

        A wave is a set of blocks that are refreshed in the same step. Waves are equally far apart.

        refreshes: work of all refreshes of a period, in units of the costliest refresh.
        """
        return None

    @abstractmethod
    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        """Yield spans (start, stop, first) of the blocks that are due.

        `first` is True if this is the first refresh of the blocks in the span.

        earliest: step of the first refresh if the cadence does not set this step: 1, or 0 (the priming gradient) for a
            lagged stage.
        """


class Every(Cadence):
    """Due at t = start and then whenever (t - offset) % steps == 0, shifted within the interval by the block's phase.

    t is the number of the block's own step. A wave is a set of blocks that are due in the same step. With `stagger:
    cost` the phases spread the blocks over the interval in waves of equal work. There are as many waves as possible if
    each has at least the work of `min_wave_work` of the costliest blocks. With `stagger: none` all blocks are due at
    once, as in the published codes. Ranks refresh the blocks of a wave in parallel, so that some ranks wait if a wave
    has fewer blocks than there are ranks. With `min_wave_work: 1` all steps cost about the same.
    """

    kind: Literal["every"] = "every"
    steps: int = Field(default=10, ge=1, description="interval between refreshes, in updates of the block")
    start: int | None = Field(
        default=None, ge=1, description="update of the first refresh; default: as soon as the stage can"
    )
    offset: int = Field(
        default=0, ge=0, description="refreshes are due at updates offset, offset + steps, offset + 2 steps, ..."
    )
    stagger: Literal["cost", "none"] = Field(
        default="cost", description="spread refreshes over the interval, or do all at once"
    )
    min_wave_work: int = Field(
        default=8,
        ge=1,
        description="least refresh work in one wave, in units of the costliest block: at least the number of ranks, so "
        "that none waits for another; 1 for the smoothest steps",
    )

    @model_validator(mode="after")
    def _spreads(self) -> Self:
        if self.stagger == "none" and self.min_wave_work != type(self).model_fields["min_wave_work"].default:
            raise ValueError(
                f"min_wave_work: {self.min_wave_work} cannot be combined with `stagger: none`, by which all blocks are "
                "due at the same step; remove one of the two"
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
        """Return the step of a period, a whole number, in which blocks with this phase are due.

        For an array of phases the result is an array.
        """
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
        if not self.spread or self.min_wave_work == 1:
            return None
        return max(1, min(self.steps, int(refreshes / self.min_wave_work)))

    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        start = self.start if self.start is not None else earliest
        steps, uniform = context.steps, context.uniform
        if uniform is not None and uniform <= start:
            yield from [(0, len(steps), True)] if uniform == start else []
            return
        if uniform is not None and len(steps) <= _FEW:  # the common case: nothing is due, and no array is made
            place = uniform % self.steps
            if not any(self._place(phase) == place for phase in context.phases.tolist()):
                return
        again = (steps - self.steps_due(context.phases)) % self.steps == 0
        if uniform is not None and not again.any():
            return
        yield from spans(np.where(steps == start, 2, (again & (steps > start)).astype(np.int64)))


def spans(codes: NDArray[np.int64]) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, code == 2) for each run of equal codes that are not 0.

    codes: for each block, 0 if it is not due, 1 if it is due, and 2 if it is due for the first time.
    """
    edges = np.flatnonzero(np.diff(codes)) + 1
    for start, stop in zip([0, *edges], [*edges, len(codes)], strict=True):
        if codes[start]:
            yield int(start), int(stop), bool(codes[start] == 2)
