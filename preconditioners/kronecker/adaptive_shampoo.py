"""Shampoo whose damping and refreshes depend on the error of its stale roots (FOAM, arXiv:2606.02365)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import block_norm, may_branch_on_values, per_block, tiny, to_power
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.exponents import Exponents, default_exponent, exponent_of
from ..algebra.products import mode_products, rotate
from ..cadence import Cadence, Every
from ..roots.decompositions import eigh
from ..statistics import Power
from .base import Factored


class AdaptiveShampoo(Factored):
    """d x_1 (S_1 + r_1 I)^(-e) ... x_k (S_k + r_k I)^(-e),  S_i the statistic A_i at its last decomposition

    h = e a ||(S + r I)^(-1/2) (A - S) (S + r I)^(-1/2)||_F,  a = ||(S + r I)^(-e)||_2 / ||(S + r I)^(-e)||_F
    r <- max(eps, r h / threshold);  where the new r is above `ceiling`: S <- A, r <- eps

    d is the direction, x_i the product along axis i, and r_i the damping of axis i. A_i is the present statistic, such
    as a sum of G G^T over gradients G. S_i is an older value of it, whose eigenvectors and eigenvalues are stored. In
    the second and third line the index i is left out. By default e = 1 / (2k), where k is the number of axes that have
    a factor.

    Because S is not A, its root has an error. h estimates the relative error, which is smaller for a larger damping.
    Each time h is computed, r is multiplied by h / `threshold`, but is at least `eps`. The damping thus rises if the
    error is above `threshold`, and falls if it is below. A new r above `ceiling` is not used. Instead A is decomposed:
    S becomes A, and r becomes `eps`. Each block and axis decides for itself. Damping and times of decompositions thus
    follow from data (FOAM, Nam & Ahn 2026, arXiv:2606.02365). The field `refresh` is the cadence at which h is
    computed, at the cost of two matrix products for each axis.
    """

    kind: Literal["adaptive_shampoo"] = "adaptive_shampoo"
    exponent: Exponents = Field(
        default=None,
        description="e of each axis, or by order of the block as {2: 1/2}; default 1 / (2 * number of axes with a "
        "factor)",
    )
    eps: float = Field(default=1e-10, gt=0, description="least damping r, in units of the statistic")
    threshold: float = Field(default=0.1, gt=0, description="error h at which the damping stays as it is")
    ceiling: float = Field(default=1e-6, gt=0, description="damping above which the statistic is decomposed instead")
    every: Cadence = Field(default=Every(steps=1), alias="refresh", description="steps in which h is computed")
    matrix: ClassVar[Literal["root", "basis"]] = "basis"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ceiling < self.eps:
            raise ValueError(f"ceiling: must be at least eps, {self.eps}, got {self.ceiling}")
        if self.statistic.needs_power is not None:
            raise ValueError(
                "statistic: must not read factors of other axes, because adaptive_shampoo may have old "
                "decompositions of them; use a gram"
            )
        if self.statistic.axes.has_diagonals:
            raise ValueError("statistic: axes: factors must be full, got diagonal ones; set entries: full")
        return self

    def _exponent(self, block: tuple[int, ...], axis: int) -> Fraction:
        return exponent_of(self.exponent, len(block), axis, default_exponent(self.statistic.axes.of(block)))

    def factor_axes(self, block: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis for axis in self.statistic.axes.of(block) if self._exponent(block, axis))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        slots = dict(super().slots(block))
        for axis in self.factor_axes(block):
            slots[f"values.{axis}"] = Slot((block[axis],), fill=1.0, role="statistic", sensitive=True)
            slots[f"damping.{axis}"] = Slot((), fill=self.eps, role="statistic", sensitive=True)
        return slots

    def refresh_axes(self, state: State, axes: Sequence[int], context: StepContext) -> None:
        for axis in axes:
            a, damping = self.estimate(state, axis, context), state[f"damping.{axis}"]
            wanted = self._wanted(state, axis, a)
            due = ~(wanted <= self.ceiling) | bool(context.first)  # written so that nan is due
            state[f"damping.{axis}"] = torch.where(due, damping, wanted)
            rows = (
                torch.nonzero(due).flatten()
                if may_branch_on_values(a)
                else torch.arange(len(a), dtype=torch.int64, device=a.device)
            )
            if len(rows):
                self._decompose(state, axis, a, (rows, due))

    def _wanted(self, state: State, axis: int, a: Tensor) -> Tensor:
        """Return the damping `[N]` with which the error h of the stale root is about `threshold`, but at least `eps`.

        This is r h / threshold, where r is the present damping. Blocks that are not decomposed again get this damping.

        a: the present statistic A `[N, d, d]`.
        """
        q, values, damping = state[f"basis.{axis}"], state[f"values.{axis}"], state[f"damping.{axis}"]
        damped, e = values + damping[:, None], float(self._exponent(state.block, axis))
        half = to_power(damped.clamp_min(tiny(a.dtype)), -0.5)
        change = torch.bmm(q.mT, torch.bmm(a, q)) - torch.diag_embed(values)
        root = to_power(damped.clamp_min(tiny(a.dtype)), -e)
        share = root.amax(-1) / torch.linalg.vector_norm(root, dim=-1)
        h = e * share * block_norm(change * half[:, :, None] * half[:, None, :])
        wanted: Tensor = (damping * h / self.threshold).clamp_min(self.eps)
        return wanted

    def _decompose(self, state: State, axis: int, a: Tensor, due: tuple[Tensor, Tensor]) -> None:
        """Decompose the present statistic A of the blocks that are due, and store its eigenvectors and eigenvalues.

        The damping of these blocks becomes `eps`. Where the decomposition fails, the stored eigenvectors, eigenvalues
        and damping do not change, and the count of failures increases by 1.

        a: A `[N, d, d]`.
        due: (rows, mask). mask: bool `[N]`, True for blocks that are due; only their results are stored. rows: indices
            of the blocks that are decomposed. On a device these are all blocks, because the host does not read the
            mask; elsewhere they are the blocks that are due.
        """
        rows, counts = due
        found, vectors, fine = eigh(a[rows])
        q, values = state[f"basis.{axis}"].clone(), state[f"values.{axis}"].clone()
        ok = torch.ones_like(counts)
        ok[rows] = fine
        q[rows], values[rows] = vectors, found.clamp_min(0)
        replaced = counts & ok
        failures, damping = state[f"failures.{axis}"], state[f"damping.{axis}"]
        state[f"basis.{axis}"] = torch.where(per_block(replaced, q), q, state[f"basis.{axis}"])
        state[f"values.{axis}"] = torch.where(replaced[:, None], values, state[f"values.{axis}"])
        state[f"damping.{axis}"] = torch.where(replaced, torch.full_like(damping, self.eps), damping)
        state[f"failures.{axis}"] = torch.where(counts & ~ok, failures + 1, torch.where(replaced, 0, failures))

    def power(self, state: State, axis: int, exponent: Fraction, estimate: Tensor) -> Power:
        raise NotImplementedError(
            "adaptive_shampoo: `power` is not supported, because its statistics read no powers of factors; do not call "
            "it"
        )

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        bases = self.matrices(state)
        turned = rotate(direction, {axis: q.mT for axis, q in bases.items()}, self.precision)
        scales = {axis: state[f"values.{axis}"] + state[f"damping.{axis}"][:, None] for axis in bases}
        roots = {axis: to_power(s, -float(self._exponent(state.block, axis))) for axis, s in scales.items()}
        return rotate(mode_products(turned, roots), bases, self.precision)
