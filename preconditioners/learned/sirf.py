"""Inverse-free factors without a root (Lin et al. 2024, arXiv:2402.03496 and arXiv:2312.05705)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import block_norm, identity_like, per_block
from eigengraft.signals import Request
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import mode_products
from ..base import Traits
from .base import LearnedFactors, factor_slot, gram, is_informative, peak_of, scaled, transposes

_MOMENTS = {1: "activation_gram", 0: "output_gradient_gram"}
"""Signals with second moments of a layer, by axis of its weight: of gradients with respect to outputs for axis 0,
and of inputs for axis 1.
"""


class SIRF(LearnedFactors):
    """P d  with P = K_1 K_1^T (x) ... (x) K_k K_k^T, stored as the K_i;  P tends to (E[B g g^T] + damping I)^(-1)

    (x) is the Kronecker product, and x_i the product of a tensor with a matrix along axis i. g is the gradient, d the
    direction, and B = batch_size. d_i is the length of axis i, n the number of entries of a block, a = momentum, and
    b = lr_preconditioner. H_i is the unfolding along axis i of H = sqrt(B) g x_1 K_1^T ... x_k K_k^T. A refresh updates
    the factor K_i and its momentum m_i for each axis i:

    s = (d_i / n H_i H_i^T + damping prod_{j != i} (tr(K_j^T K_j) / d_j) K_i^T K_i - I) / 2
    m_i <- a m_i + (1 - a) s;   K_i <- K_i (I - b / max(1, ||m_i||) m_i)

    While ||m_i|| <= 1, the new K_i is K_i exp(-b m_i) to first order in b. To this order, (K K^T)^(-1) is a running
    mean of the statistics. The field `axes` chooses axes whose K is diagonal. P is an inverse, not an inverse root.
    Therefore P g is proportional to 1 / g, and learning rates are in other units than Adam's.

    With `moments: layer` E[g g^T] is approximated as in K-FAC (SINGD, Lin et al. 2024, arXiv:2312.05705, figure 4). For
    a layer with the weight W, U is the mean of a a^T over its inputs a (signal `activation_gram`), and G the mean of
    u u^T over the gradients u with respect to its outputs W a (signal `output_gradient_gram`). Then H_1 = K_1^T G K_1,
    H_2 = K_2^T U K_2, and d_i / n H_i H_i^T is replaced by B tr(H_j) / d_j H_i, where j is the other axis. The signals
    are collected in every step in which a refresh of any block may be due. With `stagger: none` in `refresh`, all
    blocks are refreshed in the same steps, so that there are few such steps.
    """

    kind: Literal["sirf"] = "sirf"
    lr_preconditioner: float = Field(default=0.01, gt=0, lt=1, description="step size b of the factors")
    momentum: float = Field(default=0.5, ge=0, lt=1, description="decay a of the momenta m_i of the factors")
    damping: float = Field(default=1e-3, ge=0, description="multiple of I added to statistics: bounds P by 1 / damping")
    batch_size: float = Field(
        default=1.0,
        gt=0,
        description="B: number of examples that the loss is a mean over; 1: gradients are not rescaled",
    )
    moments: Literal["gradient", "layer"] = Field(
        default="gradient", description="second moments of the gradient, or of the layer's inputs and output gradients"
    )
    norm: Literal["frobenius", "max"] = Field(
        default="frobenius", description="the norm ||m_i||: Frobenius, or the largest absolute entry"
    )

    @model_validator(mode="after")
    def _source_matters(self) -> Self:
        if self.moments == "layer" and self.source != "gradient":
            raise ValueError(f"source: '{self.source}' has no effect with `moments: layer`; remove it")
        if self.moments == "layer" and self.axes.vectors:
            raise ValueError("axes: {vectors: false} is required with `moments: layer`, which supports no vectors")
        return self

    def traits(self, block: tuple[int, ...]) -> Traits:
        own = super().traits(block)
        if self.moments == "gradient":
            return own
        return replace(own, signals=tuple(Request(name, "refresh") for name in _MOMENTS.values()), matrices=True)

    def state_meaning(self) -> Mapping[str, Any]:
        return {**super().state_meaning(), "moments": self.moments}

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        if self.moments == "layer" and len(block) > 2:
            raise ValueError(
                f"`moments: layer` needs blocks with two axes, outputs and inputs, got shape {block}; "
                f"set `blocking: {{merge: N, min_axes: 2}}`, with N at least {math.prod(block[1:])}"
            )
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
        if self.moments == "layer":
            statistics = self._of_layer(factors, gradient, context) if factors else {}
            for data in statistics.values():
                live = live & peak_of(data).isfinite()
        else:
            statistics = self._of_gradient(factors, gradient)
        traces = {axis: k.square().flatten(1).sum(1) / k.shape[-1] for axis, k in factors.items()}
        for axis, k in factors.items():
            others = [traces[other] for other in factors if other != axis]
            weight = self.damping * (torch.stack(others).prod(0) if others else torch.ones_like(traces[axis]))
            full = k.ndim == 3
            inner = torch.bmm(k.mT, k) if full else k.square()
            step = (statistics[axis] + scaled(inner, weight) - (identity_like(k) if full else 1.0)) / 2
            if self.momentum:
                m = state[f"m.{axis}"]
                step = torch.lerp(step, m, self.momentum)
                state[f"m.{axis}"] = torch.where(per_block(live, m), step, m)
            length = block_norm(step) if self.norm == "frobenius" else peak_of(step)
            step = scaled(step, self.lr_preconditioner / length.clamp_min(1.0))
            updated = k - (torch.bmm(k, step) if full else k * step)
            state[f"k.{axis}"] = torch.where(per_block(live, k), updated, k)

    def _of_gradient(self, factors: Mapping[int, Tensor], gradient: Tensor) -> Mapping[int, Tensor]:
        """Return the statistic d_i / n H_i H_i^T of each axis i, for `moments: gradient`. `SIRF` explains the symbols.

        The result is a matrix `[N, d, d]` for each axis, or its diagonal `[N, d]` if the factor is diagonal.

        factors: the factors K_i by axis.
        """
        h = mode_products(gradient * math.sqrt(self.batch_size), transposes(factors))
        size = peak_of(h).clamp(1.0, _ceiling(h.dtype))
        h = h / per_block(peak_of(h).clamp_min(1.0), h)
        weights = {axis: size.square() * (k.shape[-1] / h[0].numel()) for axis, k in factors.items()}
        return {axis: scaled(gram(h, axis, k.ndim == 3), weights[axis]) for axis, k in factors.items()}

    def _of_layer(self, factors: Mapping[int, Tensor], like: Tensor, context: StepContext) -> Mapping[int, Tensor]:
        """Return the statistic B tr(H_j) / d_j H_i of each axis i, for `moments: layer`. `SIRF` explains the symbols.

        The result is a matrix `[N, d, d]` for each axis, or its diagonal `[N, d]` if the factor is diagonal.

        factors: the factors K_i by axis.
        like: a tensor with the dtype and device of the result.
        """
        given = {axis: context.tensor(name, like) for axis, name in _MOMENTS.items()}
        whitened = {axis: _congruent(moments, factors.get(axis)) for axis, moments in given.items()}
        means = {axis: h.mean(1) if h.ndim == 2 else h.diagonal(0, 1, 2).mean(1) for axis, h in whitened.items()}
        return {axis: scaled(whitened[axis], self.batch_size * means[1 - axis]) for axis in factors}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        factors = {axis: state[f"k.{axis}"] for axis in self.factor_axes(state.block)}
        return mode_products(mode_products(direction, transposes(factors)), factors)


def _congruent(moments: Tensor, k: Tensor | None) -> Tensor:
    """Return K^T M K, or its diagonal if K is diagonal, scaled down so that no entry exceeds `_ceiling`.

    moments: M `[N, d, d]`, second moments of a layer's inputs, or of the gradients with respect to its outputs.
    k: the factor K; None means the identity.
    """
    if k is None:
        h = moments
    elif k.ndim == 3:
        h = torch.bmm(k.mT, torch.bmm(moments.to(k), k))
    else:
        h = moments.diagonal(0, 1, 2).to(k) * k.square()
    peak = peak_of(h)
    return scaled(h, (_ceiling(h.dtype) / peak).clamp(max=1.0))


def _ceiling(dtype: torch.dtype) -> float:
    """Return the largest entry that whitened statistics may have, so that squares and their sums do not overflow.

    Larger statistics are scaled down. This does not change the step of a factor, which is divided by the norm of the
    factor's momentum if this norm exceeds 1.
    """
    return float(torch.finfo(dtype).max ** 0.4)
