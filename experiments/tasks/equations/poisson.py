"""Poisson's equation on a square, the simplest of the equations and quickly solved."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from .equation import Equation, Grid, Partials


class Poisson(Equation):
    """u_xx + u_tt = -(1 + m^2) pi^2 sin(pi x) sin(m pi t),  u = 0 on the sides of [0, 1] x [0, 1]

    The solution is sin(pi x) sin(m pi t); t is a second direction in space.
    """

    kind: Literal["poisson"] = "poisson"
    waves: int = Field(default=2, ge=1, le=32, description="m, half waves along t")
    x_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    orders: ClassVar[tuple[int, int]] = (2, 2)
    evolves: ClassVar[bool] = False

    def residual(self, partials: Partials, x: Tensor, t: Tensor) -> Tensor:
        source = (1 + self.waves**2) * math.pi**2 * torch.sin(math.pi * x) * torch.sin(self.waves * math.pi * t)
        return partials.x[1] + partials.t[1] + source

    def initial(self, x: Grid) -> Grid:
        return np.zeros_like(x)

    def solution(self, x: Grid, t: Grid) -> Grid:
        found: Grid = np.sin(math.pi * x) * np.sin(self.waves * math.pi * t[:, None])
        return found
