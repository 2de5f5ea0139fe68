"""One step of stacks: the directions of their blocks, of all stacks together that take sums over shared parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking.parameter_sums import ParameterSum, run_stacks
from eigengraft.errors import ContractError
from eigengraft.numerics import has_values, per_block
from eigengraft.preconditioners import run_chain
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from .equal_blocks import connected
from .stack_state import ActiveBlocks, StackState

_T = TypeVar("_T")


@dataclass(frozen=True)
class StackStep:
    """One step of the n active blocks of a stack.

    blocks: the blocks, with the state of their stack.
    gradient: `[n, *block]`.
    mask: `[n]`, blocks whose state is written; None: all of them.
    context: what their stages are told.
    """

    blocks: ActiveBlocks
    gradient: Tensor
    mask: Tensor | None
    context: StepContext

    def state(self, chain: Literal["update", "after_decay"]) -> State:
        """The state that a chain reads and writes in one call."""
        return self.blocks.stack_state.state(chain, self.blocks.rows, self.mask, self.context)

    def prime(self) -> None:
        """Shows the first gradient of blocks to a chain with a lagged stage: it is observed, nothing moves."""
        state = self.state("update")
        for stage in self.blocks.stack_state.rule.update:
            stage.prime(state.scope(stage.label), self.gradient, self.context)

    def direction(self) -> Tensor:
        """The direction of the blocks, before weight decay."""
        own, g, context = self.blocks.stack_state, self.gradient, self.context
        direction = run_chain(own.rule.update, self.state("update"), g, g, context)
        now = direction.device.type == "cpu" or context.steps.max() % 100 < 3  # looking may wait
        if own.foreign and now and has_values(direction):
            self._require_finite(direction)
        if own.lr_factors is None:
            return direction
        rows = self.blocks.rows
        return direction * per_block(own.lr_factors if rows is None else own.lr_factors[rows], direction)

    def after_decay(self, decayed: Tensor) -> Tensor:
        """The direction after the stages that follow weight decay. decayed: the direction with the decay added."""
        stages = self.blocks.stack_state.rule.after_decay
        return run_chain(stages, self.state("after_decay"), self.gradient, decayed, self.context)

    def step_size(self) -> Tensor | None:
        """`[n]`, what weight decay of the blocks is multiplied by; None: nothing. To be read after `direction`."""
        state, size = self.state("update"), None
        for key in self.blocks.stack_state.step_sizes:
            own = state.scope(str(key.stage).removeprefix(f"{state.path}."))[key.slot]
            size = own if size is None else size * own
        return size

    def _require_finite(self, direction: Tensor) -> None:
        """Raises ContractError for a direction with inf or nan of gradients without."""
        bad = ~direction.flatten(1).isfinite().all(1) & self.gradient.flatten(1).isfinite().all(1)
        if bad.any():
            raise ContractError(
                f"{', '.join(self.blocks.stack_state.foreign)}: finite directions are required, got {int(bad.sum())} "
                f"of {len(bad)} with inf or nan from finite gradients; no parameter has got them. With checked=True "
                "the error names the stage that made them"
            )

    def note_failures(self, tolerated: int) -> None:
        """Ask, after a refresh, which roots or bases have failed more often in a row than tolerated."""
        if any(self.context.due.values()) and has_values(self.gradient):  # every stage has been asked
            self.blocks.stack_state.note_failures(tolerated)


def sharing_sums(states: Sequence[StackState]) -> list[list[StackState]]:
    """Stacks in lists, those together whose stages take sums over parameters that they share.

    Numbers are added in the order of a list: of shapes, so that it depends on the parameter alone.
    """
    shared = connected([set(state.stack.param_ids.tolist()) if state.spans else set() for state in states])
    return [sorted((states[index] for index in own), key=lambda state: state.stack.block) for own in shared]


def active_blocks(
    states: Sequence[StackState], active: NDArray[np.bool_], counts: NDArray[np.int64]
) -> Iterator[tuple[list[ActiveBlocks], bool]]:
    """(active blocks of stacks of one update, whether this gradient only primes their statistics).

    active, counts: `[P]`, parameters that take part and gradients that each has had.
    """
    selections = [(active, False)]
    if states[0].lagging and (first := active & (counts == 1)).any():
        selections = [(first, True), (active & ~first, False)]
    for chosen, priming in selections:
        found = [blocks for state in states if (blocks := state.select(chosen)) is not None]
        if found:
            yield found, priming


def prime(steps: Sequence[StackStep]) -> None:
    """Shows first gradients to stacks that share sums over parameters."""
    _run(steps, lambda step, _: step.prime())


def directions(steps: Sequence[StackStep]) -> list[Tensor]:
    """The directions of stacks that share sums over parameters, before weight decay."""
    return _run(steps, lambda step, _: step.direction())


def after_decay(steps: Sequence[StackStep], decayed: Sequence[Tensor]) -> list[Tensor]:
    """Their directions after the stages that follow weight decay; decayed: directions with the decay added."""
    return _run(steps, lambda step, index: step.after_decay(decayed[index]))


def _run(steps: Sequence[StackStep], act: Callable[[StackStep, int], _T]) -> list[_T]:
    """The results of `act` on each step, with its index; side by side where stages take sums."""
    if not steps[0].blocks.stack_state.spans:
        return [act(step, index) for index, step in enumerate(steps)]

    def run(step: StackStep, index: int) -> Callable[[ParameterSum], _T]:
        return lambda sums: act(replace(step, context=step.context.with_sums(sums)), index)

    param_ids = [step.context.param_ids for step in steps]
    return run_stacks([run(step, index) for index, step in enumerate(steps)], param_ids)
