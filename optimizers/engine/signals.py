"""Signals: what stages ask for besides the gradient, found for one stack at one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .exchange import BlockExchange, Step
from .stack_state import ActiveBlocks

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
