"""Inverse square and fourth roots by a fixed schedule of accelerated Newton-Schulz steps (CANS, arXiv:2506.10935)."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import identity_like

from .bounds import EigenvalueBound, GuaranteedBound
from .iterative import Iterative, Solved, largest_entry, product

OKLS_SCHEDULE = (
    (5.1825, -5.1781),
    (2.5861, -0.64795),
    (2.5674, -0.6455),
    (2.5206, -0.63935),
    (2.4108, -0.62487),
    (2.1883, -0.5952),
    (1.8596, -0.55045),
    (1.5890, -0.51266),
    (1.5052, -0.50074),
    (1.5, -0.5),
)
"""Coefficients (a, b) of each step of `CANS`, Chebyshev-optimal for eigenvalues from about 1e-7 to 1 (Online
KL-Shampoo, Tilde 2026).
"""


class CANS(Iterative):
    """Y <- Y E,  Z <- E Z,  E = a I + b Z Y  over the pairs (a, b), from  Y = C,  Z = I:  Z tends to C^(-1/2)

    This is Chebyshev-accelerated Newton-Schulz (CANS, arXiv:2506.10935). Y and Z are `[N, d, d]`. C is (A + r I) /
    (safety t), with A the matrix and r the ridge. t is a bound of the largest eigenvalue of A + r I, chosen by the
    field `scaling`. Therefore the eigenvalues of C are in (0, 1). A step is three products for every matrix. No value
    is tested, so the host never waits for a device. The solver accepts the exponents 1/2 and 1/4. For 1/4 there are two
    passes, the second with the Y of the first pass as C.

    An eigenvalue of C above 1 would converge to a root of the wrong sign, because the polynomial of the first pair is
    negative just above 1. The residual max |Z C Z - I| does not show this. Therefore t is a guaranteed bound by
    default, eigenvalues are also divided by `safety`, and a root that is not positive definite counts as failed.
    """

    kind: Literal["cans"] = "cans"
    schedule: tuple[Annotated[tuple[float, float], Field(strict=False)], ...] = Field(
        default=OKLS_SCHEDULE,
        min_length=1,
        max_length=100,
        strict=False,
        description="pairs (a, b), one for each step",
    )
    scaling: EigenvalueBound = Field(
        default=GuaranteedBound(), description="size that a matrix is divided by before it is solved; an upper bound"
    )
    safety: float = Field(default=1.01, ge=1, le=10, description="eigenvalues are divided by this before each pass")

    def check(self, exponent: Fraction) -> str | None:
        if exponent not in (Fraction(1, 2), Fraction(1, 4)):
            return f"cans takes exponents 1/2 and 1/4 only, got {exponent}"
        return None

    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        twice = exponent == Fraction(1, 4)
        y, z = self._pass(c, need_y=twice)
        if twice:
            _, z = self._pass(y, need_y=False)
        once = torch.bmm(z, z) if twice else z
        residual = largest_entry(torch.bmm(torch.bmm(once, c), once) - identity_like(c))
        steps = len(self.schedule) * (2 if twice else 1)
        return Solved(z, residual, torch.full_like(residual, steps, dtype=torch.int32))

    def _pass(self, c: Tensor, need_y: bool) -> tuple[Tensor, Tensor]:
        """Return (Y, Z), where Z is C^(-1/2) and Y is C^(1/2).

        c: C `[N, d, d]`.
        need_y: False if the caller does not use Y. The last step then does not update Y.
        """
        c = c / self.safety
        y = zy = c
        z = identity_like(c)
        for k, (a, b) in enumerate(self.schedule):
            zy = product(z, y, self.precision) if k else c
            step = b * zy
            z = a * z + (product(step, z, self.precision) if k else step)
            if need_y or k + 1 < len(self.schedule):
                y = a * y + product(y, step, self.precision)
        return y * self.safety**0.5, z / self.safety**0.5
