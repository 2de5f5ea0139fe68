"""The laws of cadences. Each block is due by its own step, phase and seed, and as often as the cadence declares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from eigengraft.preconditioners import Cadence
from eigengraft.step_context import StepContext

from .laws import Case, Law, in_parentheses, require, the_declaration_survives

_PHASES = (0.0, 0.95, 0.3, 0.31, 0.5, 0.0, 0.77)
"""Phases of the blocks to try. Two phases are equal, and two are close to each other."""
_REFRESHES = 12
"""Number of intervals to try. In this many intervals, a random cadence refreshes a block 1 to 36 times, except in 1 of
10^5 runs."""


@dataclass(frozen=True)
class CadenceCase(Case[Cadence]):
    """A cadence under test.

    steps: number of updates of the blocks to try. 0: the first refresh, and then twelve intervals of the cadence, but
        at least 24 updates.
    """

    steps: int = 0

    @property
    def last(self) -> int:
        """Number of the last update to try."""
        return self.steps or self.component.first_due(1) + max(24, round(_REFRESHES * self.component.interval))

    def context(self, steps: Iterable[int], rows: slice = slice(None)) -> StepContext:
        """Return the step context that a cadence receives for some blocks of the stack.

        steps: step of each block of the stack.
        rows: slice that selects the blocks from the stack.
        """
        seeds = np.arange(1, 1 + len(_PHASES), dtype=np.int64) * 7919
        updates = np.array(list(steps), dtype=np.int64)[rows]
        return StepContext(updates, np.array(_PHASES)[rows], np.arange(len(updates)), seeds=seeds[rows])

    def due(self, steps: Iterable[int], earliest: int, rows: slice = slice(None)) -> dict[int, bool]:
        """Return the blocks of a slice that are due, as {row: True if this is the first refresh of the block}. Rows are
        counted from the start of the slice.

        steps: step of each block of the stack.
        earliest: first step at which a refresh may happen.
        rows: slice that selects the rows from the stack.
        """
        spans = self.component.due(self.context(steps, rows), earliest)
        return {row: first for start, stop, first in spans for row in range(start, stop)}

    def history(self, earliest: int) -> Iterator[tuple[int, dict[int, bool]]]:
        """Yield (step, result of `due`) for all steps from `earliest` to `last`. All blocks of the stack are at the
        same step.

        earliest: first step at which a refresh may happen.
        """
        for step in range(earliest, self.last + 1):
            yield step, self.due([step] * len(_PHASES), earliest)


def due_again_returns_a_bool_for_each_block(case: CadenceCase) -> None:
    """The result of `due_again` is a NumPy array of bools `[N]`, or one bool."""
    n = len(_PHASES)
    for step in range(1, case.last + 1):
        for rows in (slice(None), slice(3, 6)):
            found: object = case.component.due_again(case.context([step] * n, rows))
            count = len(range(n)[rows])
            fine = isinstance(found, (bool, np.bool_)) or (
                isinstance(found, np.ndarray) and (found.dtype, found.shape) == (np.bool_, (count,))
            )
            got = f"{type(found).__name__}"
            if isinstance(found, (np.ndarray, Tensor)):
                got += f" of {found.dtype} and shape {list(found.shape)}"
            cause = "compute with `context.steps`, a NumPy array; `context.step` is a tensor"
            wanted = f"a NumPy array of bools of shape [N] with N = {count}, or one bool"
            require(fine, f"due_again() at step {step}", wanted, got, in_parentheses(cause))


def the_first_refresh_is_at_first_due(case: CadenceCase) -> None:
    """The first refresh of a block is at the step `first_due(earliest)`, which is not before the step `earliest`."""
    for earliest in (0, 1):
        start: object = case.component.first_due(earliest)
        fine = isinstance(start, int) and start >= earliest
        require(fine, f"first_due({earliest})", f"a step of at least {earliest}", f"{start!r}")


def blocks_are_due_as_often_as_the_interval_says(case: CadenceCase) -> None:
    """Each block is due as often as the cadence declares.

    If the cadence has a `period`, a block is due at the same steps of each period, after its first refresh. Without a
    period, the mean number of steps between refreshes of each block is between a third of `interval` and three times
    `interval`. The same holds for the mean over all blocks in the second half of the steps. These means are not checked
    if fewer than six intervals are tried.
    """
    period, interval = case.component.period, case.component.interval
    places = None if period is None else case.component.steps_due(np.array(_PHASES)).tolist()
    times: list[list[int]] = [[] for _ in _PHASES]
    for step, found in case.history(1):
        for row in found:
            times[row].append(step)
    for row, steps in enumerate(times):
        start = steps[0] if steps else case.last
        if places is not None and period is not None:
            wanted = [t for t in range(start + 1, case.last + 1) if t % period == places[row] % period]
            what = f"steps at which block {row} is due"
            require(steps[1:] == wanted, what, f"{wanted[:6]} ...", f"{steps[1:7]} ...")
            continue
        span, count = case.last - start, len(steps) - 1
        mean = span / max(count, 1)
        fine = span < 6 * interval or interval / 3 <= mean <= 3 * interval
        got = f"{mean:.3g}" if count else f"no refresh after the first one in {span} steps"
        require(fine, f"steps between refreshes of block {row}", f"about {interval:g}, the `interval`", got)
    start = min((steps[0] for steps in times if steps), default=case.last)
    middle = (start + case.last) // 2
    count = sum(step > middle for steps in times for step in steps)
    if period is None and case.last - start >= 6 * interval:
        mean = len(times) * (case.last - middle) / max(count, 1)
        fine = interval / 3 <= mean <= 3 * interval
        got = f"{mean:.3g}" if count else f"no refresh after step {max(step for steps in times for step in steps)}"
        what = f"steps between refreshes of a block, as a mean over all blocks, after step {middle}"
        require(fine, what, f"about {interval:g}, the `interval`", got)


def a_step_that_is_not_possible_has_no_refresh(case: CadenceCase) -> None:
    """No block is due at a step for which `possible(step, earliest)` is False.

    At such a step the optimizer does not require the inputs that the stage needs for a refresh, so that a refresh would
    lack them.
    """
    for earliest in (0, 1):
        for step, found in case.history(earliest):
            possible = case.component.possible(step, earliest)
            what = f"blocks that are due at step {step}, for which possible({step}, {earliest}) is False"
            require(possible or not found, what, "none", sorted(found))


def step_and_phase_and_seed_decide_when_a_block_is_due(case: CadenceCase) -> None:
    """A block is due at the same steps if `due` is called twice, for a slice of the stack, or for a stack whose other
    blocks are at other steps.
    """
    together = dict(case.history(1))
    count = len(_PHASES)
    for step in range(1, case.last + 1):
        again = case.due([step] * count, 1)
        require(again == together[step], f"due() at step {step}, called twice", "the same blocks", "other blocks")
    for offset in range(case.last - count):
        steps = [1 + offset + (3 * row) % count for row in range(count)]
        alone = {row: together[steps[row]][row] for row in range(count) if row in together[steps[row]]}
        found = case.due(steps, 1)
        what = f"blocks that are due at the steps {steps}"
        cause = in_parentheses("does due_again() use the step of one block for all?")
        wanted = f"{sorted(alone)}, as in a stack in which all blocks are at the same step"
        require(found == alone, what, wanted, sorted(found), cause)
        part = case.due(steps, 1, slice(3, 6))
        rows = [row - 3 for row in alone if 3 <= row < 6]
        what = f"blocks that are due at the steps {steps[3:6]} in a stack that has only blocks 3 to 5 of a larger stack"
        cause = in_parentheses(
            "does due_again() depend on the place of a block in the stack, or on the number of its parameter?"
        )
        require(sorted(part) == rows, what, f"{rows}, as in the larger stack", sorted(part), cause)


CADENCE_LAWS: tuple[Law[CadenceCase], ...] = (
    Law(the_declaration_survives),
    Law(due_again_returns_a_bool_for_each_block, decisive=True),
    Law(the_first_refresh_is_at_first_due),
    Law(blocks_are_due_as_often_as_the_interval_says),
    Law(a_step_that_is_not_possible_has_no_refresh),
    Law(step_and_phase_and_seed_decide_when_a_block_is_due),
)
