"""Exchange of blocks: gradients to where blocks are computed, updates to where parameters lie.

`LocalExchange` finds everything in this process. `RankExchange`, beside it, sends blocks to their owners and updates
back, and leaves to a `LocalExchange` what needs no messages. A parameter set steps through either by the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.stacks import Stack

from ..apply import IterateStore
from ..apply.write import Rates
from ..sharding.placement import ParamSpec
from ..sharding.rank_sync import failed_roots
from .finite_check import GivenGradients, GradientSurvey, LocalSurvey
from .stack_state import ActiveBlocks

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
    """

    gradients: Sequence[Any]
    active: NDArray[np.bool_]
    mask: Tensor | None
    rates: Rates
    survey: GradientSurvey
    numbers: Mapping[str, Tensor | float] = field(default_factory=dict)
    entries: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class BlockExchange(Protocol):
    """Brings blocks to where they are computed and updates to where parameters lie.

    In a step: `survey`, `begin`, then for every stack in order `gather` and `deliver`, then `finish`.
    """

    def survey(self, given: GivenGradients) -> GradientSurvey:
        """What is known of the full gradients."""

    def begin(self, step: Step, moved: NDArray[np.bool_]) -> None:
        """Starts the exchange of one step; moved `[P]`: parameters that it moves, and not only primes."""

    def gather(self, blocks: ActiveBlocks, source: GatherSource) -> Tensor:
        """The blocks of gradients, with their decay, of what decays or of a signal, `[n, *block]`."""

    def parameter_rms(self, stack: Stack) -> Tensor:
        """The root mean square of the full parameter that each block belongs to, `[n]`."""

    def deliver(self, blocks: ActiveBlocks, direction: Tensor) -> Mapping[int, Tensor]:
        """Takes the directions of blocks; returns updates that are complete by now, by position of the parameter."""

    def report_failed_roots(self, path: str, positions: Sequence[int]) -> None:
        """Says that roots of these parameters have failed too often: ArithmeticError, here or on all ranks."""

    def finish(self) -> Mapping[int, Tensor]:
        """The updates that no `deliver` has returned, by position; all updates that it has returned are written."""


class LocalExchange:
    """Blocks and updates of what this process holds: views and copies, no messages."""

    def __init__(self, specs: Sequence[ParamSpec], iterates: IterateStore, tolerated: int) -> None:
        self.names = [spec.name for spec in specs]
        self.iterates, self.tolerated = iterates, tolerated
        self._numels = [math.prod(spec.shape) for spec in specs]
        self._updates: dict[int, Tensor] = {}
        self._step: Step | None = None

    @property
    def step(self) -> Step:
        """The step under way."""
        assert self._step is not None
        return self._step

    def survey(self, given: GivenGradients) -> GradientSurvey:
        return LocalSurvey(given.gradients, given.present)

    def begin(self, step: Step, moved: NDArray[np.bool_]) -> None:
        self._step, self._updates = step, {}

    def gather(self, blocks: ActiveBlocks, source: GatherSource) -> Tensor:
        if source in self.step.entries:
            return blocks.stack.gather(self.step.entries[source])
        if source == "parameters":
            return blocks.stack.gather(self.iterates.decaying())
        gradient = blocks.stack.gather(self.step.gradients)
        rate = self.step.rates.gradient_decay(blocks.stack_state.path)
        return torch.add(gradient, blocks.stack.gather(self.iterates.parameters), alpha=rate) if rate else gradient

    def parameter_rms(self, stack: Stack) -> Tensor:
        positions = list(dict.fromkeys(stack.param_ids.tolist()))
        norms = torch._foreach_norm([self.iterates.parameters[p].to(stack.dtype) for p in positions])
        means = torch._foreach_div(norms, [self._numels[p] ** 0.5 for p in positions])
        rms = dict(zip(positions, means, strict=True))
        return torch.stack([rms[p] for p in stack.param_ids.tolist()])

    def deliver(self, blocks: ActiveBlocks, direction: Tensor) -> Mapping[int, Tensor]:
        stack = blocks.stack
        if all(grid.is_parameter for _, grid in stack.grids):
            return dict(zip(stack.param_ids.tolist(), direction.unbind(0), strict=True))
        for position, grid in stack.grids:
            if position not in self._updates:
                self._updates[position] = torch.empty(grid.merged, dtype=stack.dtype, device=stack.device)
        stack.scatter(direction, self._updates)
        return {}

    def report_failed_roots(self, path: str, positions: Sequence[int]) -> None:
        names = sorted({self.names[position] for position in positions})
        raise failed_roots(path or "update", self.tolerated, names)

    def finish(self) -> Mapping[int, Tensor]:
        updates, self._updates, self._step = self._updates, {}, None
        return updates


Provider = Callable[[ActiveBlocks, Step, BlockExchange], Tensor | float]

PROVIDERS: Mapping[str, Provider] = {
    "lr": lambda blocks, step, exchange: step.rates.step_scale(blocks.stack_state.path).lr,
    "parameter_rms": lambda blocks, step, exchange: exchange.parameter_rms(blocks.stack),
}
"""How a signal is found that belongs to a stack, by name: a number, or `[n]` for the active blocks."""


def find_signals(blocks: ActiveBlocks, step: Step, exchange: BlockExchange) -> dict[str, Tensor | float]:
    """The signals that the stages of a stack ask for: numbers, `[n]` or `[n, *block]` for its active blocks."""
    state, found = blocks.stack_state, dict[str, Tensor | float]()
    for name in sorted(state.signals):
        if name in PROVIDERS:
            found[name] = PROVIDERS[name](blocks, step, exchange)
        elif name in step.entries:
            found[name] = exchange.gather(blocks, name)
        elif name in step.numbers:
            value = step.numbers[name]
            if isinstance(value, Tensor) and value.ndim:
                value = value[torch.from_numpy(blocks.stack.param_ids).to(value.device)].to(blocks.stack.dtype)
            found[name] = value
    return {**found, **{key: step.numbers[key] for key in state.totals}}
