"""PSGD: a preconditioner learned by stochastic descent in a group of matrices (Li 2015, arXiv:1512.04202).

A step of a factor does not depend on the scale of the gradient, but its terms contain squared gradients, which may
over- or underflow. The terms are therefore computed from blocks divided by a number `size` `[N]`, which is returned
with the terms.

Legend: N is the number of blocks; n is the number of entries of a block; d is the length of an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from eigengraft import noise
from eigengraft.numerics import identity_like, per_block, symmetrized, tiny, to_power
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import mode_products
from .base import (
    Factors,
    LearnedFactors,
    balanced,
    factor_slot,
    gram,
    is_informative,
    peak_of,
    scaled,
    solved,
    spectral_norm,
    transposes,
)

PROBE = 1
"""Number of the random stream from which `noise` draws the probes of `PSGD`. Each purpose has a stream of its own, so
that its numbers are independent of all others.
"""


class PSGD(LearnedFactors):
    """P d  with P = Q^T Q, Q = Q_1 x ... x Q_k;  P tends to E[g g^T]^(-1/2), so that it whitens the gradient g.

    d is the direction, and v ~ N(0, I) a random probe. The steps minimize the criterion c(P) = E[h^T P h + v^T P^(-1)
    v] with h = g + damping v. Without damping, its minimizer is E[g g^T]^(-1/2) (Li 2022, arXiv:2211.04422, section 2;
    Li 2024, arXiv:2402.11858).

    A_i and B_i are the unfoldings along axis i of the tensors A and B below, d_i is the length of that axis, and n the
    number of entries of a block. T_i is the descent direction of the chosen `form`, and l_i the size of T_i. L_i <-
    max(b L_i + (1 - b) l_i, l_i) is a slowly falling bound of l_i, with b = smoothing, and m = lr_preconditioner. A
    refresh makes one step for each axis i:

    triangular: A = Q h, B = Q^(-T) v;  T_i = A_i A_i^T - B_i B_i^T,  l_i = ||A_i A_i^T + B_i B_i^T||_2;
                Q_i <- Q_i - (m / L_i) triu(T_i) Q_i
    quad:       A = P h;  T_i = A_i A_i^T - (n / d_i) I,  l_i = ||A_i A_i^T||_2 + n / d_i;
                Q_i <- (I - m / (2 L_i) T_i) Q_i (I - m / (2 L_i) T_i)

    With `triangular` the Q_i are upper triangular. With `quad` they are symmetric, and a step needs only matrix
    products.

    Q starts as (mean g^4 + damping^4)^(-1/8) I, with g the first gradient. P is unique, but the Q_i are not: after each
    step they are rescaled to equal largest entries. The probe v follows from the block's seed and step, not from a
    global random generator.
    """

    kind: Literal["psgd"] = "psgd"
    form: Literal["triangular", "quad"] = Field(default="triangular", description="form of the Q_i and of their steps")
    lr_preconditioner: float = Field(default=0.1, gt=0, le=1, description="step size m, in units of 1 / L")
    smoothing: float = Field(default=0.9, ge=0, lt=1, description="decay b of the bound L; 0: L = l, as in the papers")
    damping: float = Field(
        default=1e-9,
        ge=0,
        description="size of the noise in h = g + damping v, in units of the gradient: bounds P by 1 / damping",
    )
    initial_scale: float | None = Field(
        default=None, gt=0, description="Q starts as this times I; default: computed from the first gradient"
    )

    def state_meaning(self) -> Mapping[str, Any]:
        return {**super().state_meaning(), "form": self.form}

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        slots = {}
        for axis in self.factor_axes(block):
            slots[f"q.{axis}"] = factor_slot(block[axis], self.axes.full(block, axis))
            slots[f"bound.{axis}"] = Slot((), role="statistic")
        return slots

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        axes, live = self.factor_axes(state.block), is_informative(gradient)
        if not axes:
            return
        probe = self._probe(gradient, context)
        h = gradient if probe is None else torch.add(gradient, probe, alpha=self.damping)
        old = {axis: state[f"q.{axis}"] for axis in axes}
        bounds = {axis: state[f"bound.{axis}"] for axis in axes}
        factors = self._started(old, gradient, fresh=bounds[axes[0]] == 0)
        step = FACTOR_STEPS[self.form]
        size, terms = step.terms(factors, h, probe)
        updated = {}
        for axis, (plus, minus) in terms.items():
            bound = self._bound(bounds[axis], size * spectral_norm(plus + minus).sqrt())
            rate = (size / bound.clamp_min(tiny(bound.dtype))).square() * self.lr_preconditioner
            updated[axis] = step.move(factors[axis], scaled(plus - minus, rate))
            state[f"bound.{axis}"] = torch.where(live, bound, bounds[axis])
        for axis, factor in balanced(updated).items():
            state[f"q.{axis}"] = torch.where(per_block(live, factor), factor, old[axis])

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        factors = {axis: state[f"q.{axis}"] for axis in self.factor_axes(state.block)}
        # d is multiplied by Q and then by Q^T, because the matrix P may overflow where P d does not
        return mode_products(mode_products(direction, factors), transposes(factors))

    def _probe(self, like: Tensor, context: StepContext) -> Tensor | None:
        """Return the probe v, standard normal noise for each block. Return None if neither the form of the step nor the
        damping needs a probe.

        like: a tensor with the shape and dtype of v.
        """
        if not self.damping and not FACTOR_STEPS[self.form].probed:
            return None
        return noise.normal(context.seed, context.step, tuple(like.shape[1:]), like.dtype, PROBE)

    def _started(self, factors: dict[int, Tensor], gradient: Tensor, fresh: Tensor) -> dict[int, Tensor]:
        """Return the factors. In blocks that are updated for the first time they are scaled to their initial value.

        factors: the factors Q_i by axis; the identity in blocks that are updated for the first time.
        fresh: bool `[N]`, True for blocks that are updated for the first time.
        """
        scale = gradient.new_full(fresh.shape, self.initial_scale) if self.initial_scale else self._scale(gradient)
        share = torch.where(fresh, to_power(scale, 1 / len(factors)), 1.0)
        return {axis: scaled(factor, share) for axis, factor in factors.items()}

    def _scale(self, gradient: Tensor) -> Tensor:
        """Return the initial scale of Q for each block, (mean g^4 + damping^4)^(-1/8) `[N]`, with g the first gradient.

        Fourth powers are computed after division by the largest entry, so that they do not over- or underflow.
        """
        peak = peak_of(gradient).clamp_min(self.damping)
        peak = torch.where(peak > 0, peak, 1.0)
        mean = (gradient / per_block(peak, gradient)).pow(4).flatten(1).mean(1)
        # `self.damping / peak` would be a product with 1 / peak, which is infinite for denormal numbers
        damping = torch.full_like(peak, self.damping) / peak
        fourth: Tensor = peak * to_power(mean + damping.pow(4), 0.25)
        return to_power(fourth, -0.5)

    def _bound(self, old: Tensor, size: Tensor) -> Tensor:
        """Return sqrt(L) `[N]`, where L is a slowly falling bound of the size l of a factor's descent direction.

        The state has sqrt(L) in place of L, because L and l are in units of squared gradients and could overflow.

        old: sqrt(L) of the last step.
        size: sqrt(l) of this step.
        """
        mean = torch.hypot(old * self.smoothing**0.5, size * (1 - self.smoothing) ** 0.5)
        return torch.maximum(mean, size)


Terms = dict[int, tuple[Tensor, Tensor]]
"""For each axis, two terms (plus, minus), both positive semi-definite. Their difference is the descent direction.

