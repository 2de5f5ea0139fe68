"""The Korteweg-de Vries equation, in which a cosine breaks up into solitons."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from .equation import Equation, Grid, Partials
from .spectral import FourierMethod


class KortewegDeVries(Equation):
    """u_t + u u_x + mu^2 u_xxx = 0,  u(x, 0) = cos(pi x),  periodic in x with period 2,  t in [0, 1]

    Zabusky & Kruskal 1965, Phys. Rev. Lett. 15, equation (1), with mu = 0.022. The solution is that of a spectral
    method (`FourierMethod`) with 512 points and steps of 1/2000.
    """

    kind: Literal["korteweg_de_vries"] = "korteweg_de_vries"
    dispersion: float = Field(default=0.022, ge=0.01, le=1, description="mu")
    orders: ClassVar[tuple[int, int]] = (3, 1)
    periodic: ClassVar[bool] = True

    def residual(self, partials: Partials, x: Tensor, t: Tensor) -> Tensor:
        u, u_x, u_xxx, u_t = partials.u, partials.x[0], partials.x[2], partials.t[0]
        return u_t + u * u_x + self.dispersion**2 * u_xxx

    def initial(self, x: Grid) -> Grid:
        return np.cos(math.pi * x)

    def solution(self, x: Grid, t: Grid) -> Grid:
        return self.method().solve(self.initial, x, t)

    def method(self, points: int = 512, step: float = 1 / 2000) -> FourierMethod:
        """The spectral method for this equation: dispersion exactly, -(u^2 / 2)_x as the nonlinear part."""
        return FourierMethod(
            x_range=self.x_range,
            linear=lambda k: 1j * self.dispersion**2 * k**3,
            nonlinear=lambda u: -(u**2) / 2,
            outer=lambda k: 1j * k,
            points=points,
            step=step,
        )
