"""The Allen-Cahn equation, whose phases part and leave sharp interfaces."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from .equation import Equation, Grid, Partials
from .spectral import FourierMethod


class AllenCahn(Equation):
    """u_t = d u_xx + a (u - u^3),  u(x, 0) = x^2 cos(pi x),  periodic in x with period 2,  t in [0, 1]

    Raissi, Perdikaris & Karniadakis 2019, J. Comput. Phys. 378, section 3.2, with d = 1e-4 and a = 5. The solution
    is that of a spectral method (`FourierMethod`) with 1024 points and steps of 1/500.
    """

    kind: Literal["allen_cahn"] = "allen_cahn"
    diffusion: float = Field(default=1e-4, ge=1e-5, le=1, description="d")
    reaction: float = Field(default=5.0, gt=0, le=20, description="a")
    orders: ClassVar[tuple[int, int]] = (2, 1)
    periodic: ClassVar[bool] = True

    def residual(self, partials: Partials, x: Tensor, t: Tensor) -> Tensor:
        u, u_xx, u_t = partials.u, partials.x[1], partials.t[0]
        return u_t - self.diffusion * u_xx - self.reaction * (u - u**3)

    def initial(self, x: Grid) -> Grid:
        return x**2 * np.cos(math.pi * x)

    def solution(self, x: Grid, t: Grid) -> Grid:
        return self.method().solve(self.initial, x, t)

    def method(self, points: int = 1024, step: float = 1 / 500) -> FourierMethod:
        """The spectral method for this equation: diffusion exactly, the reaction as the nonlinear part."""
        return FourierMethod(
            x_range=self.x_range,
            linear=lambda k: -self.diffusion * k**2,
            nonlinear=lambda u: self.reaction * (u - u**3),
            points=points,
            step=step,
        )
