"""The step of a stack by its stages: functions of tensors that compute the update of the blocks of the stack.

`execution.py` chooses whether they run on the whole stack, in chunks, or as a compiled program (`traced.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from eigengraft.blocking.parameter_sums import ParameterSum, run_stacks
from eigengraft.errors import ContractError
from eigengraft.numerics import compute_dtype, has_values, norms_by_dtype, per_block
from eigengraft.preconditioners import run_chain
from eigengraft.slots import State, StateKey
from eigengraft.step_context import StepContext

from ..recipe.recipe import UpdateRule
from ..stacks.stack import ActiveBlocks, StackState, connected
from ..write.write import Rates, StepRates, after_write, decayed_gradient, with_decay, write

_T = TypeVar("_T")
ChainName = Literal["update", "after_decay"]
CHECKED_UPDATES = 3
"""Number of updates of a block, from the first on, in which its direction is checked for inf and nan. A faulty stage
fails in its first updates, and a check of every update would cost a pass over all directions."""
StateOf = Callable[[ChainName], State]
"""Function from the name of a chain of an update (`update` or `after_decay`) to the state that the chain reads and
writes in one call."""


def run_update(
    rule: UpdateRule,
    state_of: StateOf,
    gradient: Tensor,
    context: StepContext,
    factors: Tensor | None = None,
    decay: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the directions `[n, *block]` of n blocks, computed by the stages of an update.

    The caller subtracts them, times the learning rate, from parameters. The state changes in place.

    state_of: function that returns the state of a chain.
    gradient: gradients `[n, *block]`, including the weight decay that the recipe adds to them.
    factors: factor of each direction, a number or `[n]`. None: no factor.
    decay: function that adds weight decay to directions. None: the weight decay is part of the write.
    """
    directions = run_chain(rule.update, state_of("update"), gradient, gradient, context)
    if factors is not None:
        directions = directions * per_block(factors, directions)
    if decay is not None:
        directions = decay(directions)
    if not rule.after_decay:
        return directions
    if directions is gradient:  # without weight decay, the chain must have the wires that it has with weight decay
        directions = gradient.view_as(gradient)
    return run_chain(rule.after_decay, state_of("after_decay"), gradient, directions, context)


def is_checked(step: int) -> bool:
    """Return True if the result of a block's update is checked for inf and nan at this step count of the block."""
    return step <= CHECKED_UPDATES


def require_finite(directions: Tensor, gradient: Tensor, path: str, context: StepContext) -> None:
    """Raise ContractError if the direction of a block has inf or nan although its gradient is finite.

    Nothing is checked if all n blocks have had more than CHECKED_UPDATES updates.

    directions: directions `[n, *block]`.
    gradient: gradients `[n, *block]` from which the directions were computed.
    path: path of the chain in the recipe, for the error.
    context: step counts of the blocks.
    """
    first = int(context.steps.min()) if context.uniform is None else context.uniform
    if not is_checked(first) or not has_values(directions):
        return
    bad = ~directions.flatten(1).isfinite().all(1) & gradient.flatten(1).isfinite().all(1)
    if bad.any():
        raise ContractError(
            f"{path}: the directions of {int(bad.sum())} of {len(bad)} blocks of shape {list(directions.shape[1:])} "
            "hold inf or nan, though their gradients are finite; these directions were not written. With checked=True "
            "the error names the stage that computed them"
        )


