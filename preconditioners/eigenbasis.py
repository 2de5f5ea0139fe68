"""A chain run in the eigenbasis of the statistics: SOAP and its relatives (Vyas et al. 2024, arXiv:2409.11321)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.clock import Clock
from eigengraft.numerics import per_block, tiny, to_power
from eigengraft.slots import State

from .base import Stages, run_chain
from .factored import Factored
from .frames import Transport, require_frameless, settled, transport
from .kronecker import rotate
from .roots import BasisSolver, PowerQR
from .statistics import Bregman, Power, mean_eigenvalue, seen

LONG = 1 << 30
"""Longer than any axis."""


class Eigenbasis(Factored):
    """Q inner(Q^T g, Q^T d)  with Q = Q_1 x ... x Q_k, the eigenvectors of the axis statistics.

    SOAP is `inner: [momentum, rms]`.
    timing: `current` observes and refreshes before the gradient is used. In the basis of one gradient alone that
    gradient is diagonal, and the inner chain normalises rounding off the diagonal: let `refresh.start` be 2 or more.
    `lagged` does so after it, as published: the first gradient only builds the basis.
    transport: what inner state does when Q changes by R = Q_old^T Q_new. exact: vectors are rotated, squares
    transported by (R*R)^T; permute: vectors are rotated, squares only follow the reordering of columns, as published;
    none: everything stays where it is.
    """

    kind: Literal["eigenbasis"] = "eigenbasis"
    inner: Stages = Field(description="the chain that runs in the basis")
    solver: BasisSolver = Field(default=PowerQR(), description="how the basis is computed")
    matrix: ClassVar[Literal["root", "basis"]] = "basis"
    timing: Literal["current", "lagged"] = Field(
        default="current", description="learn the current gradient before or after it is used"
    )
    transport: Transport = Field(default="exact", description="how inner state follows the basis")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.statistic.entries == "diagonal" or self.statistic.oversize == "diagonal":
            raise ValueError("statistic: a basis is made of full factors, got diagonal ones")
        if self.statistic.coupled and self.columns(LONG) < LONG:
            raise ValueError("statistic: reads powers of whole factors, of which a subspace holds only a part")
        require_frameless(self.inner, "inner")
        return self

    def columns(self, d: int) -> int:
        return self.solver.columns(d)

    def part_block(self, part: str, block: tuple[int, ...]) -> tuple[int, ...]:
        axes = self.axes(block)
        return tuple(self.columns(d) if axis in axes else d for axis, d in enumerate(block))

    def chains(self) -> Mapping[str, Stages]:
        return {"inner": self.inner}

    def lagged(self) -> bool:
        return self.timing == "lagged"

    def renew(self, state: State, axis: int, clock: Clock) -> None:
        old = state[f"basis.{axis}"].clone()
        new, order, ok = self.solver.basis(self.statistic.estimate(state, axis, clock), old, clock.first)
        new = self.accept(state, axis, new, ok)
        if new.device.type == "cpu" and torch.equal(new, old):
            return  # a solver that found nothing to do
        transport(self.inner, self._inside(state), axis, torch.bmm(old.mT, new), settled(order, ok), self.transport)

    def power(self, state: State, axis: int, exponent: Fraction, estimate: Tensor) -> Power:
        q, unit = state[f"basis.{axis}"], mean_eigenvalue(estimate)
        values = (q * torch.bmm(estimate / per_block(unit, estimate), q)).sum(-2)  # [N, d]: diag(Q^T A Q) / unit
        floor = self.statistic.floor if isinstance(self.statistic, Bregman) else 0.0
        values = values.clamp_min(max(floor, tiny(q.dtype)))
        trace = to_power(values, float(exponent + 1)).sum(-1)
        if exponent == 0:
            return Power(None, None, unit, trace, seen(estimate))
        half = to_power(values, float(exponent) / 2).unsqueeze(-1) * q.mT
        return Power(half, half, unit, trace, seen(estimate))

    def _inside(self, state: State) -> State:
        return state.scope("inner", self.part_block("inner", state.block))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, clock: Clock) -> Tensor:
        bases = self.matrices(state)
        inward = {axis: q.mT for axis, q in bases.items()}
        rotated = rotate(gradient, inward)
        inside = rotated if direction is gradient else rotate(direction, inward)
        return rotate(run_chain(self.inner, self._inside(state), rotated, inside, clock), bases)