`plus` makes the factor smaller, and `minus` makes it larger. On average they are equal if the factor whitens the
gradient.
"""


class FactorStep(NamedTuple):
    """Two functions that together update the factors of PSGD's preconditioner, for one value of the field `form`.

    terms: function of the factors, the damped gradient h and the probe v (a random tensor). It returns (size, terms),
        with two terms for each axis. Their difference times size^2 is T, the descent direction of the axis's factor.
        The terms are returned divided by size^2, with size `[N]`, so that they do not overflow.
    move: function of a factor and of its step m T / L, with m the step size and L a bound of the size of T. It returns
        the updated factor.
    probed: True if the terms need the probe v.
    """

    terms: Callable[[Factors, Tensor, Tensor | None], tuple[Tensor, Terms]]
    move: Callable[[Tensor, Tensor], Tensor]
    probed: bool


def triangular_terms(factors: Factors, h: Tensor, v: Tensor | None) -> tuple[Tensor, Terms]:
    """Return (size, {axis: (A A^T, B B^T)}), for A = Q h and B = Q^(-T) v, unfolded along the axis.

    Q is the product of the factors. size `[N]` is the largest entry of A and B. The terms A A^T and B B^T are divided
    by size^2, so that they do not overflow. For a diagonal factor only their diagonals `[N, d]` are computed.

    h: the damped gradient.
    v: the probe, which this form needs. Only forms without a probe accept None.
    """
    assert v is not None
    a, b = mode_products(h, factors), v
    for axis, q in factors.items():
        b = solved(b, q, axis)
    size = torch.maximum(peak_of(a), peak_of(b))
    divisor = per_block(torch.where(size > 0, size, 1.0), h)
    a, b = a / divisor, b / divisor
    return size, {axis: (gram(a, axis, q.ndim == 3), gram(b, axis, q.ndim == 3)) for axis, q in factors.items()}


def triangular_move(q: Tensor, t: Tensor) -> Tensor:
    """Return Q - triu(T) Q for a factor Q and its step T. Like Q, it is upper triangular with a positive diagonal.

    T is scaled down so that no entry of the diagonal shrinks more than tenfold in one step. A full step could make an
    entry 0.
    """
    longest = (t if t.ndim == 2 else t.diagonal(dim1=-2, dim2=-1)).amax(-1)
    t = t * per_block(0.9 / longest.clamp_min(0.9), t)
    return q - (t * q if q.ndim == 2 else torch.bmm(t.triu(), q))


def quad_terms(factors: Factors, h: Tensor, v: Tensor | None) -> tuple[Tensor, Terms]:
    """Return (size, {axis: (A A^T, (n / d) I)}), for A = Q Q h, unfolded along the axis.

    Q is the product of the factors, n the number of entries of a block, and d the length of the axis. size `[N]` is the
    largest entry of A, but at least 1. The terms A A^T and (n / d) I are divided by size^2, so that they do not
    overflow. For a diagonal factor only their diagonals `[N, d]` are computed.

    h: the damped gradient.
    v: not used, because this form needs no probe; may be None.
    """
    a = mode_products(mode_products(h, factors), factors)
    size = peak_of(a).clamp_min(1.0)
    a = a / per_block(size, a)
    terms = {}
    for axis, q in factors.items():
        white = (a[0].numel() / q.shape[-1]) / size.square()
        unit = torch.ones_like(q) if q.ndim == 2 else identity_like(q)
        terms[axis] = gram(a, axis, q.ndim == 3), unit * per_block(white, q)
    return size, terms


def quad_move(q: Tensor, t: Tensor) -> Tensor:
    """Return (I - T / 2) Q (I - T / 2) for a factor Q and its step T. Like Q, it is symmetric and positive definite."""
    half = t / 2
    if q.ndim == 2:
        return q * (1 - half).square()
    left = q - torch.bmm(half, q)
    return symmetrized(left - torch.bmm(left, half))


FACTOR_STEPS = {
    "triangular": FactorStep(triangular_terms, triangular_move, probed=True),
    "quad": FactorStep(quad_terms, quad_move, probed=False),
}
"""The step of the factors by the form of the factors, a field of `PSGD`."""
