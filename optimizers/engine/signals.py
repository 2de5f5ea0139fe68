"""Signals: what stages ask for besides the gradient, found for one stack at one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from .exchange import BlockExchange, Step
from .stack_state import ActiveBlocks

Provider = Callable[[ActiveBlocks, Step, BlockExchange], Tensor | float]

PROVIDERS: Mapping[str, Provider] = {
    "lr": lambda blocks, step, exchange: step.rates.step_scale(blocks.stack_state.path).lr,
    "parameter_rms": lambda blocks, step, exchange: exchange.parameter_rms(blocks.stack),
}
"""How each signal is found, by name: a number, or `[n]` for the active blocks of a stack."""


def find_signals(blocks: ActiveBlocks, step: Step, exchange: BlockExchange) -> dict[str, Tensor | float]:
    """The signals that the stages of a stack ask for."""
    return {name: PROVIDERS[name](blocks, step, exchange) for name in sorted(blocks.stack_state.signals)}
