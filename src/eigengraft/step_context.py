"""The context of a step: the step of each block, exact bias corrections, and signals (inputs beside the gradient)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import ContractError
from .numerics import cached_tensors, kept_on_device, number_like, per_block, upload
from .slots import State, StateKey

_OF_A_STEP = frozenset({"steps", "phases", "matrix_ids", "seeds"})
"""Fields with the numbers of one step or one stack. They must not be read while a program is traced, because the
program would keep these numbers for all later steps."""
Question = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""A condition on steps: a function of steps `[N]` that returns bool `[N]`."""
TYPICAL_STEP = np.array([1_000_667], dtype=np.int64)
"""Step at which conditions are evaluated while a program is traced. It stands for all late steps at which nothing
special happens.

It is a prime p, and (p - 1) / 2 is a prime too, so that neither p nor p - 1 is a multiple of any k from 3 to 500,000.
"""


@dataclass(frozen=True)
class StepContext:
    """The context of one stack of N blocks at one step.

    steps: `[N]`, number of updates of each block, including the present one: 1 at the first update. It is 0 while
        priming, when stages with `timing: lagged` see their first gradient and nothing is updated.
    phases: `[N]` in [0, 1), the fraction of a refresh interval after which each block is due.
    matrix_ids: `[N]`, number of the parameter that each block belongs to. Each matrix of a view counts as a parameter.
    device: device of the stack.
    seeds: `[N]`, a number computed from the parameter's name and the block's key, the same in every run and on every
        rank.
    signals: values of the requested signals that were provided, by name. For slots with `total=True`, also the sum of
        the slot over all blocks of all parameters, by the key of the slot.
    first: in the context of a refresh, True if it is the first refresh of its blocks. False in all other hooks.
    due: rows whose refresh takes effect in this step, by the id of the stage. They are given as spans (first row, row
        after the last one, True if this is the first refresh of these rows).
    asked: rows whose refresh is due in this step, in the same form. With a delay the refresh takes effect in a later
        step. Without a delay `asked` equals `due`.
    kept: values that a stage computes in one hook and uses again in its next hook of the same step, by the path of the
        stage.
    ask: while a chain is traced, the function that replaces `per_block`. It accepts a function f of the step
        number, and returns a 0-d tensor. The traced program replaces this tensor by f(step) in each step. None: no
        chain is traced.
    sums: function that adds numbers `[N]` over the blocks of each parameter; None: no stage of the update needs sums.
    questions: the conditions on the step that stages have passed to `holds`; recorded only while a chain is traced.
    """

    steps: NDArray[np.int64]
    phases: NDArray[np.float64]
    matrix_ids: NDArray[np.int64]
    device: torch.device = torch.device("cpu")
    seeds: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    signals: Mapping[str, Tensor | float] = field(default_factory=dict)
    first: bool = False
    due: dict[int, Sequence[tuple[int, int, bool]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    asked: dict[int, Sequence[tuple[int, int, bool]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    ask: Callable[[Callable[[Tensor], Tensor]], Tensor] | None = None
    sums: Callable[[Tensor], Tensor] | None = None
    questions: list[Question] = field(default_factory=list, init=False, repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        """Raise ContractError for a field that differs from step to step (`_OF_A_STEP`) while a program is traced.

        Raise AttributeError for an unknown name.
        """
        if name in _OF_A_STEP and self.__dict__.get("ask") is not None:
            raise ContractError(
                f"`context.{name}` cannot be read while a step is traced, as the program would keep its value for all "
                "steps; use `context.step`, `context.holds` or `context.per_block`"
            )
        raise AttributeError(f"a StepContext has no attribute '{name}'")

    @property
    def traced(self) -> bool:
        """True while the operations of a chain are traced. A traced program has no values on the host."""
        return self.ask is not None

    def holds(self, question: Question) -> bool | NDArray[np.bool_]:
        """Return True if a condition holds at the steps of all blocks, False if it holds at none, else bool `[N]`.

        While a chain is traced to compile it, the condition is evaluated for one late step (`TYPICAL_STEP`). In steps
        with another result, the compiled program is not used.

        question: the condition, a function of steps `[N]` that returns bool `[N]`.
        """
        if self.traced:
            self.questions.append(question)
            return bool(question(TYPICAL_STEP)[0])
        found = question(self.steps)
        return bool(found[0]) if found.all() or not found.any() else found

    @cached_property
    def priming(self) -> bool:
        """True for the first gradient of an update with a lagged stage, which only initializes statistics."""
        return not self.traced and self.uniform == 0  # no chain is traced in step 0

    @cached_property
    def uniform(self) -> int | None:
        """The step if all blocks are at the same step, else None."""
        # True if each entry equals the one before it. Bytes are compared several times as fast as small arrays
        alike = self.steps[1:].tobytes() == self.steps[:-1].tobytes()
        return int(self.steps[0]) if alike else None

    @cached_property
    def step(self) -> Tensor:
        """The step of each block, int64 `[N]` on the stack's device."""
        if self.uniform is not None:
            return torch.full((len(self.steps),), self.uniform, dtype=torch.int64, device=self.device)
        return upload(torch.from_numpy(self.steps), self.device)

    @cached_property
    def seed(self) -> Tensor:
        """The seed of each block, int64 `[N]` on the stack's device. Do not write to it."""
        return kept_on_device(self.seeds, self.device)

    def per_block(self, function: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        """Return function(step) for each block, in a shape and dtype by which `like` `[N, *block]` can be multiplied.

        It is computed in float64. If all blocks are at one step, the result is a 0-d float64 tensor on the CPU, which
        torch uses as a scalar without rounding it.
        """
        if self.ask is not None:
            return self.ask(function)
        if self.uniform is not None:
            return function(torch.tensor(self.uniform, dtype=torch.float64, device="cpu"))
        values = function(torch.from_numpy(self.steps).double())
        return per_block(upload(values.to(like.dtype), like.device), like)

    def correction(
        self,
        beta: float,
        like: Tensor,
        count: Callable[[Tensor], Tensor] | None = None,
        exponent: float = 1.0,
        ahead: int = 0,
    ) -> Tensor:
        """Return (1 - beta^(step + ahead))^exponent, shaped to divide `like` `[N, *block]`.

        1 - beta^step is the sum of the weights of a running mean that started from zero (Adam, section 3).

        count: function that maps a step to the number of terms of the mean, which replaces the step in the formula;
            None: the mean has one term for each step.
        exponent: power of the correction.
        ahead: number that is added to the step; ignored if `count` is given.
        """
        if count is None and not self.traced and self.uniform is not None:
            # `per_block` would return the same bits, but run more kernels
            return _uniform_correction(beta, self.uniform + ahead, exponent)
        terms = count or (lambda step: step + ahead)
        return self.per_block(lambda step: (1 - beta ** terms(step)) ** exponent, like)

    def signal(self, name: str) -> Tensor | float:
        """Return the value of a signal, an input beside the gradient that the stage has requested.

        The value is a number (or 0-d tensor), `[N]`, `[N, *block]` or, for blocks with c inputs, `[N, c, c]`, depending
        on the signal's extent. Raises ContractError for a signal that was not requested or not provided.
        """
        try:
            return self.signals[name]
        except KeyError:
            known = ", ".join(sorted(self.signals)) or "none"
            raise ContractError(
                f"signal '{name}': not available, because the traits of the stage do not request it, or it was not "
                f"provided (available signals: {known}); add `Request('{name}')` to Traits.signals"
            ) from None

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """Return the value of a signal as a tensor with the dtype and device of `like`. See `signal`."""
        return number_like(self.signal(name), like)

    def total(self, state: State, slot: str) -> Tensor | float:
        """Return the sum of a slot of the stage over all blocks of all parameters that the stage updates.

        The sum is of the values that the slot had when the step began. Blocks in other stacks are included.

        slot: name of a slot with `total=True`.
        """
        return self.signal(StateKey.join(state.path, slot))

    def parameter_sum(self, x: Tensor) -> Tensor:
        """Return for each block the sum of numbers `x` `[N]` over all blocks of its parameter, in all stacks.

        Only `apply` may call this method, and only if the traits of the stage say `Traits(sums=True)`. The number of
        calls must be the same in every step.

        Raises ContractError without these traits.
        """
        if self.sums is None:
            raise ContractError(
                "`context.parameter_sum` cannot be called by a stage whose traits say `sums=False`: return "
                "`Traits(sums=True)` from traits()"
            )
        return self.sums(x)

    def with_sums(self, sums: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy of this context whose `parameter_sum` uses the function `sums`.

        Values that were computed from the steps are shared with the copy.
        """
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, sums=sums)
        return changed

    def slice_rows(self, start: int, stop: int, first: bool) -> StepContext:
        """Return the context of the blocks start to stop - 1 of the stack, for a refresh of these blocks.

        first: True if this is the first refresh of these blocks.
        """
        signals = {k: v[start:stop] if isinstance(v, Tensor) and v.ndim else v for k, v in self.signals.items()}
        cut = slice(start, stop)
        return replace(
            self,
            steps=self.steps[cut],
            phases=self.phases[cut],
            matrix_ids=self.matrix_ids[cut],
            seeds=self.seeds[cut],
            signals=signals,
            first=first,
            sums=None,
        )


@cached_tensors(maxsize=64)
def _uniform_correction(beta: float, step: int, exponent: float) -> Tensor:
    """Return (1 - beta^step)^exponent as a 0-d tensor. All stacks share this tensor, so it must not be written to."""
    weights = 1 - beta**step
    return torch.tensor(math.sqrt(weights) if exponent == 0.5 else weights**exponent, dtype=torch.float64, device="cpu")
