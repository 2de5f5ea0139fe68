"""Jorge: Shampoo's inverse roots updated by a binomial series (Singh, Sating & Bhatele 2023, arXiv:2310.12298)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import block_norm, identity_like, per_block, symmetrized, tiny
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.exponents import Rational, default_exponent
from ..algebra.products import mode_products
from .base import LearnedFactors, gram, is_informative, peak_of


class Jorge(LearnedFactors):
    """d x_1 R_1 x_2 ... x_k R_k  with R_i an approximation of A_i^(-e), e = 1 / (2k) by default, kept without A_i.

    d is the direction, x_i the product along axis i, and k the number of axes with a factor. A is Shampoo's statistic,
    which is not stored: A <- b A + (1 - b) S with S = G G^T and G the unfolding of the gradient along the axis. If A
    and S commute, this corresponds to A^(-e) <- b^(-e) A^(-e) (I + (1 - b) / b X)^(-e) with X = A^(-1) S. The decay b
    is chosen so that (1 - b) / b = 1 / ||X||_F. With Y = X / ||X||_F, the last factor is then (I + Y)^(-e). The
    binomial series to second order replaces it by K (section 3). With R = A^(-e) the two forms are:

    published: X = R^(1/e) S;            R <- (1 + 1 / ||X||_F)^e R K,    K = I - e Y + e (e + 1) / 2 Y^2
    symmetric: X = R^(1/2e) S R^(1/2e);  R <- (1 + 1 / ||X||_F)^e h R h,  h = I - e/2 Y + e/2 (e/2 + 1) / 2 Y^2

    For matrices, e = 1/4, K = I - Y / 4 + 5/32 Y^2, and the result is R_1 d R_2. In the paper the magnitude of the
    update is set by grafting.

    In the published form R loses its symmetry, and drifts away from the root when the eigenbasis of S turns. The
    symmetric form, which is not in the paper, multiplies R by h from both sides. h^2 equals K to second order, and R
    stays symmetric and positive definite.

    Two safeguards are not in the paper either. The ridge `eps` keeps R bounded in directions without gradients, and A
    is treated as no smaller than the smallest normal number of its dtype.
    """

    kind: Literal["jorge"] = "jorge"
    form: Literal["published", "symmetric"] = Field(
        default="published", description="multiply R by K from one side, or by h from both"
    )
    exponent: Rational | None = Field(
        default=None,
        description="e of each axis, one over a whole number, an even one if symmetric; default 1 / (2 * k)",
    )
    initial: float = Field(default=1e-6, gt=0, description="A starts as this times I, in squared units of the gradient")
    eps: float = Field(
        default=1e-6, ge=0, description="ridge of S, relative to its mean eigenvalue; 0: none, as published"
    )

    @model_validator(mode="after")
    def _factors_fit(self) -> Self:
        if self.axes.has_diagonals:
            raise ValueError("axes: jorge needs full factors, got diagonal ones; set entries: full")
        e = self.exponent
        if e is not None and (e.numerator != 1 or e.denominator > 64):
            raise ValueError(f"exponent: jorge needs 1/p with a whole number p <= 64, got {e}")
        if e is not None and self.form == "symmetric" and e.denominator % 2:
            raise ValueError(f"exponent: `form: symmetric` needs 1/p with an even p, got {e}")
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {**super().state_meaning(), "form": self.form, "exponent": self.exponent}

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        start = self.initial ** -float(self._exponent(block))
        return {
            f"root.{axis}": Slot((block[axis],) * 2, fill="identity", scale=start, role="root")
            for axis in self.factor_axes(block)
        }

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        e, live = self._exponent(state.block), is_informative(gradient)
        step = _symmetric if self.form == "symmetric" else _published
        peak = torch.where(live, peak_of(gradient), 1.0)
        g = gradient / per_block(peak, gradient)
        for axis, old in self._roots(state).items():
            new, size = step(old, self._ridged(gram(g, axis, full=True)), e)
            size = size + 2 * peak.log()
            # the factor (1 + 1 / ||X||)^e is computed from log ||X||, because ||X|| may over- or underflow
            growth = torch.nn.functional.softplus(-size) * float(e)
            most = -float(e) * math.log(tiny(new.dtype)) - peak_of(new).log()
            new = new * per_block(torch.minimum(growth, most).exp(), new)
            state[f"root.{axis}"] = torch.where(per_block(live & size.isfinite(), new), new, old)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        # R_1 multiplies the first axis from the left, and every other R_i its axis from the right, as in R_1 d R_2
        return mode_products(direction, {axis: r.mT if axis else r for axis, r in self._roots(state).items()})

    def _ridged(self, s: Tensor) -> Tensor:
        """Return S = G G^T plus the ridge, which is `eps` times the mean of the diagonal of S."""
        ridge = s.diagonal(dim1=-2, dim2=-1).mean(-1) * self.eps
        return s + identity_like(s) * per_block(ridge, s)

    def _roots(self, state: State) -> dict[int, Tensor]:
        return {axis: state[f"root.{axis}"] for axis in self.factor_axes(state.block)}

    def _exponent(self, block: tuple[int, ...]) -> Fraction:
        return self.exponent or default_exponent(self.factor_axes(block))


def _published(r: Tensor, s: Tensor, e: Fraction) -> tuple[Tensor, Tensor]:
    """Return (R K, log ||X||_F `[N]`), with X = R^(1/e) S, Y = X / ||X||_F and K = I - e Y + e (e + 1) / 2 Y^2.

    This is the form `published` of `Jorge`. The caller multiplies R K by (1 + 1 / ||X||_F)^e, which makes it the next
    root.

    r: R `[N, d, d]`, the present root.
    s: S = G G^T `[N, d, d]`, with G the unfolding of the gradient along the axis.
    e: the exponent of the root.
    """
    y, size = _product(r, s, e.denominator)
    ry = torch.bmm(r, y)
    return r - float(e) * ry + float(e * (e + 1) / 2) * torch.bmm(ry, y), size


def _symmetric(r: Tensor, s: Tensor, e: Fraction) -> tuple[Tensor, Tensor]:
    """Return (h R h, log ||X||_F `[N]`), with X = R^(1/2e) S R^(1/2e), Y = X / ||X||_F and h = I - e/2 Y + e/2 (e/2 +
    1) / 2 Y^2.

    This is the form `symmetric` of `Jorge`. The caller multiplies h R h by (1 + 1 / ||X||_F)^e, which makes it the next
    root.

    r: R `[N, d, d]`, the present root.
    s: S = G G^T `[N, d, d]`, with G the unfolding of the gradient along the axis.
    e: the exponent of the root.
    """
    y, left = _product(r, s, e.denominator // 2)
    y, right = _product(r, y.mT, e.denominator // 2)
    y, half = symmetrized(y), e / 2
    h = identity_like(r) - float(half) * y + float(half * (half + 1) / 2) * torch.bmm(y, y)
    return symmetrized(torch.bmm(torch.bmm(h, r), h)), left + right


def _product(r: Tensor, s: Tensor, power: int) -> tuple[Tensor, Tensor]:
    """Return (Y, log ||X||_F `[N]`), with Y = X / ||X||_F and X = R^power S.

    r: R `[N, d, d]`, the root.
    s: S `[N, d, d]`.
    power: a whole number.

    R and each partial product are scaled to norm 1, so that no product over- or underflows.
    """
    norm = block_norm(r)
    unit, y = r / per_block(norm.clamp_min(tiny(r.dtype)), r), s
    size = power * norm.log()
    for _ in range(power):
        y = torch.bmm(unit, y)
        norm = block_norm(y)
        y = y / per_block(norm.clamp_min(tiny(y.dtype)), y)
        size = size + norm.log()
    return y, size
