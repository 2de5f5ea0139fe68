"""Inverse-free Shampoo without a root (Lin, Dangel, Eschenhagen, Bae, Turner & Makhzani 2024, arXiv:2402.03496)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import block_norm, identity_like, per_block
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.basis_change import mode_products
from ..algebra.factors import factor_transposed, gram, scaled
from .base import LearnedFactors, factor_slot, is_informative, peak_of


class SIRF(LearnedFactors):
    """P d  with P = K_1 K_1^T x ... x K_k K_k^T, kept as the K_i: P tends to (E[B g g^T] + damping I)^(-1), no root.

    For each axis i of length d_i, with n entries in a block and H = sqrt(B) g x_1 K_1^T ... x_k K_k^T:

    s = (d_i / n H_i H_i^T + damping prod_{j != i} (tr(K_j^T K_j) / d_j) K_i^T K_i - I) / 2
    m_i <- a m_i + (1 - a) s;   K_i <- K_i (I - b / max(1, ||m_i||_F) m_i)

    H_i unfolding along axis i, a = momentum, b = lr_preconditioner. The second line is the exponential of matrices to
    first order, so that (K K^T)^(-1) is a running mean of the statistics to first order in b. Where `axes`
    says so K is diagonal. As without a root P g falls as 1 / g, learning rates are in other units than Adam's.
    """

    kind: Literal["sirf"] = "sirf"
    lr_preconditioner: float = Field(default=0.01, gt=0, lt=1, description="step b of the factors")
    momentum: float = Field(default=0.5, ge=0, lt=1, description="decay a of the factors' own momentum")
    damping: float = Field(default=1e-3, ge=0, description="added to the statistics: bounds P by its reciprocal")
    batch_size: float = Field(
        default=1.0, gt=0, description="B: what a mean loss divided the sum over examples by, 1 to leave it out"
    )

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        slots = {}
        for axis in self.factor_axes(block):
            d, full = block[axis], self.axes.full(block, axis)
            slots[f"k.{axis}"] = factor_slot(d, full)
            if self.momentum:
                slots[f"m.{axis}"] = Slot((d, d) if full else (d,), role="first_moment")
        return slots

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        live = is_informative(gradient)
        factors = {axis: state[f"k.{axis}"] for axis in self.factor_axes(state.block)}
        traces = {axis: k.square().flatten(1).sum(1) / k.shape[-1] for axis, k in factors.items()}
        h = mode_products(
            gradient * math.sqrt(self.batch_size), {axis: factor_transposed(k) for axis, k in factors.items()}
        )
        size = peak_of(h).clamp(1.0, _ceiling(h.dtype))
        h = h / per_block(peak_of(h).clamp_min(1.0), h)
        for axis, k in factors.items():
            others = [traces[other] for other in factors if other != axis]
            weight = self.damping * (torch.stack(others).prod(0) if others else torch.ones_like(size))
            d, full = k.shape[-1], k.ndim == 3
            inner = torch.bmm(k.mT, k) if full else k.square()
            data = scaled(gram(h, axis, full), size.square() * (d / h[0].numel()))
            step = (data + scaled(inner, weight) - (identity_like(k) if full else 1.0)) / 2
            if self.momentum:
                m = state[f"m.{axis}"]
                step = torch.lerp(step, m, self.momentum)
                state[f"m.{axis}"] = torch.where(per_block(live, m), step, m)
            step = scaled(step, self.lr_preconditioner / block_norm(step).clamp_min(1.0))
            moved = k - (torch.bmm(k, step) if full else k * step)
            state[f"k.{axis}"] = torch.where(per_block(live, k), moved, k)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        factors = {axis: state[f"k.{axis}"] for axis in self.factor_axes(state.block)}
        return mode_products(
            mode_products(direction, {axis: factor_transposed(k) for axis, k in factors.items()}), factors
        )


def _ceiling(dtype: torch.dtype) -> float:
    """Past this size of H a step is as long as at it: squares, and sums of them, stay in the range of numbers."""
    return float(torch.finfo(dtype).max ** 0.4)
