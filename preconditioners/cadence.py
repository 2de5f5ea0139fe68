"""When a refresh is due: decided on the host from steps alone, so that no device is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eigengraft.clock import Clock
from eigengraft.component import Component


class Cadence(Component, ABC, family="cadence"):
    """Says which blocks of a stack are due, as contiguous spans."""

    @abstractmethod
    def due(self, clock: Clock, earliest: int) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, first) spans of due blocks; `first` where it is their first refresh.

        earliest: the step of the first refresh where the cadence itself does not say: 0, the priming, if lagged.
        """


class Every(Cadence):
    """Due at t = start and then whenever t % steps == 0, shifted within the interval by the block's phase.

    t is the block's own step. With `stagger: cost` the phases spread the blocks so that every step pays about the same;
    with `none` all are due at once, as in the published codes.
    """

    kind: Literal["every"] = "every"
    steps: int = Field(default=10, ge=1, description="interval between refreshes, in updates of the block")
    start: int | None = Field(
        default=None, ge=1, description="update of the first refresh; default: as soon as the stage can"
    )
    stagger: Literal["cost", "none"] = Field(
        default="cost", description="spread refreshes over the interval, or do all at once"
    )

    def due(self, clock: Clock, earliest: int) -> Iterator[tuple[int, int, bool]]:
        start = self.start if self.start is not None else earliest
        steps = clock.steps
        shift = np.floor(clock.phases * self.steps).astype(np.int64) if self.stagger == "cost" else 0
        again = (steps > start) & ((steps - shift) % self.steps == 0)
        yield from spans(np.where(steps == start, 2, again.astype(np.int64)))


def spans(codes: NDArray[np.int64]) -> Iterator[tuple[int, int, bool]]:
    """Runs of equal nonzero codes as (start, stop, code == 2)."""
    edges = np.flatnonzero(np.diff(codes)) + 1
    for start, stop in zip([0, *edges], [*edges, len(codes)], strict=True):
        if codes[start]:
            yield int(start), int(stop), bool(codes[start] == 2)
