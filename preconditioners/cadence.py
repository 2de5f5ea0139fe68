"""Cadences: rules for the steps in which a refresh is due, decided on the host without waiting for a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar, Literal, Self, final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from eigengraft.component import Component
from eigengraft.step_context import StepContext

_PHASES = np.array([0.0, 0.5])
"""Two phases, half a period apart. `Cadence.spread` tests with them if phases change the step of a refresh."""
ROUNDED = 1e-9
"""Number that is added to a step before it is rounded down, so that a rounding error does not lower it by 1. The step
of the phase k / n in a period n is k, but in floating point n * (k / n) may be slightly less than k.
"""


class Cadence(Component, ABC, family="cadence"):
    """The rule that decides which blocks of a stack are due for a refresh.

    A subclass defines `due_again`. The method `due` of this class adds the first refresh of each block. The decision is
    made on the host before the hooks of a step run. It uses only numbers that are on the host: the steps, phases and
    seeds of the context. The phase of a block is a number from 0 to 1 that shifts its refreshes within a period, so
    that not all blocks are due at once.
    """

    number: ClassVar[tuple[str, str] | None] = ("every", "steps")

    @abstractmethod
    def due_again(self, context: StepContext) -> NDArray[np.bool_] | bool:
        """Return bool `[N]`, True for each block that is due at its present step, or one bool for all blocks.

        The result is ignored for blocks without a first refresh, which `due` handles. The result for a block must
        follow from its own step, phase and seed alone, so that it is the same on all ranks and in every stack.

        context: `context.steps`, `context.phases` and `context.seeds`, NumPy arrays `[N]`. A random cadence draws with
            `eigengraft.noise.uniform` from seeds and steps.
        """

    def first_due(self, earliest: int) -> int:
        """Return the step of the first refresh of a block. The default is `earliest`.

        earliest: first step at which the stage can refresh: 1, or 0 for a lagged stage, which refreshes with its first
            gradient before the first update.
        """
        return earliest

    @property
    def postponed(self) -> int:
        """Number of updates of a block from the start of a refresh until it takes effect. The first refresh of a block
        is never delayed.
        """
        return 0

    @property
    @abstractmethod
    def interval(self) -> float:
        """Mean number of steps between two refreshes of a block.

        The number is used when blocks are assigned to ranks: it spreads the cost of a refresh over the steps of an
        interval.
        """

    @property
    def period(self) -> int | None:
        """Number of steps after which the same blocks are due again, or None if this number is not fixed."""
        return None

    def steps_due(self, phases: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return for each block the step of a period, 0 .. period - 1, at which the block is due for a refresh.

        The method is called when blocks are assigned to ranks, and only for cadences with a period.

        phases: for each block the fraction of a period, in [0, 1), after which it should be due. Phases differ, so that
            refreshes are spread over all steps.
        """
        return np.zeros(len(phases), dtype=np.int64)

    def possible(self, step: int, earliest: int) -> bool:
        """Return True if a block may be due at its update number `step`. The default: at every update from its first
        refresh on.

        The method is called when a stage requires an input beside the gradient (a signal) for its refreshes.

        earliest: first step at which the stage can refresh, as in `first_due`.
        """
        return step >= self.first_due(earliest)

    def waves(self, refreshes: float) -> int | None:
        """Return the number of waves in a period. A wave is the set of blocks that are due in the same step.

        Waves divide a period into equal parts. None: there is one wave for each step of the period. The method is
        called when phases are assigned to blocks.

        refreshes: cost of all refreshes of a period, in units of the costliest refresh.
        """
        return None

    @property
    @final
    def spread(self) -> bool:
        """True if blocks with different phases are due at different steps of a period."""
        return self.period is not None and len({*self.steps_due(_PHASES).tolist()}) > 1

    @final
    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the blocks of a stack that are due, as spans (start, stop, first).

        first: True at the first refresh of these blocks.
        earliest: first step at which the stage can refresh, as in `first_due`.
        """
        start, steps, uniform = self.first_due(earliest), context.steps, context.uniform
        if uniform is not None and uniform <= start:
            yield from [(0, len(steps), True)] if uniform == start else []
            return
        again = self.due_again(context)
        if uniform is None or (again is not False and np.any(again)):
            yield from _spans(np.where(steps == start, 2, (again & (steps > start)).astype(np.int64)))


class Every(Cadence):
    """Due at t = start and then whenever (t - offset) % steps == 0, shifted within the interval by the block's phase.

    t is the number of the block's own step; `start`, `offset` and `steps` are fields. With `stagger: none` all blocks
    are due at once, as in the published implementations of the optimizers. With `stagger: cost` the phases spread the
    blocks over the interval in waves of about equal work. A wave is the set of blocks that are due in the same step.

    The number of waves is the largest for which the mean work of a wave is at least `min_wave_work` times the work of
    the costliest block. Waves should be large if there are several ranks: the ranks refresh the blocks of a wave in
    parallel, and some of them wait if a wave has fewer blocks than there are ranks. With `min_wave_work: 1` there is
    one wave in each step, so that all steps cost about the same.

    With `delay: k` a refresh that is due at t reads the state of update t and takes effect at update t + k. Until then
    it is computed beside training, if the device can do so. The first refresh of a block takes effect at once.
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
        default="cost", description="cost: spread refreshes over the interval; none: refresh all blocks in one step"
    )
    min_wave_work: int = Field(
        default=8,
        ge=1,
        description="least refresh work of one wave, in units of the costliest block: at least the number of ranks, "
        "so that no rank waits for another; 1, so that all steps cost about the same",
    )
    delay: int = Field(
        default=0,
        ge=0,
        description="updates from the state that a refresh reads to the update in which it takes effect; at most steps",
    )

    @model_validator(mode="after")
    def _spreads(self) -> Self:
        if self.stagger == "none" and self.min_wave_work != type(self).model_fields["min_wave_work"].default:
            raise ValueError(
                f"min_wave_work: {self.min_wave_work} cannot be combined with `stagger: none`, which refreshes all "
                "blocks at the same step; remove one of the two"
            )
        if self.delay > self.steps:
            raise ValueError(
                f"delay: must be at most steps, {self.steps}, got {self.delay}, because the next refresh would begin "
                "before the last one takes effect; set a smaller delay"
            )
        return self

    @property
    def postponed(self) -> int:
        return self.delay

    @property
    def interval(self) -> float:
        return float(self.steps)

    @property
    def period(self) -> int:
        return self.steps

    def steps_due(self, phases: NDArray[np.float64]) -> NDArray[np.int64]:
        return _steps_due(phases, self.steps, self.offset, self.stagger == "cost")

    def possible(self, step: int, earliest: int) -> bool:
        start = self.first_due(earliest)
        every = self.stagger == "cost" or (step - self.offset) % self.steps == 0
        return step == start or (step > start and every)

    def waves(self, refreshes: float) -> int | None:
        if not self.spread or self.min_wave_work == 1:
            return None
        return max(1, min(self.steps, int(refreshes / self.min_wave_work)))

    def due_again(self, context: StepContext) -> NDArray[np.bool_] | bool:
        uniform = context.uniform
        if uniform is not None:  # the common case: all blocks are at one step, in which none is due; no array is made
            staggered = self.stagger == "cost"
            if uniform % self.steps not in _steps_with_due_blocks(
                context.phases.tobytes(), self.steps, self.offset, staggered
            ):
                return False
        due: NDArray[np.bool_] = (context.steps - self.steps_due(context.phases)) % self.steps == 0
        return due

    def first_due(self, earliest: int) -> int:
        return self.start if self.start is not None else earliest


