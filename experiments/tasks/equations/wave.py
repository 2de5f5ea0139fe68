"""The wave equation, with two standing waves of different frequencies."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from .equation import Equation, Grid, Partials


class Wave(Equation):
    """u_tt = c^2 u_xx,  u(x, 0) = sin(pi x) + sin(4 pi x) / 2,  u_t(x, 0) = 0,  u(0, t) = u(1, t) = 0,  t in [0, 1]

    The solution is sin(pi x) cos(c pi t) + sin(4 pi x) cos(4 c pi t) / 2. Wang, Yu & Perdikaris 2022, J. Comput.
    Phys. 449, with c = 2.
    """

    kind: Literal["wave"] = "wave"
    speed: float = Field(default=2.0, gt=0, le=100, description="c, lengths of the interval per unit of time")
    x_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    orders: ClassVar[tuple[int, int]] = (2, 2)
    at_rest: ClassVar[bool] = True

    def residual(self, partials: Partials, x: Tensor, t: Tensor) -> Tensor:
        return partials.t[1] - self.speed**2 * partials.x[1]

    def initial(self, x: Grid) -> Grid:
        return np.sin(math.pi * x) + np.sin(4 * math.pi * x) / 2

    def solution(self, x: Grid, t: Grid) -> Grid:
        angle, turn = math.pi * x, math.pi * self.speed * t[:, None]
        found: Grid = np.sin(angle) * np.cos(turn) + np.sin(4 * angle) * np.cos(4 * turn) / 2
        return found
