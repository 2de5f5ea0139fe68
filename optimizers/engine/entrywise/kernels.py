"""Entry-wise chains and their writes as one compiled kernel, which reads and writes each number of a step once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eigengraft.chains import asking
from eigengraft.preconditioners import run_chain
from eigengraft.ramps import schedules
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ...apply.weight_decay import StepScale, WeightDecay
from ...apply.write import written
from ...recipe.recipe import Recipe, Route
from .generated import Generated, generate

NumberOfStep = Callable[[Tensor], Tensor]
"""A number that a stage needs, as a function of the step of a block, float64."""
_WRITE_NUMBERS = 5
"""How many numbers `WriteNumbers` has."""
_SPAN = 64
"""Steps whose numbers are computed at once: one at a time they take a tenth of a step of small models (measured)."""


class WriteNumbers(NamedTuple):
    """The numbers of a write: lr, 1 - lr alpha, alpha, rate of a decay in the gradient, factor of the direction."""

    lr: float
    shrink: float
    alpha: float
    rate: float
    factor: float


@dataclass(frozen=True)
class KernelSource:
    """What a kernel is traced from.

    rule: the update; path: in the recipe.
    decay: weight decay of the parameters.
    block: shape of the blocks of which the stages keep state; only the number of axes counts.
    keys: state keys of the slots.
    dtype: to compute in.
    stored: dtype of parameters and gradients.
    """

    rule: Recipe | Route
    path: str
    decay: WeightDecay
    block: tuple[int, ...]
    keys: tuple[str, ...]
    dtype: torch.dtype
    stored: torch.dtype

    def same(self) -> tuple[Any, ...]:
        """What sources of the same kernel have in common."""
        stages = tuple(stage.model_dump_json() for stage in self.rule.update)
        return (stages, self.path, self.decay.model_dump_json(), len(self.block), self.keys, self.dtype, self.stored)

    def require_traceable(self) -> None:
        """Raises ValueError for an update that is not one kernel over entries."""
        rule, at = self.rule, f"{self.path}." if self.path else ""
        wrong = [f"{path}, which mixes entries" for path, stage in rule.stages(self.path) if not stage.entrywise()]
        wrong += [f"{path}, which is lagged" for path, stage in rule.stages(self.path) if stage.lagged()]
        wrong += [f"{path}, which asks for the signal {name}" for name, path in asking(rule.stages(self.path)).items()]
        wrong += [f"{at}{name}, which is scheduled" for name, _ in schedules(rule)]
        wrong += [f"{at}{name}" for name in ("after_decay", "constraints") if getattr(rule, name)]
        if rule.adds_decay() and not rule.after_decay:
            wrong.append(f"{at}update, of which a stage has a step size of its own")
        if wrong:
            raise ValueError(f"{at}compile: an update of entry-wise stages alone is required, got {wrong[0]}")

    def samples(self) -> list[Tensor]:
        """A parameter, its gradient and slots, `[1, 64, 1, ...]`, and the numbers of a write, all 0."""
        shape = (1, 64, *[1] * (len(self.block) - 1))
        dtypes = (self.stored, self.stored, *[self.dtype] * len(self.keys))
        return [
            *(torch.zeros(shape, dtype=own, device="cpu") for own in dtypes),
            *self.numbers((0.0,) * _WRITE_NUMBERS),
        ]

    def numbers(self, values: Sequence[float]) -> list[Tensor]:
        """0-d tensors of some numbers."""
        return list(torch.tensor(values, dtype=self.dtype, device="cpu").unbind())

    def run(self, tensors: Sequence[Tensor], ask: Callable[[NumberOfStep], Tensor]) -> None:
        """One step, as it is traced; tensors: as of `samples`; ask: gives the numbers that stages need."""
        parameter, given, *rest = tensors
        held, own = rest[: len(self.keys)], WriteNumbers(*rest[len(self.keys) :][:_WRITE_NUMBERS])  # type: ignore[arg-type]
        before, gradient = parameter.to(self.dtype), given.to(self.dtype)
        if self.decay.in_gradient:
            gradient = gradient + before * own.rate
        state = State(dict(zip(self.keys, held, strict=True)), self.block, f"{self.path}.update".lstrip("."))
        direction = run_chain(self.rule.update, state, gradient, gradient, _asking_context(ask)) * own.factor
        parameter.copy_(written(before, direction, StepScale(own.lr, own.alpha, self.decay, kept=own.shrink)))


def _asking_context(ask: Callable[[NumberOfStep], Tensor]) -> StepContext:
    """A context that has no step: a stage that reads one raises AttributeError, and is not frozen at it."""
    context = StepContext(np.ones(1, dtype=np.int64), np.zeros(1), np.zeros(1, dtype=np.int64), numbers=ask)
    for name in ("steps", "phases", "param_ids"):
        del context.__dict__[name]
    return context


@dataclass
class Kernel:
    """A step of entry-wise stages with its write, traced once and compiled for any number of entries.

    What becomes of an entry does not depend on where in a tensor it lies: the rest of a tensor is taken by the same
    instructions under a mask. From steps of stacks it differs in last bits.

    source: what the kernel is traced from.
    asked: numbers that the stages need, in the order in which they ask.
    """

    source: KernelSource
    asked: list[NumberOfStep] = field(default_factory=list, init=False)
    _last: tuple[int, WriteNumbers, list[Tensor]] | None = field(default=None, init=False)
    _writes: dict[WriteNumbers, list[Tensor]] = field(default_factory=dict, init=False)
    _table: tuple[int, list[tuple[Tensor, ...]]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.source.require_traceable()
        self.source.run(self.source.samples(), self._learn)

    def _learn(self, number: NumberOfStep) -> Tensor:
        self.asked.append(number)
        return number(torch.ones((), dtype=torch.float64, device="cpu"))

    @cached_property
    def compiled(self) -> Generated:
        """The compiled step, of tensors as of `KernelSource.samples` and the numbers that the stages ask for."""
        samples = self._samples()
        first = len(samples) - len(self.asked)

        def step(*tensors: Tensor) -> tuple[()]:
            numbers: Iterator[Tensor] = iter(tensors[first:])
            self.source.run(tensors[:first], lambda number: next(numbers))
            return ()

        return generate(step, samples)

    def _samples(self) -> list[Tensor]:
        return [*self.source.samples(), *self.source.numbers([1.0] * len(self.asked))]

    def numbers(self, step: int, write: WriteNumbers) -> list[Tensor]:
        """The numbers of one step of blocks that have had so many updates, this one included."""
        if self._last is None or self._last[:2] != (step, write):
            if write not in self._writes:
                self._writes = {} if len(self._writes) == _SPAN else self._writes
                self._writes[write] = self.source.numbers(write)
            self._last = step, write, [*self._writes[write], *self._asked_numbers(step)]
        return self._last[2]

    def _asked_numbers(self, step: int) -> list[Tensor]:
        """What stages ask for at a step; a span of steps is computed at once, the same from any of them."""
        start = step - step % _SPAN
        if self._table is None or self._table[0] != start:
            steps = torch.arange(start, start + _SPAN, dtype=torch.float64, device="cpu")
            columns = [number(steps).expand(_SPAN).to(self.source.dtype) for number in self.asked]
            self._table = start, [row.unbind() for row in torch.stack(columns, 1)] if columns else [()] * _SPAN
        return list(self._table[1][step - start])

    def warm(self) -> None:
        """Compiles. Raises RuntimeError where no compiler is found."""
        try:
            self.compiled(self._samples())
        except Exception as error:
            path = f"{self.source.path}.compile".lstrip(".")
            raise RuntimeError(f"{path}: a C++ compiler for torch.compile is required, got {error}") from error


_KERNELS: dict[tuple[Any, ...], Kernel] = {}


def kernel_of(source: KernelSource) -> Kernel:
    """The kernel that is traced from a source; equal ones are compiled once in a process."""
    same = source.same()
    if same not in _KERNELS:
        kernel = Kernel(source)
        kernel.warm()
        _KERNELS[same] = kernel
    return _KERNELS[same]
