"""Factors whose contributions are whitened by the other factors: KL-Shampoo and its relatives."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import block_norm, may_branch_on_values, per_block, tiny, to_power
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..algebra.basis_change import mode_product, unfold
from ..algebra.exponents import Rational0
from .base import Statistic
from .terms import Contribution, Powers


class Bregman(Statistic):
    """O_L = G R^(q-1) G^T / Tr(R^q),  O_R = G^T L^(q-1) G / Tr(L^q);  any order: G is whitened on all other axes.

    Fixed points minimise a trace-power Bregman divergence between E[g g^T] and L x R: q = 2 Frobenius, 1 von Neumann
    (L x R is Shampoo's L x R / trace), 1/2 square root (the objective of PSGD-Kron), 0 Kullback-Leibler (KL-Shampoo,
    Lin et al. 2025, arXiv:2509.03378; the family: Liu et al. 2026).

    R is what the owning stage holds: its inverse roots (Shampoo), or its basis with the eigenvalues diag(Q^T R Q)
    (eigenbasis). `order`: both axes read the old factors (jacobi), or each is refreshed before the next reads it
    (gauss_seidel, Duvvuri et al. 2024, CASPR's adaptive form).

    A factor that nothing is known about, or made of yet, counts as r I: with `first: rms` r = RMS(G)^(2/k) for k
    factors, so that all have one unit, or r = 1 (`identity`). The factor of a few gradients is singular, and whitening
    by its root without a ridge spoils the mean for a long time: let `refresh.start` be late enough for full rank.
    """

    kind: Literal["bregman"] = "bregman"
    q: Rational0 = Field(default=0, validate_default=True, description="power of the divergence: 2, 1, 1/2, 0, ...")
    order: Literal["jacobi", "gauss_seidel"] = Field(
        default="jacobi", description="whether the axes read each other's old or newest factors"
    )
    normalize: Literal["trace", "dimension", "none"] = Field(
        default="trace", description="divide by Tr(R^q), by the length of the other axes, or by nothing"
    )
    first: Literal["rms", "identity"] = Field(default="rms", description="what an unknown factor counts as")

    @model_validator(mode="after")
    def _units_agree(self) -> Self:
        if self.normalize == "none" and self.first != "identity":
            raise ValueError(
                f"first: 'identity' is required with normalize 'none', whose factors have their own units, "
                f"got '{self.first}'"
            )
        return self

    @property
    def needs_power(self) -> Fraction:
        return self.q - 1

    @property
    def sequential(self) -> bool:
        return self.order == "gauss_seidel"

    @property
    def decay_of_squares(self) -> float | None:
        return self.beta if self.every_gradient else None

    def contribution(self, state: State, x: Tensor, axis: int, powers: Powers, context: StepContext) -> Contribution:
        left, right, scale = x, x, x.new_ones(x.shape[0])
        for other in range(len(state.block)):
            if other == axis:
                continue
            d = state.block[other]
            trace: Tensor | float = d
            if self.has(state, other):
                power = powers(other, self.q - 1)
                known = power.known
                unit = torch.where(known, power.unit, self._unknown(state, x))
                half = to_power(unit, -0.5 if self.normalize == "trace" else float(self.q - 1) / 2)
                left = _whitened(left, power.left, other, known) * per_block(half, x)
                right = _whitened(right, power.right, other, known) * per_block(half, x)
                trace = torch.where(known, power.trace, float(d))
            if self.normalize != "none":
                scale = scale / (trace if self.normalize == "trace" else d)
        return Contribution(unfold(left, axis), unfold(right, axis), scale)

    def _unknown(self, state: State, x: Tensor) -> Tensor:
        """r `[N]`, what a factor that has seen nothing counts as."""
        if self.first == "identity":
            return x.new_ones(x.shape[0])
        factors = sum(self.has(state, axis) for axis in range(len(state.block)))
        rms = to_power(block_norm(x) / math.sqrt(x[0].numel()), 2 / factors)
        return torch.where(rms > tiny(x.dtype), rms, 1.0)


def _whitened(x: Tensor, matrix: Tensor | None, axis: int, known: Tensor) -> Tensor:
    if matrix is None:
        return x
    whitened = mode_product(x, matrix, axis)
    if may_branch_on_values(x) and bool(known.all()):
        return whitened
    return torch.where(per_block(known, x), whitened, x)
