"""A chain of stages with its state, without an optimizer and without parameters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eigengraft.blocking.parameter_sums import ParameterSum, run_stacks
from eigengraft.preconditioners import Stage, chain_slots, run_chain, walk
from eigengraft.slots import State, StateKey
from eigengraft.step_context import StepContext


class StageRunner:
    """A chain of stages with its state for N blocks of one shape. `step` runs it on one gradient `[N, *block]`."""

    def __init__(self, stages: tuple[Stage, ...], block: tuple[int, ...], blocks: int, like: Tensor) -> None:
        self.stages, self.blocks = stages, blocks
        self.lagging = any(stage.cached_traits().lagged for _, stage in walk(stages))
        tensors = {
            StateKey.join(path, name): slot.allocate(blocks, like.dtype, like.device)
            for path, name, slot in chain_slots(stages, block)
        }
        self.state, self.steps = State(tensors, block), 0

    def step(self, gradient: Tensor) -> Tensor:
        """Return the direction of the chain.

        A lagged chain uses the statistics of the step before. Its first step therefore only updates statistics and
        returns zeros.
        """
        priming = self.lagging and self.steps == 0
        self.steps += 1
        context = self.context(gradient.device)
        if priming:
            run_chain(self.stages, self.state, gradient, gradient, context)
            return torch.zeros_like(gradient)

        def run(sums: ParameterSum) -> Tensor:
            return run_chain(self.stages, self.state, gradient, gradient, context.with_sums(sums))

        return run_stacks([run], [context.param_ids])[0]

    def context(self, device: torch.device) -> StepContext:
        """Return the context of the last step, with the signals lr = 1 and parameter_rms = 1."""
        rows = np.arange(self.blocks)
        return StepContext(
            np.full(self.blocks, self.steps - int(self.lagging)),
            np.zeros(self.blocks),
            rows,
            device,
            seeds=rows,
            signals={"lr": 1.0, "parameter_rms": torch.ones(self.blocks, device=device)},
        )
