"""Inverse roots by the coupled Newton iteration: matrix products only (Iannazzo 2006; Higham 2008, section 7.3)."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from torch import Tensor

from eigengraft.numerics import identity_like

from .coupled import Coupled, rational
from .iterative import Solved


class CoupledNewton(Coupled):
    """X <- X T,  M <- T^p M,  T = ((p + 1) I - M) / p,  from  X = z^(1/p) I,  M = z C,  z = (1 + p) / 2

    Iannazzo 2006; Higham 2008, section 7.3. X `[N, d, d]` tends to C^(-1/p), M to I, quadratically for
    eigenvalues of z C in (0, p + 1); the root C^(-q/p) is the q-th power of X. C is A with its ridge, divided by its
    size. Takes e = q/p with p <= 64 and q <= 8. The residual is ||M - I||.

    The rule of Distributed Shampoo (PyTorch): relative false, norm max. Of its JAX version: relative_to power_iteration
    (steps 100), norm max, stop rise, growth 1.2, max_iterations 100, retries 5, retry_above 0.05.
    """

    kind: Literal["coupled_newton"] = "coupled_newton"

    def check(self, exponent: Fraction) -> str | None:
        return rational(self.kind, exponent)

    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        p, q = exponent.denominator, exponent.numerator
        z = (1 + p) / 2
        (x, _), error, steps = self.run((z ** (1 / p) * identity_like(c), z * c), lambda s, _: self.newton(s, p, 2))
        return Solved(x, error, steps, q)
