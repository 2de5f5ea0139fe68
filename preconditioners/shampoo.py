"""Shampoo: a Kronecker product of inverse roots (Gupta, Koren & Singer 2018, arXiv:1802.09568)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.clock import Clock
from eigengraft.slots import Slot, State

from .base import Preconditioner
from .cadence import Cadence, Every
from .kronecker import mode_product
from .rational import Rational
from .roots import Eigh, RootSolver
from .statistics import Gram, Statistic


class Shampoo(Preconditioner):
    """d x_1 A_1^(-e) x_2 ... x_k A_k^(-e)  with A_i the statistic of axis i and e = 1 / (2k) by default.

    Order k is the number of axes of the block. Axes without a factor are left alone. Roots are the identity before
    their first refresh; a root that its solver rejects keeps its last value and is counted in `failures`.
    """

    kind: Literal["shampoo"] = "shampoo"
    statistic: Statistic = Field(default=Gram(), description="what each axis accumulates")
    exponent: Rational | None = Field(default=None, description="e of each axis; default 1 / (2 * order of the block)")
    solver: RootSolver = Field(default=Eigh(), description="how roots are computed")
    every: Cadence = Field(default=Every(), alias="refresh", description="when roots are recomputed")

    @model_validator(mode="after")
    def _exponent_fits(self) -> Self:
        problem = self.solver.check(self.exponent) if self.exponent is not None else None
        if problem:
            raise ValueError(problem)
        return self

    def cadence(self) -> Cadence:
        return self.every

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        slots = dict(self.statistic.slots(block))
        for axis in self.statistic.axes(block):
            slots[f"root.{axis}"] = Slot((block[axis],) * 2, fill="identity", role="root")
            slots[f"failures.{axis}"] = Slot((), role="count", dtype=torch.int32)
        return slots

    def refresh_cost(self, block: tuple[int, ...]) -> float:
        return float(sum(block[axis] ** 3 for axis in self.statistic.axes(block)))

    def observe(self, state: State, gradient: Tensor, clock: Clock) -> None:
        self.statistic.observe(state, gradient, clock)

    def refresh(self, state: State, clock: Clock) -> None:
        exponent = self.exponent or Fraction(1, 2 * max(1, len(state.block)))
        for axis in self.statistic.axes(state.block):
            root, ok = self.solver.root(self.statistic.estimate(state, axis, clock), exponent)
            keep_failed(state, f"root.{axis}", root, ok)
            count_failures(state, axis, ok)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, clock: Clock) -> Tensor:
        for axis in self.statistic.axes(state.block):
            direction = mode_product(direction, state[f"root.{axis}"], axis)
        return direction


def keep_failed(state: State, name: str, value: Tensor, ok: Tensor) -> None:
    """state[name] = value where ok, its last value elsewhere."""
    state[name] = torch.where(ok[:, None, None], value, state[name])


def count_failures(state: State, axis: int, ok: Tensor) -> None:
    """Counts how many refreshes of this axis have failed in a row."""
    failures = state[f"failures.{axis}"]
    state[f"failures.{axis}"] = torch.where(ok, torch.zeros_like(failures), failures + 1)
