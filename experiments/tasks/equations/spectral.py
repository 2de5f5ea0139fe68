"""Periodic equations u_t = L u + N(u) by Fourier series in x and an exponential Runge-Kutta method in t."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .equation import Grid

Modes = NDArray[np.complex128]


class _Step(NamedTuple):
    """Coefficients of one step, all [modes]: e = exp(hL), half = exp(hL/2), q, f1, f2, f3 as in the paper."""

    e: Modes
    half: Modes
    q: Modes
    f1: Modes
    f2: Modes
    f3: Modes


@dataclass(frozen=True)
class FourierMethod:
    """v' = L v + D F[n(u)],  v = F[u] the Fourier coefficients of u, in steps of ETDRK4.

    Cox & Matthews 2002, J. Comput. Phys. 176, equations (26) to (29); the coefficients by means over a circle around
    h L, as Kassam & Trefethen 2005, SIAM J. Sci. Comput. 26, since their formulas cancel near 0.

    x_range: one period.
    linear: L, a number for each wave number k of the modes exp(i k x).
    nonlinear: n, from u at the points to as many numbers.
    outer: D, a number for each wave number.
    points: of the grid, evenly spaced; the upper third of the modes of n(u) is left out.
    step: longest step h; the times asked for are met exactly.
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
        """u [t, x], where t[0] is the time of `initial`; between the points by the series."""
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
        """D F[n(u)] without the modes that n folds onto others."""
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
