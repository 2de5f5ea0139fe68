"""What every stage has that keeps one statistic and one matrix made from it for each axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.clock import Clock
from eigengraft.slots import Slot, State

from .base import Preconditioner
from .cadence import Cadence, Every
from .statistics import Gram, Statistic


class Factored(Preconditioner):
    """A statistic A_i for each axis i of the block, and a matrix `<matrix>.<i>` `[N, d, d]` refreshed from it.

    The matrix is the identity before its first refresh. One that its solver rejects keeps its last value and is counted
    in `failures.<i>`, in a row; a refresh that succeeds sets the count back.
    """

    statistic: Statistic = Field(default=Gram(), description="what each axis accumulates")
    every: Cadence = Field(default=Every(), alias="refresh", description="when roots or bases are recomputed")
    matrix: ClassVar[Literal["root", "basis"]]

    def cadence(self) -> Cadence:
        return self.every

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        slots = dict(self.statistic.slots(block))
        for axis in self.statistic.axes(block):
            slots[f"{self.matrix}.{axis}"] = Slot((block[axis],) * 2, fill="identity", role=self.matrix)
            slots[f"failures.{axis}"] = Slot((), role="count", dtype=torch.int32)
        return slots

    def refresh_cost(self, block: tuple[int, ...]) -> float:
        return float(sum(block[axis] ** 3 for axis in self.statistic.axes(block)))

    def observe(self, state: State, gradient: Tensor, clock: Clock) -> None:
        self.statistic.observe(state, gradient, clock)

    def matrices(self, state: State) -> dict[int, Tensor]:
        """The matrix of every axis that has one."""
        return {axis: state[f"{self.matrix}.{axis}"] for axis in self.statistic.axes(state.block)}

    def accept(self, state: State, axis: int, value: Tensor, ok: Tensor) -> Tensor:
        """Takes `value` `[N, d, d]` over where ok `[N]`, counts failures elsewhere, returns what holds now."""
        name = f"{self.matrix}.{axis}"
        value = torch.where(ok[:, None, None], value, state[name])
        state[name] = value
        failures = state[f"failures.{axis}"]
        state[f"failures.{axis}"] = torch.where(ok, torch.zeros_like(failures), failures + 1)
        return value
