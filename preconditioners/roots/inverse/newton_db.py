"""Inverse square and fourth roots by Denman and Beavers' iteration, coupled Newton-Schulz form (Higham 2008, 6.35)."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import identity_like

from .bounds import EigenvalueBound, GuaranteedBound
from .coupled import Best, Coupled, Iterates
from .iterative import Solved


class NewtonDB(Coupled):
    """Y <- Y E,  Z <- E Z,  E = (3 I - Z Y) / 2,  from  Y = C,  Z = I:  Y tends to C^(1/2), Z to C^(-1/2)

    Denman and Beavers' iteration, Newton-Schulz form (Higham 2008, equation 6.35). Y, Z `[N, d, d]`; C is A with its
    ridge, divided by its size: the eigenvalues of Z Y start in (0, 1], and each step raises the smallest by 9/4. Takes
    e = 1/2 and 1/4, the latter in two calls, the second on the Y of the first (DASH, arXiv:2602.02016). The residual is
    ||Z Y - I||. In float32 Y and Z lose their coupling where the condition of C approaches 1e7; the residual then stays
    large.
    """

    kind: Literal["newton_db"] = "newton_db"
    scaling: EigenvalueBound = Field(
        default=GuaranteedBound(), description="size that a matrix is divided by before it is solved"
    )

    def check(self, exponent: Fraction) -> str | None:
        if exponent not in (Fraction(1, 2), Fraction(1, 4)):
            return f"newton_db takes exponents 1/2 and 1/4, got {exponent}"
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
        rest = (identity_like(zy) - zy) / 2  # E - I, which vanishes, and with it the rounding of its products
        y, z = y + self.times(y, rest), z + self.times(rest, z)
        return y, z, self.times(z, y)
