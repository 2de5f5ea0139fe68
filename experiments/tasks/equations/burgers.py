"""Burgers' equation, which steepens a sine into a shock."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from .equation import Equation, Grid, Partials


class Burgers(Equation):
    """u_t + u u_x = nu u_xx,  u(x, 0) = -sin(pi x),  u(-1, t) = u(1, t) = 0,  t in [0, 1]

    Basdevant et al. 1986, Computers & Fluids 14; as a test of networks: Raissi, Perdikaris & Karniadakis 2019,
    J. Comput. Phys. 378, appendix A.1. At nu = 0.01 / pi a shock of width about nu stands at x = 0 from t = 0.4 on.
    """

    kind: Literal["burgers"] = "burgers"
    viscosity: float = Field(default=0.01 / math.pi, ge=1e-4, le=1, description="nu")
    orders: ClassVar[tuple[int, int]] = (2, 1)

    def residual(self, partials: Partials, x: Tensor, t: Tensor) -> Tensor:
        (u_x, u_xx), (u_t,) = partials.x, partials.t
        return u_t + partials.u * u_x - self.viscosity * u_xx

    def initial(self, x: Grid) -> Grid:
        return -np.sin(math.pi * x)

    def solution(self, x: Grid, t: Grid) -> Grid:
        return np.stack([self.initial(x), *(self._later(x, float(time)) for time in t[1:])])

    def _later(self, x: Grid, t: float) -> Grid:
        """u = - int sin(pi y) w(z) dz / int w(z) dz,  y = x - sqrt(4 nu t) z,  w = exp(-z^2 - cos(pi y) / (2 pi nu))

        Hopf 1950 and Cole 1951, as Basdevant et al. write it. The trapezoidal rule converges
        geometrically for an analytic integrand; beyond `last`, w is below exp(-40) of its maximum.
        """
        last = math.sqrt(1 / (math.pi * self.viscosity) + 40)
        z = np.linspace(-last, last, 2 * math.ceil(last / 0.05) + 1)
        y = x[:, None] - math.sqrt(4 * self.viscosity * t) * z
        exponent = -(z**2) - np.cos(math.pi * y) / (2 * math.pi * self.viscosity)
        w = np.exp(exponent - exponent.max(axis=1, keepdims=True))
        found: Grid = -(np.sin(math.pi * y) * w).sum(axis=1) / w.sum(axis=1)
        return found