@contextmanager
def finite_writes(stack_state: StackState, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> Iterator[None]:
    """Return a context in which a compiled program updates parameters in place, and which then checks the parameters.

    At its end the context raises ContractError if a parameter has inf or nan, although the parameter and its gradient
    were finite before. The program does not return its directions, so `require_finite` cannot check them. The first
    CHECKED_UPDATES updates of a stack run in this context. On a device the host waits once.

    tensors: the updated parameters of the stack.
    """
    if not has_values(tensors[0]):
        yield
        return
    dtype = stack_state.stack.dtype
    before = _finite(tensors, dtype) & _finite(gradients, dtype)
    yield
    bad = before & ~_finite(tensors, dtype)
    if bad.any():
        raise ContractError(
            f"{stack_state.chain_path('update')}: a compiled update wrote inf or nan to {int(bad.sum())} of {len(bad)} "
            f"parameters of shape {list(tensors[0].shape)}, though they and their gradients were finite. With "
            "checked=True no step is compiled, and the error names the stage that computed them"
        )


def _finite(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return `[n]`, True for each of n tensors that has neither inf nor nan."""
    ((_, norms),) = norms_by_dtype(tensors, [dtype] * len(tensors), math.inf)
    return norms.isfinite()


def update_entries(
    rule: UpdateRule,
    state_of: StateOf,
    entries: tuple[Tensor, Tensor],
    context: StepContext,
    rates: StepRates,
    factors: Tensor | None = None,
) -> None:
    """Update entries of a parameter in place: add decay to the gradient, compute the direction, and write it.

    If the state has a mask `[n]`, the parameter changes only where the mask is True.

    state_of, factors: as in `run_update`.
    entries: (parameter, gradient), each `[n, *block]`.
    rates: learning rate and weight decay of the write.
    """
    parameter, dtype = entries[0], compute_dtype(entries[0].dtype)
    gradient = entries[1].to(dtype)
    if rates.decay.in_gradient:
        gradient = decayed_gradient(gradient, parameter.to(dtype), rates)
    directions = run_update(rule, state_of, gradient, context, factors)
    if not context.traced:
        require_finite(directions, gradient, state_of("update").path, context)
    mask = state_of("update").mask
    if mask is None:
        write([parameter], [directions], rates)
    else:
        parameter.copy_(after_write(rates, parameter, directions, per_block(mask, directions)))


def times_step_sizes(parameters: Tensor, state: State, sizes: Sequence[StateKey]) -> Tensor:
    """Return the parameters of n blocks, multiplied by the step sizes that stages compute for the blocks.

    A stage that multiplies directions by a step size of its own, as Prodigy does, multiplies weight decay by it too.

    parameters: tensors `[n, *block]` that decay.
    state: state of the stages.
    sizes: names of the slots `[n]` in which stages store a step size for each block.
    """
    for key in sizes:
        size = state.scope(str(key.stage).removeprefix(f"{state.path}."))[key.slot]
        parameters = parameters * per_block(size, parameters)
    return parameters


def plus_decay(parameters: Tensor, directions: Tensor, rates: StepRates) -> Tensor:
    """Return directions plus the weight decay of n parameters, all of which have the same rates.

    parameters: tensors `[n, *block]` that decay.
    directions: directions `[n, *block]`.
    rates: the rates.
    """
    return with_decay([directions], [parameters], rates)[0]


@dataclass(frozen=True)
class StackStep:
    """One step of the n active blocks of a stack.

    blocks: the active blocks, with the state of their stack.
    gradient: gradients `[n, *block]`.
    mask: `[n]`, True for blocks whose state and parameters are written. None: all blocks are written.
    context: step counts, bias corrections and signals of the blocks.
    rates: learning rate and weight decay of each parameter.
    decaying: tensors `[n, *block]` whose weight decay is added to directions. None: no decay is added to directions.
    """

    blocks: ActiveBlocks
    gradient: Tensor
    mask: Tensor | None
    context: StepContext
    rates: Rates
    decaying: Tensor | None = None

    def state(self, chain: ChainName) -> State:
        """Return the slots of the stages of a chain, for the active blocks. The stages read and write them.

        chain: "update", or "after_decay" for the stages that run after weight decay was added.
        """
        return self.blocks.stack_state.state(chain, self.blocks.rows, self.mask, self.context)

    def prime(self) -> None:
        """Initialize statistics from the first gradient of the blocks. No parameter changes."""
        assert self.context.priming
        self._run_update()  # the chains do not map directions in this step

    def by_stages(self) -> Tensor:
        """Return the directions `[n, *block]` of all active blocks, computed by the stages."""
        directions = self._run_update()
        require_finite(directions, self.gradient, self.blocks.stack_state.chain_path("update"), self.context)
        return directions

    def _run_update(self) -> Tensor:
        stack_state, rows = self.blocks.stack_state, self.blocks.rows
        factors = stack_state.width_factors
        if factors is not None and rows is not None:
            factors = factors[rows]
        decay = None if self.decaying is None else self._add_decay
        return run_update(stack_state.rule, self.state, self.gradient, self.context, factors, decay)

    def rehearse(self) -> None:
        """Run the stages on a copy of the state and drop the result, so that a measured step can observe the stages.

        A fused kernel computes the actual step, and does not call the stages.
        """
        copies = {name: tensor.clone() for name, tensor in self.blocks.stack_state.tensors.items()}

        def state_of(chain: ChainName) -> State:
            state = self.state(chain)
            state.tensors = copies
            return state

        directions = run_update(self.blocks.stack_state.rule, state_of, self.gradient, self.context)
        require_finite(directions, self.gradient, self.state("update").path, self.context)

    def _add_decay(self, directions: Tensor) -> Tensor:
        stack_state, ids = self.blocks.stack_state, self.blocks.stack.param_ids
        assert self.decaying is not None
        decaying = times_step_sizes(self.decaying, self.state("update"), stack_state.step_sizes)
        return self.rates.map_rows(stack_state.path, ids, plus_decay, decaying, directions)


def sharing_sums(states: Sequence[StackState]) -> list[list[StackState]]:
    """Return the stacks in lists. Stacks whose stages sum over the same parameter are in the same list.

    A list is sorted by shape of the blocks. Sums over a parameter are added in this order, so that the order depends on
    the parameter alone.
    """
    shared = connected([set(state.stack.param_ids.tolist()) if state.spans else set() for state in states])
    return [sorted((states[index] for index in group), key=lambda state: state.stack.block) for group in shared]


def run_together(steps: Sequence[StackStep], act: Callable[[StackStep], _T]) -> list[_T]:
    """Call `act` with the step of each stack, and return the results.

    Blocks of one parameter may be in several stacks. If a stage needs a sum over the whole parameter, such as the norm
    of the parameter, the steps of these stacks stop at that stage. They go on when each of the stacks has computed its
    term of the sum.
    """
    if not steps[0].blocks.stack_state.spans:
        return [act(step) for step in steps]

    def run(step: StackStep) -> Callable[[ParameterSum], _T]:
        return lambda sums: act(replace(step, context=step.context.with_sums(sums)))

    return run_stacks([run(step) for step in steps], [step.context.matrix_ids for step in steps])
