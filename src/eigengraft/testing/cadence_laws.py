"""The laws of cadences: spans are inside the stack, every block has one first refresh, and refreshes have the declared
interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from eigengraft.component import Component
from eigengraft.preconditioners import Cadence
from eigengraft.step_context import StepContext

from .laws import Law, require, the_declaration_survives

_PHASES = (0.0, 0.95, 0.3, 0.31, 0.5, 0.0, 0.77)
"""Phases of the blocks of a stack. Two phases are equal, and two are close to each other."""
_REFRESHES = 12
"""Number of intervals to try. In this many intervals, a random cadence refreshes a block 1 to 36 times, except in 1 of
10^5 runs."""

_DueSpan = tuple[int, int, bool]


@dataclass(frozen=True)
class CadenceCase:
    """A cadence under test.

    cadence: the cadence to check.
    steps: number of updates of the blocks to try; 0 for twelve intervals of the cadence.
    """

    cadence: Cadence
    steps: int = 0

    @property
    def component(self) -> Component:
        return self.cadence

    @property
    def who(self) -> str:
        return f"cadence.{getattr(self.cadence, 'kind', '?')}"

    @property
    def last(self) -> int:
        """Number of the last update to try."""
        start = getattr(self.cadence, "start", None) or 1
        return self.steps or start + max(24, round(_REFRESHES * self.cadence.interval))

    def spans(self, steps: Iterable[int], earliest: int, rows: slice = slice(None)) -> list[_DueSpan]:
        """Return the spans (start, stop, first) that are due.

        steps: step of each block.
        earliest: first step at which a refresh may be due.
        rows: slice of the stack whose spans are computed.
        """
        seeds = np.arange(1, 1 + len(_PHASES), dtype=np.int64) * 7919
        updates, blocks = np.array(list(steps), dtype=np.int64), np.arange(len(_PHASES))
        context = StepContext(updates[rows], np.array(_PHASES)[rows], blocks[rows], seeds=seeds[rows])
        return list(self.cadence.due(context, earliest))

    def history(self, earliest: int) -> Iterator[tuple[int, dict[int, bool]]]:
        """Yield (step, {row: True if its first refresh}) of blocks that are updated together."""
        for step in range(earliest, self.last + 1):
            yield step, _rows(self.spans([step] * len(_PHASES), earliest))


def spans_are_inside_the_stack_in_order_and_apart(case: CadenceCase) -> None:
    """Spans have 0 <= start < stop <= N, and each span begins at the end of the span before it, or later."""
    for earliest in (0, 1):
        for step in range(earliest, case.last + 1):
            end, found = 0, case.spans([step] * len(_PHASES), earliest)
            for start, stop, _ in found:
                fine = end <= start < stop <= len(_PHASES)
                wanted = f"spans with 0 <= start < stop <= {len(_PHASES)}, ascending and without a common block"
                require(fine, f"{wanted}, are required at step {step}, got {[span[:2] for span in found]}")
                end = stop


def the_first_refresh_of_a_block_says_so_and_no_other(case: CadenceCase) -> None:
    """Every block has one first refresh, and only this refresh is marked `first`, in which stages initialize state."""
    for earliest in (0, 1):
        seen: set[int] = set()
        for step, found in case.history(earliest):
            for row, first in found.items():
                wanted = row not in seen
                require(first == wanted, f"first={wanted} is required of block {row} at step {step}, got {first}")
            seen |= found.keys()
        left = sorted(set(range(len(_PHASES))) - seen)
        require(not left, f"a refresh of every block in {case.last} steps is required, got none of blocks {left}")


def blocks_are_due_as_often_as_the_interval_says(case: CadenceCase) -> None:
    """With a `period`, blocks are due at the same steps of each period; without one, as often as the interval up to a
    factor of three."""
    period, interval = case.cadence.period, case.cadence.interval
    places = None if period is None else case.cadence.steps_due(np.array(_PHASES)).tolist()
    times: list[list[int]] = [[] for _ in _PHASES]
    for step, found in case.history(1):
        for row in found:
            times[row].append(step)
    for row, steps in enumerate(times):
        start = steps[0] if steps else case.last
        if places is not None and period is not None:
            wanted = [t for t in range(start + 1, case.last + 1) if t % period == places[row] % period]
            require(steps[1:] == wanted, f"block {row} at steps {wanted[:6]} ... is required, got {steps[1:7]} ...")
            continue
        span, count = case.last - start, len(steps) - 1
        mean = span / max(count, 1)
        fine = span < 6 * interval or interval / 3 <= mean <= 3 * interval
        require(fine, f"about {interval:g} steps between refreshes, the interval, are required, got {mean:.3g}")


def a_step_that_is_not_possible_has_no_refresh(case: CadenceCase) -> None:
    """No block is due at a step for which `possible(step)` is False. Ranks and programs rely on `possible` before a
    stack exists."""
    for earliest in (0, 1):
        for step, found in case.history(earliest):
            possible = case.cadence.possible(step, earliest)
            require(possible or not found, f"possible({step}, {earliest}) is False, got blocks {sorted(found)} due")


def a_block_is_due_by_its_own_step_and_phase_alone(case: CadenceCase) -> None:
    """A block is due at the same steps if spans are computed again, for a slice of the stack, or for a stack whose
    other blocks are at other steps.
    """
    together = dict(case.history(1))
    whole, count = [3] * len(_PHASES), len(_PHASES)
    require(case.spans(whole, 1) == case.spans(whole, 1), "equal spans for equal steps are required, got others")
    for offset in range(case.last - count):
        steps = [1 + offset + (3 * row) % count for row in range(count)]
        alone = {row: together[steps[row]][row] for row in range(count) if row in together[steps[row]]}
        found = _rows(case.spans(steps, 1))
        require(found == alone, f"blocks {alone} are required to be due at steps {steps}, got {found}")
        part = _rows(case.spans(steps, 1, slice(2, 5)))
        wanted = {row - 2: first for row, first in alone.items() if 2 <= row < 5}
        require(part == wanted, f"rows 2 to 5 alone: {wanted} are required to be due at steps {steps}, got {part}")


def _rows(spans: Iterable[_DueSpan]) -> dict[int, bool]:
    return {row: first for start, stop, first in spans for row in range(start, stop)}


CADENCE_LAWS: tuple[Law[CadenceCase], ...] = (
    Law(the_declaration_survives),
    Law(the_first_refresh_of_a_block_says_so_and_no_other),
    Law(blocks_are_due_as_often_as_the_interval_says),
    Law(a_step_that_is_not_possible_has_no_refresh),
    Law(a_block_is_due_by_its_own_step_and_phase_alone),
)
SPANS: Law[CadenceCase] = Law(spans_are_inside_the_stack_in_order_and_apart)
