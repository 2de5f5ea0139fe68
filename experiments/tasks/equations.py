"""Partial differential equations in u(x, t) on a rectangle, with conditions on its sides and a known solution."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from eigengraft.component import Component

Grid = NDArray[np.float64]
"""Array of float64 along x, along t, or of shape [t, x]."""


class Partials(NamedTuple):
    """A function u and its partial derivatives at points [N].

    u: values.
    x: u_x, u_xx, ..., up to the requested order.
    t: u_t, u_tt, ..., up to the requested order.
    """

    u: Tensor
    x: tuple[Tensor, ...]
    t: tuple[Tensor, ...]


class Equation(Component, ABC, family="equation"):
    """residual(u, u_x, u_xx, ..., u_t, ..., x, t) = 0 on a rectangle, with conditions on its sides.

    At the start of t, u is `initial`. At both ends of x, u is 0, unless the equation is periodic. For an equation that
    does not evolve, u is 0 on all four sides, and t is a second direction in space.
    """

    x_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    """Ends of the range of x."""
    t_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """Ends of the range of t."""
    orders: ClassVar[tuple[int, int]]
    """Highest derivatives along x and along t in the residual, at most 3 each."""
    periodic: ClassVar[bool] = False
    """True if u and its derivatives are equal at both ends of x."""
    evolves: ClassVar[bool] = True
    """True if u is given at the start of t, False if it is given at both ends of t."""
    at_rest: ClassVar[bool] = False
    """True if u_t = 0 at the start of t is a condition too."""

    @abstractmethod
    def residual(self, partials: Partials, x: Tensor, t: Tensor) -> Tensor:
        """Return the residual at points x and t [N]. It is 0 for a solution."""

    @abstractmethod
    def initial(self, x: Grid) -> Grid:
        """Return u at the start of t, 0 for an equation that does not evolve."""

    @abstractmethod
    def solution(self, x: Grid, t: Grid) -> Grid:
        """Return the solution [t, x] on the grid of increasing x and t. t begins with the start of `t_range`."""


Modes = NDArray[np.complex128]


class _Step(NamedTuple):
    """Coefficients of one step h, all [modes]: e = exp(hL), half = exp(hL/2), and q, f1, f2, f3 as in Cox &
    Matthews.
    """

    e: Modes
    half: Modes
    q: Modes
    f1: Modes
    f2: Modes
    f3: Modes


@dataclass(frozen=True)
class FourierMethod:
    """v' = L v + D F[n(u)],  v = F[u] the Fourier coefficients of u, in steps of ETDRK4.

    Cox & Matthews 2002, J. Comput. Phys. 176, equations (26) to (29). The formulas of the coefficients lose digits if
    h L is near 0. Each coefficient is therefore the mean of its formula over a circle around h L (Kassam & Trefethen
    2005, SIAM J. Sci. Comput. 26).

    x_range: one period.
    linear: L, a number for each wave number k of the modes exp(i k x).
    nonlinear: n, a function that takes the values of u at the points and returns one number for each point.
    outer: D, a number for each wave number.
    points: number of evenly spaced points of the grid; the upper third of the modes of n(u) is dropped.
    step: longest step h; steps are shortened so that they end at the requested times.
    """

    x_range: tuple[float, float]
    linear: Callable[[Grid], NDArray[Any]]
    nonlinear: Callable[[Grid], Grid]
    outer: Callable[[Grid], NDArray[Any]] = np.ones_like
    points: int = 512
    step: float = 1 / 2000

    @property
    def waves(self) -> Grid:
        """Wave numbers of the modes, from 0 up."""
        length = self.x_range[1] - self.x_range[0]
        return np.arange(self.points // 2 + 1, dtype=np.float64) * (2 * math.pi / length)

    def solve(self, initial: Callable[[Grid], Grid], x: Grid, t: Grid) -> Grid:
        """Return u [t, x]. t[0] is the time of `initial`. Values between grid points come from the Fourier series."""
        first, length = self.x_range[0], self.x_range[1] - self.x_range[0]
        v = np.fft.rfft(initial(first + length * np.arange(self.points) / self.points))
        rows = [v]
        for span in np.diff(t):
            count = math.ceil(span / self.step - 1e-9)
            coefficients = self._coefficients(float(span) / count)
            for _ in range(count):
                v = self._stepped(v, coefficients)
            rows.append(v)
        weights = np.full(len(self.waves), 2.0 / self.points)
        weights[[0, -1]] /= 2  # the constant and the highest mode have no partner of the opposite sign
        series = np.exp(1j * np.outer(self.waves, x - first)) * weights[:, None]
        found: Grid = (np.stack(rows) @ series).real
        return found

    def _part(self, v: Modes) -> Modes:
        """Return D F[n(u)], with the upper third of the modes set to zero. The nonlinearity n would otherwise alias
        these modes onto lower ones.
        """
        modes: Modes = self.outer(self.waves) * np.fft.rfft(self.nonlinear(np.fft.irfft(v, self.points)))
        modes[self.points // 3 :] = 0
        return modes

    def _stepped(self, v: Modes, c: _Step) -> Modes:
        n_v = self._part(v)
        a = c.half * v + c.q * n_v
        n_a = self._part(a)
        b = c.half * v + c.q * n_a
        n_b = self._part(b)
        n_c = self._part(c.half * a + c.q * (2 * n_b - n_v))
        return c.e * v + c.f1 * n_v + 2 * c.f2 * (n_a + n_b) + c.f3 * n_c

    def _coefficients(self, h: float) -> _Step:
        linear = h * self.linear(self.waves).astype(np.complex128)
        circle = np.exp(2j * math.pi * (np.arange(32) + 0.5) / 32)
        z = linear[:, None] + circle
        e, z3 = np.exp(z), z**3
        mean = [
            h * part.mean(axis=1)
            for part in (
                (np.exp(z / 2) - 1) / z,
                (-4 - z + e * (4 - 3 * z + z**2)) / z3,
                (2 + z + e * (z - 2)) / z3,
                (-4 - 3 * z - z**2 + e * (4 - z)) / z3,
            )
        ]
        return _Step(np.exp(linear), np.exp(linear / 2), *mean)


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
        """Return the spectral method for this equation: diffusion is exact, the reaction is the nonlinear part."""
        return FourierMethod(
            x_range=self.x_range,
            linear=lambda k: -self.diffusion * k**2,
            nonlinear=lambda u: self.reaction * (u - u**3),
            points=points,
            step=step,
        )


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

        Hopf 1950 and Cole 1951, as Basdevant et al. write it. The trapezoidal rule converges geometrically for an
        analytic integrand. If |z| is larger than `last`, w is below exp(-40) of its maximum.
        """
        last = math.sqrt(1 / (math.pi * self.viscosity) + 40)
        z = np.linspace(-last, last, 2 * math.ceil(last / 0.05) + 1)
        y = x[:, None] - math.sqrt(4 * self.viscosity * t) * z
        exponent = -(z**2) - np.cos(math.pi * y) / (2 * math.pi * self.viscosity)
        w = np.exp(exponent - exponent.max(axis=1, keepdims=True))
        found: Grid = -(np.sin(math.pi * y) * w).sum(axis=1) / w.sum(axis=1)
        return found


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
        """Return the spectral method for this equation: dispersion is exact, -(u^2 / 2)_x is the nonlinear part."""
        return FourierMethod(
            x_range=self.x_range,
            linear=lambda k: 1j * self.dispersion**2 * k**3,
            nonlinear=lambda u: -(u**2) / 2,
            outer=lambda k: 1j * k,
            points=points,
            step=step,
        )


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
