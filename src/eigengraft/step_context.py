"""The context of a step: the step of each block, exact bias corrections, and the signals that a stage asked for."""

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
from .slots import State
from .state_key import StateKey

_OF_A_STEP = frozenset({"steps", "phases", "param_ids", "seeds"})
"""Fields that are of one step or one stack, which a program that is traced for many must not read."""

Question = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""Steps `[N]` -> whether something holds at each, `[N]`."""
TYPICAL_STEP = np.array([1_000_667], dtype=np.int64)
"""The step that answers questions while a program is traced: late, and a step in which what has an interval is not due.
It is a prime, one more than twice a prime, so that neither it nor the step before is a multiple of 3 to 500,000."""


@dataclass(frozen=True)
class StepContext:
    """The context of one stack of N blocks at one step.

    steps: `[N]`, how often each block has been updated, this step included: 1 at the first update, 0 while priming,
    when stages with `timing: lagged` see their first gradient and nothing moves.
    phases: `[N]` in [0, 1), where in a refresh interval each block is due.
    param_ids: `[N]`, which parameter a block belongs to; each matrix that a view makes of one counts as one.
    seeds: `[N]`, a number made of the parameter's name and the block's key, the same in every run and on every rank.
    signals: what stages asked for and was there, and the totals of slots.
    first: set during the first refresh of a block.
    due: spans of these rows whose refresh is due, by the id of the stage, so that each cadence is asked once a step.
    kept: what a stage has computed in one hook for the next one of the same step, by its path.
    numbers: gives numbers that are functions of a step while a chain is traced, 0-d; None: they are computed.
    questions: questions that `holds` was asked while a chain is traced.
    sums: adds numbers `[N]` over the blocks of each parameter; None: no stage of the update takes sums.
    """

    steps: NDArray[np.int64]
    phases: NDArray[np.float64]
    param_ids: NDArray[np.int64]
    device: torch.device = torch.device("cpu")
    seeds: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    signals: Mapping[str, Tensor | float] = field(default_factory=dict)
    first: bool = False
    due: dict[int, Sequence[tuple[int, int, bool]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    numbers: Callable[[Callable[[Tensor], Tensor]], Tensor] | None = None
    sums: Callable[[Tensor], Tensor] | None = None
    questions: list[Question] = field(default_factory=list, init=False, repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        """Refuse what a program may not hold, in a context that it is traced through."""
        if name in _OF_A_STEP and self.__dict__.get("numbers") is not None:
            raise ContractError(f"`context.{name}` is read, which a compiled program would keep from one step on")
        raise AttributeError(f"a StepContext has no attribute '{name}'")

    def holds(self, question: Question) -> bool | NDArray[np.bool_]:
        """Return whether something holds at the steps of the blocks: True for all, False for none, else `[N]`.

        question: steps `[N]` -> whether it holds, `[N]`. A compiled program is of the steps that answer every question
        as one late in the run does: other steps run as they are.
        """
        if self.numbers is not None:
            self.questions.append(question)
            return bool(question(TYPICAL_STEP)[0])
        found = question(self.steps)
        return bool(found[0]) if found.all() or not found.any() else found

    @cached_property
    def priming(self) -> bool:
        """Whether the gradient is a first one, of which lagged stages make statistics while nothing moves."""
        return self.numbers is None and self.uniform == 0  # a traced chain has no step, and none that lags

    @cached_property
    def uniform(self) -> int | None:
        """The step, if all blocks agree on it."""
        alike = len(self.steps) == 1 or (self.steps == self.steps[0]).all()
        return int(self.steps[0]) if alike else None

    @cached_property
    def step(self) -> Tensor:
        """The step of each block, int64 `[N]` on the stack's device."""
        if self.uniform is not None:
            return torch.full((len(self.steps),), self.uniform, dtype=torch.int64, device=self.device)
        return upload(torch.from_numpy(self.steps), self.device)

    @cached_property
    def seed(self) -> Tensor:
        """The seed of each block, int64 `[N]` on the stack's device; not to be written to."""
        return kept_on_device(self.seeds, self.device)

    def per_block(self, function: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        """function(step), computed in float64, shaped and typed to multiply `like` `[N, *block]`.

        Where all blocks agree the result is a 0-d float64 CPU tensor, which torch applies as an exact scalar.
        """
        if self.numbers is not None:
            return self.numbers(function)
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
        """(1 - beta^(step + ahead))^exponent; 1 - beta^step is the sum of the weights of a running mean that started
        from zero (Adam, section 3).

        count: how many terms the mean has at a step, if not one for each.
        """
        if count is None and self.numbers is None and self.uniform is not None:  # the same bits, with fewer kernels
            return _uniform_correction(beta, self.uniform + ahead, exponent)
        terms = count or (lambda step: step + ahead)
        return self.per_block(lambda step: (1 - beta ** terms(step)) ** exponent, like)

    def signal(self, name: str) -> Tensor | float:
        """A signal that a stage declared: a number (or 0-d tensor), `[N]`, `[N, *block]` or, for blocks of c inputs,
        `[N, c, c]`, as its extent says."""
        try:
            return self.signals[name]
        except KeyError:
            known = ", ".join(sorted(self.signals)) or "none"
            raise ContractError(
                f"signal '{name}': a name that the stage asks for in its traits is required (provided here: {known})"
            ) from None

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """A signal that a stage declared, as a tensor of the dtype and on the device of `like`."""
        return number_like(self.signal(name), like)

    def total(self, state: State, slot: str) -> Tensor | float:
        """The sum, as the step began, of a slot with `total=True` over all blocks of all parameters of the update."""
        return self.signal(StateKey.join(state.path, slot))

    def parameter_sum(self, x: Tensor) -> Tensor:
        """For each block the sum of numbers `x` `[N]` over all blocks of its parameter, in whatever stacks these are.

        A stage takes sums in `apply`, equally many in every step, and says so: `Traits(sums=True)`.
        """
        if self.sums is None:
            raise ContractError("`sums=True` in the traits is required of a stage which takes sums, got False")
        return self.sums(x)

    def with_sums(self, sums: Callable[[Tensor], Tensor]) -> Self:
        """The context of a run that takes its sums from that function."""
        return self._changed(sums=sums)

    def _changed(self, **fields: object) -> Self:
        """A context of these rows with other fields; what has been computed of the steps is computed once."""
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **fields)
        return changed

    def slice_rows(self, start: int, stop: int, first: bool) -> StepContext:
        """The context of rows start to stop, during their refresh."""
        signals = {k: v[start:stop] if isinstance(v, Tensor) and v.ndim else v for k, v in self.signals.items()}
        cut = slice(start, stop)
        return replace(
            self,
            steps=self.steps[cut],
            phases=self.phases[cut],
            param_ids=self.param_ids[cut],
            seeds=self.seeds[cut],
            signals=signals,
            first=first,
            sums=None,
        )


@cached_tensors(maxsize=64)
def _uniform_correction(beta: float, step: int, exponent: float) -> Tensor:
    """(1 - beta^step)^exponent, 0-d: the same of all stacks in a step, and not to be written to."""
    weights = 1 - beta**step
    return torch.tensor(math.sqrt(weights) if exponent == 0.5 else weights**exponent, dtype=torch.float64, device="cpu")
