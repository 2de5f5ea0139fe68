"""Exchange of blocks: gradients to where blocks are computed, updates to where parameters lie.

`LocalExchange` finds everything in this process. `RankExchange`, beside it, sends blocks to their owners and updates
back, and leaves to a `LocalExchange` what needs no messages. A parameter set steps through either by the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking import SideMatrix, stacked_rows
from eigengraft.blocking.stacks import side_blocks
from eigengraft.numerics import compute_dtype
from eigengraft.signals import asking

from ..recipe.recipe import Recipe
from ..stacks.placement import ParamSpec
from ..stacks.rank_checks import failed_roots
from ..stacks.stack import ActiveBlocks
from ..write import IterateStore
from ..write.write import EntryUpdates, Rates, decayed_gradient
from .gradients import GivenGradients, GradientSurvey, LocalSurvey

GatherSource = Literal["gradients", "parameters"] | str
"""What is gathered into blocks: gradients, the tensors that weight decay acts on, or a signal with entries, by name."""


@dataclass(frozen=True)
class Step:
    """One step of P parameters.

    gradients: what this rank holds of each gradient, by position; None: no gradient.
    active: `[P]` on the host, parameters that are updated.
    mask: `[P]` on the device, gradients that are usable; None: those of all active parameters.
    rates: learning rate and weight decay of each update.
    survey: what is known of the full gradients.
    numbers: signals that are numbers or `[P]`, and totals of slots, by name.
    entries: signals that have a number for each entry of parameters, by name and position.
    matrices: signals that have a matrix over the inputs or outputs of parameters, by name and position.
    outputs, partners: signals that have numbers for outputs, which multiply what this rank holds of a parameter, or
        rows of the other factor of a product; in the same way.
    """

    gradients: Sequence[Any]
    active: NDArray[np.bool_]
    mask: Tensor | None
    rates: Rates
    survey: GradientSurvey
    numbers: Mapping[str, Tensor | float] = field(default_factory=dict)
    entries: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    matrices: Mapping[str, Sequence[SideMatrix | None]] = field(default_factory=dict)
    outputs: Mapping[str, Sequence[Tensor | None]] = field(default_factory=dict)
    partners: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)


def decay_source(recipe: Recipe, path: str) -> GatherSource | None:
    """The source of the weight decay that is added to directions of the update at a path; None: the write decays."""
    rule = recipe.updates()[path]
    if not rule.adds_decay():
        return None
    return "parameter" if recipe.averaging is None and "parameter" in asking(rule.stages()) else "parameters"


Write = Callable[[EntryUpdates], None]
"""Moves parameters by their updates."""


class BlockExchange(Protocol):
    """Brings blocks to where they are computed and updates to where parameters lie.

    In a step: `survey`, `begin`, then for every stack in order `gather` and `deliver`, then `finish`. The last
    three write updates that are complete.
    """

    def survey(self, given: GivenGradients) -> GradientSurvey:
        """What is known of the full gradients."""

    def begin(self, step: Step, moved: NDArray[np.bool_], write: Write) -> None:
        """Starts the exchange of one step.

        moved: `[P]`, parameters that the step moves, and not only primes. write: what moves them.
        """

    def gather(self, blocks: ActiveBlocks, source: GatherSource) -> Tensor:
        """The blocks of gradients, with their decay, of what decays or of a signal, `[n, *block]`."""

    def parameter_rms(self, blocks: ActiveBlocks) -> Tensor:
        """The root mean square of the full parameter that each block belongs to, `[n]`."""

    def deliver(self, blocks: ActiveBlocks, direction: Tensor) -> None:
        """Takes the directions of blocks."""

    def report_failed_roots(self, path: str, positions: Sequence[int]) -> None:
        """Says that roots of these parameters have failed too often: ArithmeticError, here or on all ranks."""

    def finish(self) -> None:
        """End the step: all parameters have moved."""


class LocalExchange:
    """Blocks and updates of what this process holds: views and copies, no messages."""

    def __init__(self, specs: Sequence[ParamSpec], iterates: IterateStore, tolerated: int) -> None:
        self.names = [spec.name for spec in specs]
        self.iterates, self.tolerated = iterates, tolerated
        self._numels = [math.prod(spec.shape) for spec in specs]
        self._updates, self._missing = dict[int, Tensor](), dict[int, int]()
        self._step: Step | None = None
        self._write: Write | None = None

    @property
    def step(self) -> Step:
        """The step under way."""
        assert self._step is not None
        return self._step

    def write(self, updates: EntryUpdates) -> None:
        """Moves parameters by updates that are complete."""
        assert self._write is not None
        self._write(updates)

    def survey(self, given: GivenGradients) -> GradientSurvey:
        return LocalSurvey(given.gradients, given.present, given.linear)

    def begin(self, step: Step, moved: NDArray[np.bool_], write: Write) -> None:
        self._step, self._write = step, write
        self._updates, self._missing = {}, {}

    def gather(self, blocks: ActiveBlocks, source: GatherSource) -> Tensor:
        stack, path, rates = blocks.stack, blocks.stack_state.path, self.step.rates
        if source in self.step.entries:
            return stack.gather(self.step.entries[source])
        if source == "parameters":
            return stack.gather(self.iterates.decaying())
        gradient, decays = stack.gather(self.step.gradients), rates.decays_gradients(path)
        both = gradient, stack.gather(self.iterates.parameters) if decays else gradient
        return rates.map_rows(path, stack.param_ids, decayed_gradient, *both) if decays else gradient

    def parameter_rms(self, blocks: ActiveBlocks) -> Tensor:
        positions = blocks.stack.param_ids.tolist()
        rms = self._root_mean_squares(list(dict.fromkeys(positions)), blocks.stack.dtype)
        return torch.stack([rms[position] for position in positions])

    def root_mean_square(self, position: int) -> Tensor:
        """The root mean square of one parameter, 0-d, in the dtype that it is computed in."""
        own = self.iterates.parameters[position]
        return next(iter(self._root_mean_squares([position], compute_dtype(own.dtype)).values()))

    def _root_mean_squares(self, positions: Sequence[int], dtype: torch.dtype) -> dict[int, Tensor]:
        norms = torch._foreach_norm([self.iterates.parameters[p].to(dtype) for p in positions])
        means = torch._foreach_div(norms, [self._numels[p] ** 0.5 for p in positions])
        return dict(zip(positions, means, strict=True))

    def deliver(self, blocks: ActiveBlocks, direction: Tensor) -> None:
        if (stack := blocks.stack).of_parameters:
            self._move(stack.param_ids, direction.unbind(0))
            return
        for position, grid in stack.grids:
            if position not in self._updates:
                self._updates[position] = torch.empty(grid.merged, dtype=stack.dtype, device=stack.device)
                self._missing[position] = self._numels[position]
            self._missing[position] -= len(grid.keys) * math.prod(stack.block)
        stack.scatter(direction, self._updates)
        self._move_complete()

    def _move_complete(self) -> None:
        """Write the updates of parameters whose last block has been delivered, so that no others are kept."""
        done = [position for position, missing in self._missing.items() if missing == 0]
        for position in done:
            del self._missing[position]
        self._move(np.array(done, dtype=np.int64), [self._updates.pop(position) for position in done])

    def _move(self, positions: NDArray[np.int64], values: Iterable[Tensor]) -> None:
        """Writes updates of whole parameters."""
        self.write(EntryUpdates.of_parameters(self.iterates.parameters, positions, values))

    def report_failed_roots(self, path: str, positions: Sequence[int]) -> None:
        names = sorted({self.names[position] for position in positions})
        raise failed_roots(path or "update", self.tolerated, names)

    def finish(self) -> None:
        assert not self._updates
        self._step = self._write = None


Provider = Callable[[ActiveBlocks, Step, BlockExchange], Tensor | float]
PROVIDERS: Mapping[str, Provider] = {
    "lr": lambda blocks, step, exchange: step.rates.lr(blocks.stack_state.path, blocks.stack.param_ids),
    "parameter_rms": lambda blocks, step, exchange: exchange.parameter_rms(blocks),
}
"""How a signal is found that belongs to a stack, by name: a number, or `[n]` for the active blocks."""


def find_signals(blocks: ActiveBlocks, step: Step, exchange: BlockExchange) -> dict[str, Tensor | float]:
    """The signals that the stages of a stack ask for: numbers, or `[n]`, `[n, *block]` or `[n, c, c]` of its blocks."""
    state, found = blocks.stack_state, dict[str, Tensor | float]()
    for name in sorted(state.signals):
        if name in PROVIDERS:
            found[name] = PROVIDERS[name](blocks, step, exchange)
        elif name in step.entries:
            found[name] = exchange.gather(blocks, name)
        elif name in step.matrices:
            found[name] = side_blocks(blocks.stack, step.matrices[name])
        elif name in step.partners:
            found[name] = stacked_rows(step.partners[name], blocks.stack.param_ids.tolist(), blocks.stack.dtype)
        elif name in step.numbers:
            value = step.numbers[name]
            if isinstance(value, Tensor) and value.ndim:
                value = value[blocks.param_index].to(blocks.stack.dtype)
            found[name] = value
    return {**found, **{key: step.numbers[key] for key in state.totals}}
