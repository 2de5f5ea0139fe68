"""Rows of the bench of inverse roots."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.results import BenchRow


@dataclass(frozen=True)
class RootRow(BenchRow):
    """One solver on one stack. Errors are the worst of the stack, over the matrices the solver did not reject.

    error: ||X - Y||_F / ||Y||_F with Y = (A + r I)^-e in float64.
    angle: between X and Y, in degrees.
    residual: ||X^p A^q - I||_F / sqrt(d) for e = q/p, in float64.
    reported: the solver's own residual.
    ok: share of the stack not rejected.
    definite: share of the stack whose root is positive definite.
    """

    spectrum: str
    condition: float
    size: int
    dtype: str
    exponent: str
    error: float
    angle: float
    residual: float
    reported: float
    ok: float
    definite: float
    iterations: int
    milliseconds: float