def _steps_due(phases: NDArray[np.float64], steps: int, offset: int, staggered: bool) -> NDArray[np.int64]:
    """Return for each block the step of a period, 0 .. `steps` - 1, at which the block is due for a refresh.

    phases: for each block the fraction of a period, in [0, 1), after which it is due.
    steps: length of a period.
    offset: step at which blocks with the phase 0 are due.
    staggered: False: all blocks are due at the same step, as if all phases were 0.
    """
    spread = phases if staggered else phases * 0
    due: NDArray[np.int64] = (((spread * steps + ROUNDED) // 1 + offset) % steps).astype(np.int64)
    return due


@lru_cache(maxsize=1024)
def _steps_with_due_blocks(phases: bytes, steps: int, offset: int, staggered: bool) -> frozenset[int]:
    """Return the steps of a period at which any block is due for a refresh, as `_steps_due` computes them.

    The result is cached, because the phases are the same in every step.

    phases: the bytes of the float64 array that `_steps_due` accepts. Unlike an array, they can be a key of the cache.
    steps, offset, staggered: as in `_steps_due`.
    """
    return frozenset(_steps_due(np.frombuffer(phases), steps, offset, staggered).tolist())


def _spans(codes: NDArray[np.int64]) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, first) for each run of consecutive blocks with the same code 1 or 2.

    codes: `[N]`, 0 for blocks that are not due, 2 for blocks at their first refresh, and 1 for all other due blocks.
        `first` is True for the code 2.
    """
    edges = np.flatnonzero(np.diff(codes)) + 1
    for start, stop in zip([0, *edges], [*edges, len(codes)], strict=True):
        if codes[start]:
            yield int(start), int(stop), bool(codes[start] == 2)
