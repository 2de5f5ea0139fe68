"""The task of solving a differential equation by a network u(x, t). Batches are points drawn at random."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal, Self, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from .base import Batch, Dataset, Fingerprint, Task, generator
from .equations import Burgers, Equation, Grid, Partials

WEIGHT = 100.0
"""Default weights w_i and w_b of the conditions at the start and at the ends in the loss."""
GRID = (33, 128)
"""Number of points along t and along x on which a network is compared with the solution."""


class DifferentialEquation(Task):
    """mean r^2 + w_i (mean (u - u_0)^2 + mean u_t^2) + w_b mean u^2,  over points inside, at the start and at the ends

    A physics-informed network (Raissi, Perdikaris & Karniadakis 2019, J. Comput. Phys. 378). r is the residual of the
    equation at points inside; w_i is `initial_weight`, w_b `boundary_weight`, u_0 the value at the start. The term with
    u_t exists only if the equation starts at rest. The term with w_b exists only if the equation is not periodic. All
    points are new at every step. The validation loss is the relative error |u - solution| / |solution| (Euclidean
    norms) on a grid of 33 times and 128 points along x.
    """

    kind: Literal["differential_equation"] = "differential_equation"
    equation: Equation = Field(default=Burgers(), description="equation to solve")
    layers: int = Field(default=3, ge=1, le=16, description="hidden layers, with tanh")
    width: int = Field(default=64, ge=1, le=4096, description="units per hidden layer")
    harmonics: int = Field(
        default=1, ge=0, le=64, description="sines and cosines of each coordinate as inputs; 0: the coordinate alone"
    )
    batch_size: int = Field(
        default=128, ge=8, description="points inside per step; each condition on a side has a quarter of this number"
    )
    initial_weight: float | None = Field(default=None, gt=0, description="w_i; none: 100, if the equation evolves")
    boundary_weight: float | None = Field(
        default=None, gt=0, description="w_b; none: 100, if x has ends with a condition"
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
            raise ValueError(f"initial_weight: has no effect on {kind}, which does not evolve; remove it")
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
    """The dataset of points: rows (x, t, a, b, c), for which the network returns `a * residual + b * u_t + c * u`.

    The factors a, b and c contain the weights of the conditions, so that the mean squared error over rows is the loss.
    """

    def __init__(self, task: DifferentialEquation) -> None:
        self.equation, self.size = task.equation, task.batch_size
        self.start, self.ends = task.initial_weight or WEIGHT, task.boundary_weight or WEIGHT
        x, t, u = solution_on_grid(task.equation)
        size = math.sqrt(float(np.mean(u**2)))
        places = np.stack(np.broadcast_arrays(x, t[:, None]), axis=-1).reshape(-1, 2)
        asked = np.zeros((len(places), 3))
        asked[:, 2] = 1 / size  # with this factor the mean square is the squared relative error
        self.validation = _batch(np.concatenate([places, asked], axis=1), u.reshape(-1) / size)
        kind, content = getattr(task.equation, "kind", "?"), u.astype(np.float32).tobytes()
        self.fingerprint = Fingerprint.of(f"the solution of {kind}", content)

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
    """Return x, t and the solution [t, x] on the validation grid. If x is periodic, its last end is left out."""
    x = np.linspace(*equation.x_range, GRID[1], endpoint=not equation.periodic)
    t = np.linspace(*equation.t_range, GRID[0])
    return x, t, equation.solution(x, t)


def _drawn(random: np.random.Generator, count: int, equation: Equation) -> Grid:
    """Return points [count, 2], uniform in x and t."""
    lows, highs = zip(equation.x_range, equation.t_range, strict=True)
    return random.uniform(lows, highs, (count, 2))


def _weighted(groups: list[tuple[Grid, tuple[float, float, float], float, Grid]]) -> tuple[Grid, Grid]:
    """Return rows and targets whose mean squared error is the sum over groups of `weight` times the group's mean
    squared error.

    groups: for each group the points, the factors (a, b, c) of `Points`, the weight, and the target values.
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
        """Number of features."""
        return 2 * len(self.frequencies) + (not self.periodic)

    def forward(self, z: Tensor, order: int) -> list[Tensor]:
        """Return features [N, size] and their derivatives up to `order`."""
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
        # No list of layers, because `fully_shard` gathers the parameters of a layer of a list only when the layer is
        # called, and these layers are never called.
        for index, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            self.add_module(f"hidden{index}", nn.Linear(fan_in, fan_out))
        self.head = nn.Linear(width, 1)
        self.depth = layers
        for layer in (*self.hidden, self.head):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    @property
    def hidden(self) -> list[nn.Linear]:
        """The hidden layers, from the input on."""
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
    """Apply a linear layer to values and, without its bias, to their derivatives."""
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
    """Return the derivatives of f(h) along one axis: f' h', f'' h'^2 + f' h'', f''' h'^3 + 3 f'' h' h'' + f' h'''."""
    found = []
    if h:
        found.append(f[0] * h[0])
    if len(h) > 1:
        found.append(f[1] * h[0] ** 2 + f[0] * h[1])
    if len(h) > 2:
        found.append(f[2] * h[0] ** 3 + 3 * f[1] * h[0] * h[1] + f[0] * h[2])
    return found
