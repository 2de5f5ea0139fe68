"""Entry-wise updates in chunks that fit into a cache: what a chain makes of a few entries is written at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.preconditioners import run_chain
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ...apply.weight_decay import StepScale
from ...apply.write import decayed_gradient, write
from ..exchange import Step
from ..stack_state import ActiveBlocks, StackState
from .compiled import move_compiled

CHUNK_ENTRIES = 1 << 18
"""Entries of a chunk (measured): fewer keep more of a chain in a cache, but each chunk costs a run of the chain."""
_LEAST = 1 << 15
"""Entries from which on a block is worth steps of its own (measured)."""
_VECTOR = 64
"""Entries that a kernel takes at a time: some round the rest of a tensor differently."""


class Chunk(NamedTuple):
    """Some entries of a block, as views `[1, n, 1, ...]` with as many axes as a stack of it has.

    parameter, gradient: of the block.
    tensors: state of the block, by "<stage path>/<slot>".
    """

    parameter: Tensor
    gradient: Tensor
    tensors: dict[str, Tensor]


def worth_chunks(own: StackState) -> bool:
    """Whether entry-wise stages alone update the blocks of a stack, which are on a CPU and large enough for chunks."""
    return own.stack.device.type == "cpu" and math.prod(own.stack.block) >= _LEAST and own.rule.entrywise()


def chunks_refused(own: StackState) -> str | None:
    """Why blocks are not taken in chunks, though they are worth it; None: they are.

    Each block must be a parameter of this process, whose stages ask for nothing but gradients, and keep one number for
    each entry, in the dtype that they compute in.
    """
    shape, asked = own.stack.block, [*sorted(own.signals), *own.foreign, *own.totals]
    reasons = {
        "a stage is lagged": own.rule.lagging(),
        "stages follow weight decay, or multiply it": own.adds_decay,
        "it has constraints": bool(own.rule.constraints),
        f"its size is no multiple of {_VECTOR}, and others share its stack": (
            math.prod(shape) % _VECTOR != 0 and len(own.stack.grids) > 1
        ),
        "its updates are sent between ranks": own.block_group is not None,
        "its state is coded": bool(own.encoded),
        f"stages ask for more than gradients or are not from here ({', '.join(asked)})": bool(asked),
        "its state has another shape": any(slot.shape != shape for _, slot in own.slots()),
        "its blocks are parts of it": not own.stack.of_parameters,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def move_in_chunks(
    together: Sequence[ActiveBlocks], step: Step, counts: NDArray[np.int64], parameters: Sequence[Tensor]
) -> bool:
    """Moves the parameters of active blocks, if all have the same step and nobody watches; whether it has.

    counts: `[P]`, gradients that each parameter has had, this one included. Without kernels the numbers are those of
    the same step of a stack, bit for bit.
    """
    blocks, *others = together
    if others:  # they share sums
        return False
    own, positions = blocks.stack_state, blocks.stack.param_ids.tolist()
    if own.chunked is None:
        own.chunked = worth_chunks(own) and chunks_refused(own) is None
    if not (own.chunked or own.kernels) or step.mask is not None or own.checks or own.step_watch:
        return False
    if move_compiled(blocks, step, counts, parameters):
        return True
    if not own.chunked:
        return False
    context = own.context(blocks, counts, {})
    if context.uniform is None or not all(_contiguous(parameters[at], step.gradients[at]) for at in positions):
        return False
    for row, position in zip(blocks.row_numbers, positions, strict=True):
        move = _Move(own, context, step.rates.step_scale(own.path, position))
        for chunk in _chunks(own, row, parameters[position], step.gradients[position]):
            move.run(row, chunk)
    return True


def _contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


class _Move(NamedTuple):
    """One step of a parameter: its stack, the context of that, and the numbers of the write."""

    own: StackState
    context: StepContext
    scale: StepScale

    def run(self, row: int, chunk: Chunk) -> None:
        """Moves a chunk of the block in a row of the stack."""
        own, dtype = self.own, self.own.stack.dtype
        gradient = chunk.gradient.to(dtype)
        if self.scale.gradient_rate:
            gradient = decayed_gradient(gradient, chunk.parameter.to(dtype), self.scale)
        state = State(chunk.tensors, own.stack.block, f"{own.path}.update" if own.path else "update")
        direction = run_chain(own.rule.update, state, gradient, gradient, self.context)
        if own.lr_factors is not None:
            direction = direction * own.lr_factors[row]
        write([chunk.parameter], [direction], self.scale)


def _chunks(own: StackState, row: int, parameter: Tensor, gradient: Tensor) -> Iterator[Chunk]:
    shape = (1, -1, *[1] * (len(own.stack.block) - 1))
    slots = [tensor[row] for tensor in own.tensors.values()]
    parts = [torch.split(tensor.view(shape), CHUNK_ENTRIES, 1) for tensor in (parameter, gradient, *slots)]
    for entries, given, *held in zip(*parts, strict=True):
        yield Chunk(entries, given, dict(zip(own.tensors, held, strict=True)))
