"""What every stage has that keeps one statistic and one matrix made from it for each axis."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import per_block
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Stage
from ..cadence import Cadence, Every
from ..statistics import Gram, Power, Statistic


class Factored(Stage):
    """A statistic A_i for each axis i of the block, and a matrix `<matrix>.<i>` `[N, d, d]` refreshed from it.

    The matrix is the identity before its first refresh. One that its solver rejects keeps its last value and is counted
    in `failures.<i>`, in a row; a refresh that succeeds sets the count back. Of a diagonal factor the matrix is a
    diagonal too, `[N, d]`, which follows a change of the frame it lives in.
    """

    statistic: Statistic = Field(default=Gram(), description="what each axis accumulates")
    every: Cadence = Field(default=Every(), alias="refresh", description="when roots or bases are recomputed")
    matrix: ClassVar[Literal["root", "basis"]]

    def axes(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """Which axes of a block have a factor."""
        return self.statistic.axes(block)

    def columns(self, d: int) -> int:
        """How many columns the matrix of an axis of length d has."""
        return d

    @abstractmethod
    def renew(self, state: State, axis: int, context: StepContext) -> None:
        """Recomputes the matrix of one axis."""

    @abstractmethod
    def power(self, state: State, axis: int, exponent: Fraction, estimate: Tensor) -> Power:
        """A_axis^exponent as far as this stage knows it; estimate: of A_axis."""

    def cadence(self) -> Cadence:
        return self.every

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        slots = dict(self.statistic.slots(block, self.axes(block)))
        for axis in self.axes(block):
            d = block[axis]
            if self.statistic.full(block, axis):
                slot = Slot((d, self.columns(d)), fill="identity", role=self.matrix)
            else:
                slot = Slot((d,), fill=1.0, role=self.matrix, frame="square", axes=(axis,))
            slots[f"{self.matrix}.{axis}"] = slot
            slots[f"failures.{axis}"] = Slot((), role="count", dtype=torch.int32)
        return slots

    def refresh_cost(self, block: tuple[int, ...]) -> float:
        return float(sum(block[axis] ** (3 if self.statistic.full(block, axis) else 1) for axis in self.axes(block)))

    def observed(self, gradient: Tensor, direction: Tensor) -> Tensor:
        return self.statistic.observed(gradient, direction)

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        self._observe(state, gradient, context, self.axes(state.block), ())

    def _observe(
        self, state: State, gradient: Tensor, context: StepContext, axes: tuple[int, ...], fresh: tuple[int, ...]
    ) -> None:
        """fresh: the axes that have already accumulated this gradient."""

        def powers(axis: int, exponent: Fraction) -> Power:
            estimate = self.statistic.estimate(state, axis, context, behind=0 if axis in fresh else 1)
            return self.power(state, axis, exponent, estimate)

        self.statistic.observe(state, gradient, context, axes, powers)

    def refresh(self, state: State, context: StepContext) -> None:
        for axis in self.axes(state.block):
            self.renew(state, axis, context)

    def learn(self, state: State, gradient: Tensor, context: StepContext) -> None:
        spans, axes = list(self.due(context)), self.axes(state.block)
        fresh: tuple[int, ...] = ()
        for some in [(axis,) for axis in axes] if self.statistic.sequential else [axes]:
            self._observe(state, gradient, context, some, fresh)
            for start, stop, first in spans:
                part, now = state.slice_rows(start, stop), context.slice_rows(start, stop, first)
                for axis in some:
                    self.renew(part, axis, now)
                self.renewed(state, part, start, stop)
            fresh += some

    def renewed(self, state: State, part: State, start: int, stop: int) -> None:
        """Matrices of the rows start to stop, which are `part`, have been renewed in the midst of a step."""

    def matrices(self, state: State) -> dict[int, Tensor]:
        """The matrix of every axis that has one."""
        return {axis: state[f"{self.matrix}.{axis}"] for axis in self.axes(state.block)}

    def accept(self, state: State, axis: int, value: Tensor, ok: Tensor) -> Tensor:
        """Takes `value` over where ok `[N]`, counts failures elsewhere, returns what holds now, as it is stored."""
        name = f"{self.matrix}.{axis}"
        state[name] = torch.where(per_block(ok, value), value, state[name])
        failures = state[f"failures.{axis}"]
        state[f"failures.{axis}"] = torch.where(ok, torch.zeros_like(failures), failures + 1)
        return state[name]
