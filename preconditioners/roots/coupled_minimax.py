"""Inverse roots by a coupled iteration with the best polynomial for the range of eigenvalues in each step.

This is the method of Polar Express (arXiv:2505.16932) for inverse p-th roots. In each step a matrix M, which tends to
I, is multiplied by a polynomial of M. Newton's iteration multiplies a small eigenvalue of M by ((p + 1) / p)^p in each
step, which is less than 2.72. The polynomials here multiply it by 17 for p = 2, and by 29 for p = 4, so that fewer
steps are needed.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from eigengraft.numerics import block_norm, identity_like

from .base import MatrixSolver
from .bounds import PowerIteration
from .coupled_newton import rational
from .decompositions import Eigh
from .iterative import Iterative, Solved

LEAST_RIDGE = 8
"""Smallest ridge for which the iteration may replace `eigh` (see `equal_to`), in units of machine epsilon times the
largest eigenvalue. With 8, the float32 roots of singular matrices are more accurate than those of `eigh`.
"""
_CUSHION = 5e-4
"""Least lower end of the range of eigenvalues of M for which a polynomial is optimized. If the range began lower, the
polynomial would make some larger eigenvalues as small as the smallest eigenvalue, and small eigenvalues suffer most
from rounding errors of M. With 5e-4, float32 roots are as exact as those of `coupled_newton`, and no more products are
needed.
"""
_MARGIN = 1.001
"""Upper end of the range of eigenvalues of M that the first steps map to at most 1. It is slightly above 1, because the
first polynomials are steep near 1. Without this margin, rounding errors of eigenvalues at 1 grow tenfold in each step,
and the iteration may diverge.
"""


class Polynomial(NamedTuple):
    """The polynomial f(x) = constant + linear (1 - x) + square (1 - x)^2 of one step.

    A step maps each eigenvalue x of the matrix M, whose limit is I, to f(x)^p x.
    """

    constant: float
    linear: float
    square: float

    def step(self, x: float, p: int) -> float:
        """Return f(x)^p x, the eigenvalue of M after a step. x is the eigenvalue before it."""
        return (self.constant + (1 - x) * (self.linear + (1 - x) * self.square)) ** p * x

    def stretched(self, end: float, p: int) -> Polynomial:
        """Return the polynomial end^(-1/p) f(x / end), for eigenvalues x up to `end` instead of 1.

        A step with this polynomial maps an eigenvalue x of M to the value to which a step with f maps x / end.
        """
        shift, size = 1 - 1 / end, end ** (-1 / p)
        return Polynomial(
            size * (self.constant + shift * (self.linear + shift * self.square)),
            size / end * (self.linear + 2 * shift * self.square),
            size / end**2 * self.square,
        )


class CoupledMinimax(Iterative):
    """X <- X T,  M <- T^(p/2) M T^(p/2),  T = f(M),  f(x) = a + b (1 - x) + c (1 - x)^2,  from  X = I,  M = C

    a, b and c minimize the largest |x^(1/p) f(x) - 1| over the eigenvalues x that M may have in this step. f is then
    scaled so that no eigenvalue of the next M exceeds 1. X and M are `[N, d, d]`. X tends to C^(-1/p) and M to I. For
    an odd p the step is M <- T^((p-1)/2) T M T^((p-1)/2). C is (A + r I) / t, with A the matrix and r the ridge. t is a
    bound or an estimate of the largest eigenvalue of A + r I, chosen by the field `scaling`. The root C^(-q/p) is the
    q-th power of X. The solver accepts exponents e = q/p with p <= 64 and q <= 8.

    The number of steps follows from the ridge, the order and the dtype, not from values, so that the host never waits
    for a device. The eigenvalues of C are assumed to be at least max(eps, 8 u) / sqrt(d), with u the machine epsilon,
    or 8 u / sqrt(d) with `relative: false`. If t exceeds sqrt(d) times the largest eigenvalue, or the matrix has an
    eigenvalue below 0, the residual ||M - I|| may stay large, and the root then counts as failed.

    For p = 4 and order 1024, float32 roots with a ridge of 1e-6 need 34 products; `coupled_newton` often needs 64 to
    80. M is multiplied from both sides, which keeps it symmetric up to rounding and has as many products as T^p M.
    """

    kind: Literal["coupled_minimax"] = "coupled_minimax"

    @classmethod
    def equal_to(cls, other: MatrixSolver, dtype: torch.dtype) -> Self | None:
        if not isinstance(other, Eigh) or not other.relative or other.deficiency not in ("add", "clip_shift"):
            return None
        if other.precision != "input" or other.ratio or not LEAST_RIDGE * torch.finfo(dtype).eps <= other.eps <= 1:
            return None
        return cls(eps=other.eps, relative_to=PowerIteration(steps=100))

    def check(self, exponent: Fraction) -> str | None:
        return rational(self.kind, exponent)

    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        p, eye, unit = exponent.denominator, identity_like(c), torch.finfo(c.dtype).eps
        x, m = eye, c
        low = max(self.eps if self.relative else 0.0, LEAST_RIDGE * unit) / c.shape[-1] ** 0.5
        steps = polynomials(p, low, unit)
        for k, (constant, linear, square) in enumerate(steps):
            rest = eye - m
            first = torch.add((constant - 1) * eye, rest, alpha=linear)
            t = self.plus_product(first, rest, rest, square)  # T - I
            x = self.plus_product(x, x, t) if k else eye + t
            if p % 2:
                m = self.plus_product(m, t, m)
            if p > 1:
                half = self.power(t, p // 2)
                m = self.plus_product(m, half, m)
                m = self.plus_product(m, m, half)
        error = block_norm(m - eye)
        return Solved(x, error, torch.full_like(error, len(steps), dtype=torch.int32), exponent.numerator)


@lru_cache(maxsize=256)
def polynomials(p: int, low: float, unit: float) -> tuple[Polynomial, ...]:
    """Return the polynomial of each step. The iteration M <- f(M)^p M from M = C ends when M is I up to 16 `unit`.

    p: the root is C^(-1/p).
    low: lower bound of the eigenvalues of C, which are at most 1.
    unit: machine epsilon of the dtype of C.
    """
    steps, rest = [], 1 - low  # the largest eigenvalue of I - M
    while rest > 16 * unit:
        if rest < 1e-3:  # the series of x^(-1/p) around 1, because best coefficients have large rounding errors there
            best = Polynomial(1.0, 1 / p, (1 + p) / (2 * p * p))
            rest = (1 + p) * (1 + 2 * p) / (6 * p * p) * rest**3
        else:
            best, error = minimax(p, max(low, _CUSHION))
            best = Polynomial(*(value / (1 + error) for value in best))
            if low < 0.5:
                best = best.stretched(_MARGIN, p)
            low = min(best.step(low, p), ((1 - error) / (1 + error)) ** p)
            rest = 1 - low
        steps.append(best)
    return tuple(steps)


def minimax(p: int, low: float) -> tuple[Polynomial, float]:
    """Return (f, error): the polynomial f that minimizes the largest |x^(1/p) f(x) - 1| over [low, 1], and this
    maximum.

    f is found by Remez' algorithm with four points s = (1 - x) / (1 - low): 0, two points in between, and 1. A step of
    the algorithm computes the f whose errors at the four points are equal up to alternating signs. Then it moves the
    two points in between to the extrema of the error, which are the roots of a quadratic equation.
    """
    width, signs = 1 - low, (1, -1, 1, -1)
    s = [0.0, (1 - low**0.25) / width, (1 - low**0.67) / width, 1.0]
    for _ in range(20):
        goal = [(1 - width * at) ** (-1 / p) for at in s]
        # At the four points s, f has the values (1 - sign * error) * x^(-1/p), with alternating signs. Because f has
        # degree 2, the third divided difference of the four values is 0. This is a linear equation for `error`.
        weights = [1 / prod(at - other for other in s if other != at) for at in s]
        error = sum(w * y for w, y in zip(weights, goal, strict=True)) / sum(
            w * sign * y for w, sign, y in zip(weights, signs, goal, strict=True)
        )
        v = [(1 - sign * error) * y for sign, y in zip(signs, goal, strict=True)]
        first = (v[1] - v[0]) / s[1]
        square = ((v[2] - v[1]) / (s[2] - s[1]) - first) / s[2]
        linear = first - square * s[1]
        # x^(1/p) f(x) has its extrema where width (f / p + x f') is 0. This is a polynomial in s, with the coefficients
        # `two` of s^2, `one` of s, and `none`, the constant.
        two, one, none = (
            width * square * (1 / p + 2),
            width * linear * (1 / p + 1) - 2 * square,
            width * v[0] / p - linear,
        )
        middle, distance = -one / (2 * two), (one * one - 4 * two * none) ** 0.5 / (2 * abs(two))
        s = [0.0, middle - distance, middle + distance, 1.0]
    return Polynomial(v[0], linear / width, square / width**2), abs(error)
