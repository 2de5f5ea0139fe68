"""Partial differential equations in u(x, t), with known solutions, and the task of solving them by a network.

The equations hold on a rectangle, with conditions on its sides. Batches of the task are points drawn at random.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from eigengraft.component import Component

from .base import Batch, Dataset, Fingerprint, Task, generator

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
        """Return the residual [N] of a function u at points x and t [N]. It is 0 for a solution.

        partials: u and its partial derivatives at these points, along each axis up to `orders`.
        """

    @abstractmethod
    def initial(self, x: Grid) -> Grid:
        """Return u at the start of t, 0 for an equation that does not evolve."""

    @abstractmethod
    def solution(self, x: Grid, t: Grid) -> Grid:
        """Return the solution [t, x] on the grid of increasing x and t. t begins with the start of `t_range`."""


Modes = NDArray[np.complex128]


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
        """Wave numbers 2 pi k / L of the modes k = 0, 1, ..., points / 2, for a range of length L. Shape
        `[points / 2 + 1]`.
        """
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
        """Return the nonlinear term D F[n(u)] of the equation (see `FourierMethod`).

        The upper third of the modes is set to zero, because the nonlinearity n would alias them onto lower modes.

        v: Fourier coefficients of u.
        """
        modes: Modes = self.outer(self.waves) * np.fft.rfft(self.nonlinear(np.fft.irfft(v, self.points)))
        modes[self.points // 3 :] = 0
        return modes

    def _stepped(self, v: Modes, coefficients: tuple[Modes, ...]) -> Modes:
        e, half, q, f1, f2, f3 = coefficients
        n_v = self._part(v)
        a = half * v + q * n_v
        n_a = self._part(a)
        b = half * v + q * n_a
        n_b = self._part(b)
        n_c = self._part(half * a + q * (2 * n_b - n_v))
        return e * v + f1 * n_v + 2 * f2 * (n_a + n_b) + f3 * n_c

    def _coefficients(self, h: float) -> tuple[Modes, ...]:
        """Return the coefficients of a step h, each an array [modes]: exp(hL), exp(hL/2), q, f1, f2 and f3.

        The last four are the factors of the nonlinear terms in equations (26) to (29) of Cox & Matthews.
        """
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
        return np.exp(linear), np.exp(linear / 2), *mean


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

        Return the solution u at the points x and the time t > 0, in the shape of x. The formula is that of Hopf 1950
        and Cole 1951, as Basdevant et al. write it. Both integrals are sums over equidistant z up to a largest |z|.
        Beyond it, w is below exp(-40) of its maximum. This rule converges geometrically for an analytic integrand.
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


WEIGHT = 100.0
"""Default weights w_i and w_b of the conditions at the start and at the ends in the loss."""
GRID = (33, 128)
"""Number of points along t and along x on which a network is compared with the solution."""
DECIMALS = 4
"""Decimals of the solution that its fingerprint contains. A solution of size 1 differs by less than 1e-8 between
processors. Solutions of different equations or parameters differ by far more than 1e-4."""


class DifferentialEquation(Task):
    """mean r^2 + w_i (mean (u - u_0)^2 + mean u_t^2) + w_b mean u^2,  over points inside, at the start and at the ends

    A physics-informed network (Raissi, Perdikaris & Karniadakis 2019, J. Comput. Phys. 378). r is the residual of the
    equation at points inside; w_i is `initial_weight`, w_b `boundary_weight`, u_0 the value at the start. The term with
    w_i exists only if the equation evolves in t, and its part with u_t only if the equation starts at rest. The term
    with w_b exists only if the equation is not periodic. All points are new at every step. The validation loss is the
    relative error |u - solution| / |solution| (Euclidean norms) on a grid of 33 times and 128 points along x.
    """

    kind: Literal["differential_equation"] = "differential_equation"
    equation: Equation = Field(default=Burgers(), description="equation to solve")
    layers: int = Field(default=3, ge=1, le=16, description="hidden layers, with tanh")
    width: int = Field(default=64, ge=1, le=4096, description="units per hidden layer")
    harmonics: int = Field(
        default=1,
        ge=0,
        le=64,
        description="number of frequencies for which the sine and cosine of each coordinate are inputs; 0: only the "
        "coordinate itself is an input",
    )
    batch_size: int = Field(
        default=128,
        ge=8,
        description="points inside per step; each condition at the start or at the ends has a quarter of this number",
    )
    initial_weight: float | None = Field(
        default=None,
        gt=0,
        description="weight w_i of the conditions at the start; none: 100, if the equation evolves in t, else no such "
        "condition",
    )
    boundary_weight: float | None = Field(
        default=None,
        gt=0,
        description="weight w_b of the conditions at the ends; none: 100, unless the equation is periodic and has no "
        "such condition",
    )

    @model_validator(mode="after")
    def _suits_the_equation(self) -> Self:
        equation = self.equation
        kind = getattr(equation, "kind", "?")
        if equation.periodic and self.harmonics == 0:
            raise ValueError(f"harmonics: must be at least 1 for {kind}, which is periodic, got 0")
        if equation.periodic and self.boundary_weight is not None:
            raise ValueError(f"boundary_weight: has no effect on {kind}, which is periodic; remove it")
        if not equation.evolves and self.initial_weight is not None:
            raise ValueError(f"initial_weight: has no effect on {kind}, which does not depend on time; remove it")
        return self

    def load(self) -> Dataset:
        return Points(self)

    def build(self) -> nn.Module:
        return EquationNetwork(self.equation, self.layers, self.width, self.harmonics)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)

    def reported(self, mean: float) -> float:
        return math.sqrt(mean)


class Points(Dataset):
    """The dataset of points (x, t), as rows (x, t, a, b, c) with targets y.

    For a row, the network returns `a * residual + b * u_t + c * u`. Only one of the factors a, b and c is not 0. It
    selects a term of the loss (see `DifferentialEquation`): the residual at a point inside the rectangle, u_t at a
    point at the start, or u at a point on a side. The factor and y contain the weight of the term, so that the mean
    squared error over rows is the loss. In validation, y is the solution, and u and y are divided by the root mean
    square of the solution.
    """

    def __init__(self, task: DifferentialEquation) -> None:
        self.equation, self.size = task.equation, task.batch_size
        self.start, self.ends = task.initial_weight or WEIGHT, task.boundary_weight or WEIGHT
        x, t, u = solution_on_grid(task.equation)
        size = math.sqrt(float(np.mean(u**2)))
        places = np.stack(np.broadcast_arrays(x, t[:, None]), axis=-1).reshape(-1, 2)
        asked = np.zeros((len(places), 3))
        asked[:, 2] = 1 / size  # c = 1 / size: the mean squared error is the squared relative error
        self.validation = _batch(np.concatenate([places, asked], axis=1), u.reshape(-1) / size)
        # In the last bits, sine and exponential differ between processors. 0.0 turns -0.0 into 0.0.
        kind, rounded = getattr(task.equation, "kind", "?"), u.round(DECIMALS) + 0.0
        self.fingerprint = Fingerprint.of(f"the solution of {kind}", rounded.tobytes())

    def batch(self, seed: int, step: int) -> Batch:
        equation, random = self.equation, generator(seed, step)
        few = self.size // 4
        inside = _drawn(random, self.size, equation)
        groups = [(inside, (1.0, 0.0, 0.0), 1.0, np.zeros(self.size))]
        if equation.evolves:
            at_start = _drawn(random, few, equation)
            at_start[:, 1] = equation.t_range[0]
            groups.append((at_start, (0.0, 0.0, 1.0), self.start, equation.initial(at_start[:, 0])))
            if equation.at_rest:
                groups.append((at_start, (0.0, 1.0, 0.0), self.start, np.zeros(few)))
        if not equation.periodic:
            for axis in (0,) if equation.evolves else (0, 1):
                at_ends = _drawn(random, few, equation)
                at_ends[:, axis] = random.choice((equation.x_range, equation.t_range)[axis], few)
                groups.append((at_ends, (0.0, 0.0, 1.0), self.ends, np.zeros(few)))
        return _batch(*_weighted(groups))

    def evaluation(self) -> Iterator[Batch]:
        yield self.validation


@lru_cache(maxsize=8)
def solution_on_grid(equation: Equation) -> tuple[Grid, Grid, Grid]:
    """Return x, t and the solution [t, x] on the validation grid.

    If the equation is periodic, the upper end of x is left out, because u is the same there as at the lower end.
    """
    x = np.linspace(*equation.x_range, GRID[1], endpoint=not equation.periodic)
    t = np.linspace(*equation.t_range, GRID[0])
    return x, t, equation.solution(x, t)


def _drawn(random: np.random.Generator, count: int, equation: Equation) -> Grid:
    """Return points [count, 2], uniform in x and t."""
    lows, highs = zip(equation.x_range, equation.t_range, strict=True)
    return random.uniform(lows, highs, (count, 2))


def _weighted(groups: list[tuple[Grid, tuple[float, float, float], float, Grid]]) -> tuple[Grid, Grid]:
    """Return the rows (x, t, a, b, c) of all groups of points, and their targets. Factors and targets are scaled so
    that the mean squared error over all rows is the sum of the groups' mean squared errors, each times its weight.

    groups: for each group its points (x, t), its factors (a, b, c), its weight, and its targets.
    """
    total = sum(len(points) for points, *_ in groups)
    rows, targets = [], []
    for points, asked, weight, values in groups:
        scale = math.sqrt(weight * total / len(points))
        rows.append(np.concatenate([points, np.tile(np.multiply(asked, scale), (len(points), 1))], axis=1))
        targets.append(scale * values)
    return np.concatenate(rows), np.concatenate(targets)


def _batch(rows: Grid, targets: Grid) -> Batch:
    return Batch(torch.from_numpy(rows).float(), torch.from_numpy(targets).float())


class Axis(nn.Module):
    """Features of one coordinate z [N]: z scaled to [-1, 1], and sines and cosines of z.

    The frequencies are 1 to `harmonics` times the base frequency, whose period is twice the range of z. For a
    periodic coordinate the period is the range, and there are only sines and cosines (Dong & Ni 2021, J. Comput. Phys.
    435).
    """

    def __init__(self, ends: tuple[float, float], harmonics: int, periodic: bool) -> None:
        super().__init__()
        self.middle, self.radius, self.periodic = sum(ends) / 2, (ends[1] - ends[0]) / 2, periodic
        base = math.pi / self.radius if periodic else math.pi / (2 * self.radius)
        self.frequencies = [base * (1 + index) for index in range(harmonics)]

    @property
    def size(self) -> int:
        """Number of features of a coordinate: sines, cosines and, unless it is periodic, the scaled coordinate."""
        return 2 * len(self.frequencies) + (not self.periodic)

    def forward(self, z: Tensor, order: int) -> list[Tensor]:
        """Return the features [N, size] of coordinates z [N], then their first to `order`-th derivatives by z."""
        shifted = (z - self.middle)[:, None]
        w = shifted.new_tensor(self.frequencies)
        found = []
        for k in range(order + 1):
            angle = w * shifted + k * math.pi / 2  # the derivative of sin(w z) is w sin(w z + pi / 2)
            parts = [w**k * torch.sin(angle), w**k * torch.cos(angle)]
            if not self.periodic:
                parts.append(shifted / self.radius if k == 0 else torch.full_like(shifted, (k == 1) / self.radius))
            found.append(torch.cat(parts, dim=1))
        return found


class EquationNetwork(nn.Module):
    """u(x, t) = W_L tanh(... tanh(W_1 features(x, t) + b_1) ...) + b_L,  W_l by Glorot & Bengio 2010, b_l = 0

    Derivatives along x and along t are computed forward together with the values, as a Taylor series for each axis. One
    backward pass through them gives the gradient.
    """

    def __init__(self, equation: Equation, layers: int, width: int, harmonics: int) -> None:
        super().__init__()
        self.equation = equation
        self.x_axis = Axis(equation.x_range, harmonics, equation.periodic)
        self.t_axis = Axis(equation.t_range, harmonics, False)
        sizes = [self.x_axis.size + self.t_axis.size] + [width] * layers
        # The layers are not in a ModuleList. `fully_shard` would gather the parameters of a layer in such a list only
        # while the layer is called, but `_through` also reads weights outside of calls.
        for index, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            self.add_module(f"hidden{index}", nn.Linear(fan_in, fan_out))
        self.head = nn.Linear(width, 1)
        self.depth = layers
        for layer in (*self.hidden, self.head):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    @property
    def hidden(self) -> list[nn.Linear]:
        """The hidden layers, in order from the input."""
        return [cast(nn.Linear, self.get_submodule(f"hidden{index}")) for index in range(self.depth)]

    def forward(self, rows: Tensor) -> Tensor:
        """Return `a * residual + b * u_t + c * u`, [N], for rows (x, t, a, b, c), [N, 5]."""
        x, t, a, b, c = rows.unbind(1)
        if not (rows[:, 2:4] != 0).any():
            return c * self.partials(x, t, (0, 0)).u
        partials = self.partials(x, t, self.equation.orders)
        return a * self.equation.residual(partials, x, t) + b * partials.t[0] + c * partials.u

    def partials(self, x: Tensor, t: Tensor, orders: tuple[int, int]) -> Partials:
        """Return u and its derivatives along x and along t up to `orders`, at most 3, at points x and t [N]."""
        (of_x, *by_x), (of_t, *by_t) = self.x_axis(x, orders[0]), self.t_axis(t, orders[1])
        value, along = torch.cat([of_x, of_t], dim=1), orders[0]
        series = [functional.pad(d, (0, self.t_axis.size)) for d in by_x]
        series += [functional.pad(d, (self.x_axis.size, 0)) for d in by_t]
        for layer in self.hidden:
            value, series = _through(layer, value, series)
            value, slopes = _tanh(value, max(orders))
            series = [*_chained(slopes, series[:along]), *_chained(slopes, series[along:])]
        value, series = _through(self.head, value, series)
        flat = [d.squeeze(1) for d in series]
        return Partials(value.squeeze(1), tuple(flat[:along]), tuple(flat[along:]))


def _through(layer: nn.Linear, value: Tensor, series: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Apply a linear layer to values [N, inputs] and, without its bias, to each of their derivatives."""
    if not series:
        return layer(value), []
    return layer(value), list(functional.linear(torch.stack(series), layer.weight).unbind(0))


def _tanh(h: Tensor, order: int) -> tuple[Tensor, list[Tensor]]:
    """Return y = tanh(h) and its derivatives by h up to `order`: 1 - y^2, -2 y y', (6 y^2 - 2) y'."""
    y = torch.tanh(h)
    first = 1 - y * y
    slopes = [first]
    if order > 1:
        slopes.append(-2 * y * first)
    if order > 2:
        slopes.append((6 * y * y - 2) * first)
    return y, slopes


def _chained(f: list[Tensor], h: list[Tensor]) -> list[Tensor]:
    """Return the derivatives of f(h) along one axis: f' h', f'' h'^2 + f' h'', f''' h'^3 + 3 f'' h' h'' + f' h'''.

    f: derivatives f', f'', ... of f by h.
    h: derivatives h', h'', ... of h along the axis. The result has as many derivatives as h.
    """
    found = []
    if h:
        found.append(f[0] * h[0])
    if len(h) > 1:
        found.append(f[1] * h[0] ** 2 + f[0] * h[1])
    if len(h) > 2:
        found.append(f[2] * h[0] ** 3 + 3 * f[1] * h[0] * h[1] + f[0] * h[2])
    return found
