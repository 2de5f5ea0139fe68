"""Shampoo that stores only eigenvectors and eigenvalues (Algorithm 1 of 4-bit Shampoo, arXiv:2405.18144)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import per_block, tiny, to_power
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.exponents import Exponents, default_exponent, exponent_of
from ..algebra.products import mode_products, rotate
from ..cadence import Cadence, Every
from ..learned.base import LearnedFactors, gram, is_informative
from ..roots import BasisSolver, PowerQR


class Eigenfactors(LearnedFactors):
    """d x_1 R_1 ... x_k R_k  with  R = V Diag(l + eps max l)^(-e) V^T for each axis of the direction d

    At a refresh, with M = G G^T of the gradient's unfolding G along the axis:
    A = b V Diag(l) V^T + (1 - b) M;  P = qr(A V);  l <- diag(P^T A P), V <- P

    x_i is the product along axis i. V and l are the eigenvectors and eigenvalues of a running mean of M, b = beta is
    its decay, and e = 1 / (2k) by default, where k is the number of axes with a factor. V `[N, d, d]` starts as the
    identity and l `[N, d]` as `initial`. The refresh is that of 4-bit Shampoo (Wang et al. 2024, arXiv:2405.18144,
    Algorithm 1), except that the solver `power_qr` sorts the columns of V before the step.

    Neither a statistic nor a root is stored: only the part of A that is diagonal in P is kept. With 4 bits this takes
    half the memory of Algorithms 1 to 3 of 4-bit Shampoo, which store a root as well. The price is one more product
    with V for each axis and step, because R is applied as V^T, the diagonal and V.

    The basis converges no faster than the running mean: for a constant M, each refresh multiplies the angle between a
    column and its limit by b + (1 - b) r, where r < 1 is the ratio of two eigenvalues. With an exact `solver` and
    without quantization the stage equals a Shampoo that observes and computes roots at the same updates.

    While all l of an axis are 0, as with `initial: 0` before the first refresh, R is the identity. If the solver fails,
    V and l keep their values, and the slot `failures.<i>` counts consecutive failures.
    """

    kind: Literal["eigenfactors"] = "eigenfactors"
    beta: float = Field(default=0.95, ge=0, lt=1, description="decay b of the factors, per refresh")
    exponent: Exponents = Field(
        default=None,
        description="e of each axis, or by order of the block as {2: 1/2, 1: 0}, 0: no factor; default 1 / (2 * k)",
    )
    eps: float = Field(default=1e-6, ge=0, description="ridge of a root, relative to the largest eigenvalue")
    initial: float = Field(default=1e-6, ge=0, description="initial value of l, in squared units of the gradient")
    solver: BasisSolver = Field(default=PowerQR(bootstrap=False), description="how P is computed from A and V")
    every: Cadence = Field(default=Every(), alias="refresh", description="steps in which V and l are updated")

    @model_validator(mode="after")
    def _basis_is_whole(self) -> Self:
        if not self.solver.keeps_all_columns:
            raise ValueError("solver: must keep all eigenvectors, got a solver that keeps a subspace; use power_qr")
        return self

    def factor_axes(self, block: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis for axis in self.axes.of(block) if self._exponent(block, axis))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        slots = {}
        for axis in self.factor_axes(block):
            d = block[axis]
            if self.axes.full(block, axis):
                slots[f"basis.{axis}"] = Slot((d, d), fill="identity", role="basis")
                slots[f"values.{axis}"] = Slot((d,), fill=self.initial, role="statistic")
                slots[f"failures.{axis}"] = Slot((), role="failures", dtype=torch.int32)
            else:
                slots[f"values.{axis}"] = Slot((d,), fill=self.initial, role="statistic", frame="square", axes=(axis,))
        return slots

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        live = is_informative(gradient)
        for axis in self.factor_axes(state.block):
            full, old = self.axes.full(state.block, axis), state[f"values.{axis}"]
            m = gram(gradient, axis, full)
            if full:
                values, ok = self._turned(state, axis, m, live, context.first)
            else:
                values = self.beta * old + (1 - self.beta) * m
                ok = live & values.isfinite().all(-1)
            state[f"values.{axis}"] = torch.where(per_block(ok, old), values, old)

    def _turned(self, state: State, axis: int, m: Tensor, live: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        """Compute the next basis of an axis and store it. Return (the next eigenvalues `[N, d]`, valid).

        valid: bool `[N]`, False where the old basis and eigenvalues must be kept.

        m: M = G G^T `[N, d, d]`, with G the unfolding of the gradient along the axis.
        live: bool `[N]`, False for blocks whose gradient is zero or not finite.
        first: True at the first refresh of these blocks.
        """
        v, failures = state[f"basis.{axis}"], state[f"failures.{axis}"]
        scaled = v * state[f"values.{axis}"].unsqueeze(-2)
        a = torch.baddbmm(m, scaled, v.mT, beta=1 - self.beta, alpha=self.beta)
        p, _, ok = self.solver.basis(a, v, first)
        values = (p * torch.bmm(a, p)).sum(-2).clamp_min(0.0)
        ok = ok & values.isfinite().all(-1)
        state[f"failures.{axis}"] = torch.where(ok, torch.zeros_like(failures), failures + 1)
        state[f"basis.{axis}"] = torch.where(per_block(ok & live, v), p, v)
        return values, ok & live

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        axes = self.factor_axes(state.block)
        bases = {axis: state[f"basis.{axis}"] for axis in axes if self.axes.full(state.block, axis)}
        rotated = rotate(direction, {axis: v.mT for axis, v in bases.items()})
        return rotate(mode_products(rotated, {axis: self._power(state, axis) for axis in axes}), bases)

    def _power(self, state: State, axis: int) -> Tensor:
        """Return (l + eps max l)^(-e) `[N, d]` for the eigenvalues l and the exponent e of an axis. If all l are 0,
        return 1.
        """
        values = state[f"values.{axis}"]
        peak = values.amax(-1, keepdim=True)
        ridged = (values + self.eps * peak).clamp_min(tiny(values.dtype))
        return torch.where(peak > 0, to_power(ridged, -float(self._exponent(state.block, axis))), 1.0)

    def _exponent(self, block: tuple[int, ...], axis: int) -> Fraction:
        return exponent_of(self.exponent, len(block), axis, default_exponent(self.axes.of(block)))
