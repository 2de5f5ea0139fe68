"""Steps of stacks by compiled kernels, where parameters lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.numerics import active_fake_mode

from ...apply.weight_decay import StepScale
from ...recipe.recipe import Recipe, Route
from ..exchange import Step
from ..stack_state import ActiveBlocks, StackState
from .kernels import Kernel, KernelSource, WriteNumbers, kernel_of

_SMALL = 1 << 14
"""Entries below which blocks are worth a copy into one tensor: a call takes as long as so many (measured)."""


def kernels_for(own: StackState, recipe: Recipe, stored: Iterable[torch.dtype]) -> dict[torch.dtype, Kernel]:
    """The kernels of a stack, by dtype of parameters; none if its update does not ask for them, or a block is not a
    parameter. Raises ValueError for what cannot be compiled, RuntimeError where no compiler is found."""
    rule, at = own.rule, f"{own.path}." if own.path else ""
    if not rule.compile:
        return {}
    if own.stack.device.type != "cpu":
        raise ValueError(f"{at}compile: parameters on a CPU are required, got {own.stack.device}")
    wrong = "averaging" if recipe.averaging is not None else next((f"storage of {key}" for key in own.encoded), None)
    if wrong:
        raise ValueError(f"{at}compile: an update of entry-wise stages alone is required, got {wrong}")
    decay = rule.weight_decay if isinstance(rule, Route) and rule.weight_decay is not None else recipe.weight_decay
    sources = [
        KernelSource(rule, own.path, decay, own.stack.block, (*own.tensors,), own.stack.dtype, d) for d in stored
    ]
    for source in sources:
        source.require_traceable()
    if kernels_refused(own) is not None:
        return {}
    return {source.stored: kernel_of(source) for source in sources}


def kernels_refused(own: StackState) -> str | None:
    """Why a stack whose update asks for kernels has none; None: it has."""
    if active_fake_mode() is not None:
        return "fake tensors have no numbers to compute with"
    if math.prod(own.stack.block) < 2:
        return "a single number would need a kernel of its own"
    if not own.stack.of_parameters:
        return "its blocks are parts of it"
    return None


def move_compiled(blocks: ActiveBlocks, step: Step, counts: NDArray[np.int64], parameters: Sequence[Tensor]) -> bool:
    """Moves the parameters of active blocks by kernels, if the stack has them and nobody watches; whether it has.

    counts: `[P]`, gradients that each parameter has had, this one included.
    """
    own, ids = blocks.stack_state, blocks.stack.param_ids
    if not own.kernels or own.block_group is not None:
        return False
    positions = ids.tolist()
    given, held = [step.gradients[at] for at in positions], [parameters[at] for at in positions]
    if not all(x.is_contiguous() for x in (*given, *held)):
        return False
    steps, writes = counts[ids].tolist(), _write_numbers(blocks, step)
    plain = blocks.places is None and len({*steps}) == len({x.dtype for x in held}) == len({*writes}) == 1
    if plain and math.prod(own.stack.block) < _SMALL and len(held) > 1:
        _move_together(own, held, given, own.kernels[held[0].dtype].numbers(steps[0], writes[0]))
        return True
    shape = _shape(own)
    for row, parameter, gradient, at, write in zip(blocks.row_numbers, held, given, steps, writes, strict=True):
        kernel = own.kernels[parameter.dtype]
        kernel.compiled([parameter.view(shape), gradient.view(shape), *own.entries[row], *kernel.numbers(at, write)])
    return True


def _write_numbers(blocks: ActiveBlocks, step: Step) -> list[WriteNumbers]:
    """The numbers of the write of each block."""
    own, ids = blocks.stack_state, blocks.stack.param_ids
    groups = step.rates.alike[ids].tolist()
    some = dict(zip(groups, ids.tolist(), strict=True))  # a parameter of each group
    numbers = {group: _numbers_of(step.rates.step_scale(own.path, at)) for group, at in some.items()}
    if own.lr_factors is None:
        return [numbers[group] for group in groups]
    factors = (own.lr_factors if blocks.places is None else own.lr_factors[blocks.rows]).tolist()
    return [numbers[group]._replace(factor=factor) for group, factor in zip(groups, factors, strict=True)]


def _numbers_of(scale: StepScale) -> WriteNumbers:
    lr, alpha = float(scale.lr), float(scale.alpha)
    return WriteNumbers(lr, 1 - lr * alpha, alpha, scale.gradient_rate, 1.0)


def _shape(own: StackState, blocks: int = 1) -> tuple[int, ...]:
    """The shape in which a kernel takes the entries of some blocks."""
    return (1, blocks * math.prod(own.stack.block), *[1] * (len(own.stack.block) - 1))


def _move_together(own: StackState, held: Sequence[Tensor], given: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
    """One call for all blocks of a stack, on copies of their parameters."""
    shape = _shape(own, len(held))
    parameter, gradient = (torch.cat([tensor.flatten() for tensor in some]).view(shape) for some in (held, given))
    slots = [tensor.view(shape) for tensor in own.tensors.values()]
    own.kernels[parameter.dtype].compiled([parameter, gradient, *slots, *numbers])
    moved = parameter.view(len(held), *own.stack.block).unbind()
    torch._foreach_copy_([tensor.view(own.stack.block) for tensor in held], list(moved))
