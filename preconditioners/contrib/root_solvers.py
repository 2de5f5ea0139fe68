"""Root solvers and bounds of eigenvalues that no shipped recipe names.

The solvers use Chebyshev series (DASH, arXiv:2602.02016), coupled iterations of higher order (Lakic 1998; Distributed
Shampoo), and Denman and Beavers' iteration (Higham 2008, 6.35).
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import identity_like

from ..roots.bounds import EigenvalueBound, GuaranteedBound
from ..roots.coupled_newton import Best, Coupled, Iterates, rational
from ..roots.iterative import Iterative, Scaling, Solved, largest_entry, product


class InfinityBound(EigenvalueBound):
    """max_i sum_j |a_ij|, the largest row sum, at most sqrt(d) times the largest eigenvalue."""

    kind: Literal["infinity"] = "infinity"

    def of_scaled(self, a: Tensor) -> Tensor:
        return a.abs().sum(-1).amax(-1)


class TraceBound(EigenvalueBound):
    """tr A, the sum of the eigenvalues: a bound only for positive semi-definite A, and at most rank(A) times the
    largest eigenvalue.
    """

    kind: Literal["trace"] = "trace"

    def of_scaled(self, a: Tensor) -> Tensor:
        return a.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)


class Chebyshev(Iterative):
    """sum over k <= degree of c_k T_k(S),  S = (2 C - (low + high) I) / (high - low)

    T_k are the Chebyshev polynomials, and c_k the coefficients of the series of x^(-1/p) on [low, high]. The sum X is
    close to C^(-1/p), and the result C^(-q/p) is its q-th power (DASH, arXiv:2602.02016). C is (A + r I) / t, with A
    the matrix and r the ridge. t is a bound or an estimate of the largest eigenvalue of A + r I, chosen by the field
    `scaling`. The interval [low, high] must contain the eigenvalues of C, which are in [r / t, 1] if t is a bound. The
    solver accepts exponents e = q/p with p <= 64 and q <= 8. The residual is max |X^p C - I|.

    Each degree costs one product of `[N, d, d]`, by Clenshaw's recurrence. The error falls as exp(-2 degree sqrt(low /
    high)), so that a ridge of 1e-3 needs about a hundred terms. With few terms the series is inaccurate on a wide
    interval: with 20 terms on [1e-10, 1], as in DASH, the error exceeds a tenth already for a condition number of 9.
    """

    kind: Literal["chebyshev"] = "chebyshev"
    eps: float = Field(default=1e-3, ge=0, le=1, description="ridge, in units of the matrix; relative: of its size")
    degree: int = Field(default=100, ge=1, le=1000, description="degree of the polynomial")
    interval: Annotated[tuple[float, float], Field(strict=False)] | None = Field(
        default=None, description="[low, high] for eigenvalues of C; default: from the relative ridge to 1"
    )
    scaling: Scaling = GuaranteedBound()

    @model_validator(mode="after")
    def _knows_its_interval(self) -> Self:
        if self.interval is not None and not 0 < self.interval[0] < self.interval[1]:
            raise ValueError(f"interval: must be [low, high] with 0 < low < high, got {list(self.interval)}")
        if self.interval is None and not (self.relative and self.relative_to is None and self.eps > 0):
            raise ValueError(
                "interval: the default needs a ridge relative to `scaling` (relative: true, relative_to: null, "
                "eps > 0); set these fields, or give `interval`"
            )
        return self

    def check(self, exponent: Fraction) -> str | None:
        return rational(self.kind, exponent)

    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        below, above = self.interval or (ridge / (1 + ridge * self._size_of_identity(c.shape[-1])), 1.0)
        p = exponent.denominator
        first, *coefficients = _coefficients(self.degree, below, above, 1 / p)
        eye = identity_like(c)
        s = (2 * c - (below + above) * eye) / (above - below)
        b, before = coefficients[-1] * eye, torch.zeros_like(c)
        for coefficient in reversed(coefficients[:-1]):
            b, before = coefficient * eye + 2 * product(s, b, self.precision) - before, b
        x = first * eye + product(s, b, self.precision) - before
        residual = largest_entry(torch.bmm(torch.linalg.matrix_power(x, p), c) - eye)
        steps = torch.full_like(residual, self.degree, dtype=torch.int32)
        return Solved(x, residual, steps, exponent.numerator)

    def _size_of_identity(self, d: int) -> float:
        """Return the bound of the largest eigenvalue that `scaling` gives for the identity matrix of order d.

        A ridge r raises the bound of a matrix by at most r times this number. The bound is computed on the host.
        """
        return float(self.scaling.upper(torch.eye(d, dtype=torch.float64, device="cpu")[None]))


@lru_cache(maxsize=256)
def _coefficients(degree: int, low: float, high: float, exponent: float) -> tuple[float, ...]:
    """Return the coefficients c_0 .. c_degree of the Chebyshev series of x^-exponent on [low, high].

    The coefficients are integrals, which are approximated by sums over many nodes.
    """
    nodes = max(10_000, 8 * degree)
    angles = (np.arange(nodes) + 0.5) * np.pi / nodes
    values = ((high + low) / 2 + (high - low) / 2 * np.cos(angles)) ** -exponent
    sums = [2 / nodes * float(np.dot(values, np.cos(k * angles))) for k in range(degree + 1)]
    return (sums[0] / 2, *sums[1:])


class HigherOrder(Coupled):
    """X <- X T,  M <- T^p M,  T = sum over i < order of b_i (I - M)^i,  from  X = I,  M = C

    b_i = prod over j <= i of (1 + (j - 1) p) / (j p) are the coefficients of the series of M^(-1/p) around I (Lakic
    1998). Order 2 is Newton's iteration; the first step always has order 2. X `[N, d, d]` tends to C^(-1/p), and the
    result is the q-th power of X. With the default fields, C is A + r I divided by its trace, with A the matrix and r =
    max(eps * largest row sum of A, floor) the ridge. The solver accepts exponents e = q/p with p <= 64 and q <= 8.

    The residual is the larger of max |X^p C - I| and ||M - I||. In float32 the residual may be up to about 1e-7 p times
    the condition number. The default ridge is therefore larger than that of `coupled_newton`.
    """

    kind: Literal["higher_order"] = "higher_order"
    eps: float = Field(default=1e-5, ge=0, le=1, description="ridge, in units of the matrix; relative: of its size")
    order: int = Field(
        default=3, ge=2, le=10, description="terms of the series: a step raises ||M - I|| about to this power"
    )
    scaling: Scaling = TraceBound()
    relative_to: EigenvalueBound | None = Field(
        default=InfinityBound(), description="size of the matrix that is the unit of a relative eps; null: `scaling`"
    )
    max_iterations: int = Field(default=100, ge=1, le=200, description="largest number of steps")
    tolerance: float = Field(default=1e-8, gt=0, description="a matrix is done when ||M - I|| is below this")
    growth: float = Field(
        default=1.2,
        ge=1,
        description="a matrix with M within 1/2 of I stops when its error is at least this times its least error",
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


class NewtonDB(Coupled):
    """Y <- Y E,  Z <- E Z,  E = (3 I - Z Y) / 2,  from  Y = C,  Z = I:  Y tends to C^(1/2), Z to C^(-1/2)

    This is the Newton-Schulz form of Denman and Beavers' iteration (Higham 2008, equation 6.35). Y and Z are `[N, d,
    d]`, and C is (A + r I) / t, with A the matrix and r the ridge. t is a bound or an estimate of the largest
    eigenvalue of A + r I, chosen by the field `scaling`. The solver accepts the exponents 1/2 and 1/4. For 1/4 it runs
    the iteration twice, the second time on the Y of the first run (DASH, arXiv:2602.02016).

    The eigenvalues of Z Y start in (0, 1], and each step multiplies the smallest by up to 9/4. The residual is ||Z Y -
    I||. In float32, if the condition number of C is close to 1e7, rounding errors decouple Y from Z, and the residual
    stays large.
    """

    kind: Literal["newton_db"] = "newton_db"
    scaling: Scaling = GuaranteedBound()

    def check(self, exponent: Fraction) -> str | None:
        if exponent not in (Fraction(1, 2), Fraction(1, 4)):
            return f"newton_db takes exponents 1/2 and 1/4 only, got {exponent}"
        return None

    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        (y, z, _), error, steps = self._square_roots(c)
        if exponent == Fraction(1, 4):
            (_, z, _), second, more = self._square_roots(y)
            error, steps = torch.maximum(error, second), steps + more
        return Solved(z, error, steps)

    def _square_roots(self, c: Tensor) -> Best:
        return self.run((c, identity_like(c), c), self._step)

    def _step(self, state: Iterates, iteration: int) -> Iterates:
        y, z, zy = state
        # E = I + rest, and rest tends to 0: products with it have smaller rounding errors than products with E
        rest = (identity_like(zy) - zy) / 2
        y, z = y + self.times(y, rest), z + self.times(rest, z)
        return y, z, self.times(z, y)
