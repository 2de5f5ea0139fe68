"""Inverse roots by coupled iterations of higher order (Lakic 1998; Distributed Shampoo's higher-order solver)."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import identity_like

from .bounds import EigenvalueBound, InfinityBound, TraceBound
from .coupled import Coupled, Iterates, rational
from .iterative import Solved, largest_entry


class HigherOrder(Coupled):
    """X <- X T,  M <- T^p M,  T = sum over i < order of b_i (I - M)^i,  from  X = I,  M = C

    b_i = prod over j <= i of (1 + (j - 1) p) / (j p): the series of M^(-1/p) around I (Lakic 1998). Order 2 is Newton's
    iteration, which the first step always is. X `[N, d, d]` tends to C^(-1/p), of which the q-th power is taken. C is A
    with its ridge, divided by its trace; the ridge is max(eps * largest row sum, floor). Takes e = q/p with p <= 64 and
    q <= 8. The residual is at least that of the matrix itself, max |X^p C - I|: in float32 about p times the condition
    times 1e-7, hence the larger default ridge.
    """

    kind: Literal["higher_order"] = "higher_order"
    eps: float = Field(default=1e-5, ge=0, le=1, description="ridge, in units of the matrix, or of its size")
    order: int = Field(default=3, ge=2, le=10, description="terms of the series; what is left shrinks with this power")
    scaling: EigenvalueBound = Field(
        default=TraceBound(), description="size that a matrix is divided by before it is solved"
    )
    relative_to: EigenvalueBound | None = Field(
        default=InfinityBound(), description="size that a relative eps refers to; null: `scaling`"
    )
    max_iterations: int = Field(default=100, ge=1, le=200, description="bound on the steps")
    tolerance: float = Field(default=1e-8, gt=0, description="a matrix is done when ||M - I|| is below this")
    growth: float = Field(
        default=1.2, ge=1, description="a matrix within 1/2 of I stops when its error is this many times its least"
    )

    def check(self, exponent: Fraction) -> str | None:
        return rational(self.kind, exponent)

    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        p, eye = exponent.denominator, identity_like(c)

        def step(state: Iterates, iteration: int) -> Iterates:
            return self.newton(state, p, self.order if iteration else 2)

        (x, _), error, steps = self.run((eye, c), step)
        residual = largest_entry(torch.bmm(torch.linalg.matrix_power(x, p), c) - eye)
        residual = torch.maximum(residual, error)
        return Solved(x, residual, steps, exponent.numerator)
