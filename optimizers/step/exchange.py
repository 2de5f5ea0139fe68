"""Exchange of blocks: it copies gradients to where blocks are computed, and updates to where parameters are stored.

`LocalExchange` reads and writes tensors of this process alone. `RankExchange` in `rank_exchange.py` sends blocks to the
ranks that own them, and receives updates. A parameter set calls the same methods of both classes, and of the objects
that their method `begin` returns for one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking import stacked_rows
from eigengraft.blocking.stacks import Assembly, side_blocks
from eigengraft.numerics import StackRows, norms_by_dtype
from eigengraft.signals import asking, known_signals

from ..recipe.recipe import Recipe
from ..stacks.placement import ParamSpec
from ..stacks.rank_checks import failed_roots
from ..stacks.stack import ActiveBlocks, StackState
from ..write import IterateStore
from ..write.write import EntryUpdates, decayed_gradient
from .gradients import GivenGradients, GradientSurvey, LocalSurvey, gather_gradients
from .inputs import StepInputs


def gathers_decaying(recipe: Recipe, path: str) -> bool:
    """Return True if a step gathers the tensors that decay, because weight decay alpha W is added to directions.

    The result is False if the tensors W are the signal "parameter", which a stage of the update requests: a step then
    gathers the signal. With an averaging, the tensors that decay may be others than the parameters.

    path: path of the update in the recipe.
    """
    rule = recipe.rules()[path]
    return rule.adds_decay() and (recipe.averaging is not None or "parameter" not in asking(rule.stages()))


Write = Callable[[EntryUpdates], None]
"""Function that writes updates into parameters."""


class LocalExchange:
    """Exchange within this process by views and copies, without messages.

    small: stacks of small parameters, whose gradients are gathered and checked together.
    large: positions of the parameters that are in no small stack.
    """

    def __init__(
        self, specs: Sequence[ParamSpec], iterates: IterateStore, tolerated: int, small: Sequence[StackState] = ()
    ) -> None:
        self.small, joined = small, {position for state in small for position in state.stack.positions}
        self.large = [position for position in range(len(specs)) if position not in joined]
        self.names = [spec.name for spec in specs]
        self.iterates, self.tolerated = iterates, tolerated
        self.numels = [math.prod(spec.shape) for spec in specs]

    def survey(self, given: GivenGradients) -> GradientSurvey:
        """Return facts about the full gradients, such as their norms, also if this rank holds only shards."""
        return LocalSurvey(given, self.small, self.large)

    def begin(self, inputs: StepInputs, stacks: Sequence[StackState], write: Write) -> LocalStep:
        """Begin one step. Return the object that copies gradients into stacks, and directions to parameters.

        stacks: all stacks that are updated before `LocalStep.finish` is called.
        write: function that writes complete updates into parameters.
        """
        return LocalStep(self, inputs, stacks, write)

    def close(self) -> None:
        """End all communication. All ranks call this method when they replace the parameter set."""

    def report_failed_roots(self, path: str, positions: Sequence[int]) -> None:
        """Raise ArithmeticError because matrix roots of some parameters failed too often.

        path: path of the update of these parameters in the recipe.
        positions: positions of the parameters.
        """
        names = sorted({self.names[position] for position in positions})
        raise failed_roots(path or "update", self.tolerated, names)


class LocalStep:
    """Copies gradients of one step into stacks, and directions back to parameters. All parameters are in this process.

    For one stack after another, a step calls `gradients` and other methods that return tensors of blocks, and then
    `deliver`. At the end it calls `finish`.

    inputs: inputs of the step.
    iterates: state of the averaging and of constraints, with the parameters.
    write: function that writes complete updates into parameters.
    """

    def __init__(self, exchange: LocalExchange, inputs: StepInputs, stacks: Sequence[StackState], write: Write) -> None:
        self.inputs, self.iterates, self.write = inputs, exchange.iterates, write
        self._stacks, self._numels, self._assembly = stacks, exchange.numels, Assembly()

    @cached_property
    def decaying_tensors(self) -> Sequence[Tensor]:
        """By position, the tensors to which weight decay applies."""
        return self.iterates.decaying()

    def gradients(self, blocks: ActiveBlocks) -> Tensor:
        """Return the gradients of active blocks, `[n, *block]`, with the decay that the recipe adds to gradients."""
        stack, path, rates = blocks.stack, blocks.stack_state.path, self.inputs.rates
        gradient = gather_gradients(blocks, self.inputs.gradients, self.inputs.survey)
        if not rates.decays_gradients(path):
            return gradient
        return rates.map_rows(
            path, stack.param_ids, decayed_gradient, gradient, stack.gather(self.iterates.own_entries)
        )

    def decaying(self, blocks: ActiveBlocks) -> Tensor:
        """Return the entries of active blocks, `[n, *block]`, of the tensors to which weight decay applies."""
        return blocks.stack.gather(self.decaying_tensors)

    def signal(self, blocks: ActiveBlocks, name: str) -> Tensor:
        """Return the entries of active blocks, `[n, *block]`, of a signal that has a number for each entry."""
        return blocks.stack.gather(self.inputs.signals[name])

    def learning_rate(self, blocks: ActiveBlocks) -> Tensor | float:
        """Return the learning rate of n blocks, whose parameters are all in one param group."""
        return self.inputs.rates.step_rates(blocks.stack_state.path, blocks.stack.positions[0]).lr

    def parameter_rms(self, blocks: ActiveBlocks) -> Tensor:
        """Return `[n]`, for each of n blocks the root mean square of its full parameter."""
        return torch.stack([self._rms[position] for position in blocks.stack.positions]).to(blocks.stack.dtype)

    @cached_property
    def _rms(self) -> dict[int, Tensor]:
        """The root mean square, 0-d, of each active parameter whose stages request it, by its position in the set.

        The root mean squares of all parameters are computed together, in few kernels, before the step changes any of
        the parameters.
        """
        asking = np.unique(np.concatenate([x.stack.param_ids for x in self._stacks if "parameter_rms" in x.signals]))
        return self._rms_of(asking[self.inputs.active[asking]].tolist())

    def _rms_of(self, positions: Sequence[int]) -> dict[int, Tensor]:
        """Return the root mean squares, 0-d, of parameters that this process holds whole, by their position in the set.

        positions: positions of the parameters in the parameter set.
        """
        values = dict[int, Tensor]()
        for places, norms in norms_by_dtype([self.iterates.own_entries[position] for position in positions]):
            values |= self._rms_from_norms([positions[place] for place in places], norms)
        return values

    def _rms_from_norms(self, positions: Sequence[int], norms: Tensor) -> dict[int, Tensor]:
        """Return the root mean squares, 0-d, of full parameters, by their position in the parameter set.

        positions: positions of the n parameters in the parameter set.
        norms: `[n]`, Frobenius norms of the full parameters.
        """
        roots = [self._numels[position] ** 0.5 for position in positions]
        return dict(zip(positions, torch._foreach_div(norms.unbind(), roots), strict=True))

    def deliver(self, blocks: ActiveBlocks, direction: Tensor) -> None:
        """Accept the directions of blocks, and write the update of each parameter whose blocks are now complete."""
        if (stack := blocks.stack).of_parameters:
            values: Sequence[Tensor] | Tensor = direction
            if not stack.joins:
                if len(direction) > 1 and not direction.is_cpu:
                    # made contiguous, because torch's operations on lists of tensors launch a separate kernel for each
                    # update whose strides differ from the strides of its parameter
                    direction = direction.contiguous()
                values = StackRows(direction)
            self._write(stack.param_ids, values)
            return
        entries, targets = math.prod(stack.block), dict[int, Tensor]()
        for at, grid in stack.grids:
            numel = len(grid.keys) * entries
            targets[at] = self._assembly.target(at, grid.merged, stack.dtype, stack.device, numel)
        stack.scatter(direction, targets)
        done = self._assembly.completed(targets)
        self._write(np.array([*done], dtype=np.int64), [*done.values()])

    def _write(self, positions: NDArray[np.int64], values: Sequence[Tensor] | Tensor) -> None:
        """Apply the updates of whole parameters to the parameters.

        positions: positions of the parameters in the parameter set.
        values: the updates, in the same order.
        """
        self.write(EntryUpdates.of_parameters(self.iterates.own_entries, positions, values))

    def finish(self) -> None:
        """End the step after `deliver` was called for all blocks. Every update has been written by then."""
        assert not self._assembly.begun


Provider = Callable[[ActiveBlocks, LocalStep], Tensor | float]
PROVIDERS: Mapping[str, Provider] = {
    "lr": lambda blocks, exchange: exchange.learning_rate(blocks),
    "parameter_rms": lambda blocks, exchange: exchange.parameter_rms(blocks),
}
"""Mapping from the name of a signal to the function that computes the signal for n active blocks of a stack, as a
number or `[n]`."""


def find_signals(blocks: ActiveBlocks, exchange: LocalStep) -> dict[str, Tensor | float]:
    """Return the signals that the stages of a stack request, by name, for n active blocks.

    The result also has the sums of slots over all parameters that the stages read, by key of the slot. A sum is one
    number. The form of a signal follows from its `Signal.extent`:

    - "step": one number.
    - "parameter": `[n]`, for each block the number of its parameter.
    - "entry": `[n, *block]`.
    - "input_matrix", "output_matrix": `[n, c, c]`, for each block a matrix over its c inputs or outputs. Blocks with
      one axis have no matrix over inputs, because it is not known if the axis is one of inputs or of outputs.
    - "partner": `[n, p, r]`, for each block a matrix of the other factor of its parameter's product, such as the value
      or the gradient of that factor. Shorter matrices are filled up with zeros.
    """
    stack_state, stack, given = blocks.stack_state, blocks.stack, exchange.inputs.signals
    values = dict[str, Tensor | float]()
    if not (stack_state.signals or stack_state.totals):
        return values
    known = known_signals()
    for name in sorted(PROVIDERS.keys() & stack_state.signals):
        values[name] = PROVIDERS[name](blocks, exchange)
    for name in sorted(given.keys() & stack_state.signals):
        value = given[name]
        match known[name].extent:
            case "entry":
                values[name] = exchange.signal(blocks, name)
            case "input_matrix" if len(stack.block) == 1:
                pass
            case "input_matrix" | "output_matrix":
                values[name] = side_blocks(stack, value)
            case "partner":
                values[name] = stacked_rows(value, stack.param_ids.tolist(), stack.dtype)
            case "parameter":
                values[name] = value[blocks.param_index].to(stack.dtype)
            case "step":
                values[name] = value
    return {**values, **{key: given[key] for key in stack_state.totals}}
