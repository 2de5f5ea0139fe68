"""A network u(x, t) that knows its partial derivatives, and answers one linear condition a row."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .equation import Equation, Partials


class Axis(nn.Module):
    """Features of one coordinate z [N]: the coordinate scaled to [-1, 1], and sines and cosines of it.

    Frequencies are 1 to `harmonics` times that of one period: the range itself, for a periodic coordinate, which then
    has sines and cosines alone (Dong & Ni 2021, J. Comput. Phys. 435), else twice the range.
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
        """Features [N, size] and their derivatives up to `order`."""
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

    Derivatives along x and along t are carried forward with the values, as one Taylor series an axis; one backward
    pass through them gives the gradient.
    """

    def __init__(self, equation: Equation, layers: int, width: int, harmonics: int) -> None:
        super().__init__()
        self.equation = equation
        self.x_axis = Axis(equation.x_range, harmonics, equation.periodic)
        self.t_axis = Axis(equation.t_range, harmonics, False)
        sizes = [self.x_axis.size + self.t_axis.size] + [width] * layers
        # No list of modules, whose layers `fully_shard` would gather one by one: weights are used beside their calls.
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
        """a residual + b u_t + c u [N] of rows (x, t, a, b, c) [N, 5]."""
        x, t, a, b, c = rows.unbind(1)
        if not (rows[:, 2:4] != 0).any():
            return c * self.partials(x, t, (0, 0)).u
        partials = self.partials(x, t, self.equation.orders)
        return a * self.equation.residual(partials, x, t) + b * partials.t[0] + c * partials.u

    def partials(self, x: Tensor, t: Tensor, orders: tuple[int, int]) -> Partials:
        """u and its derivatives along x and along t up to `orders`, at most 3, at points x and t [N]."""
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
    """A linear layer of values and of their derivatives, which have no bias."""
    if not series:
        return layer(value), []
    return layer(value), list(functional.linear(torch.stack(series), layer.weight).unbind(0))


def _tanh(h: Tensor, order: int) -> tuple[Tensor, list[Tensor]]:
    """y = tanh(h) and its derivatives by h up to `order`: 1 - y^2, -2 y y', (6 y^2 - 2) y'."""
    y = torch.tanh(h)
    first = 1 - y * y
    slopes = [first]
    if order > 1:
        slopes.append(-2 * y * first)
    if order > 2:
        slopes.append((6 * y * y - 2) * first)
    return y, slopes


def _chained(f: list[Tensor], h: list[Tensor]) -> list[Tensor]:
    """Derivatives of f(h) along one axis: f' h', f'' h'^2 + f' h'', f''' h'^3 + 3 f'' h' h'' + f' h'''."""
    found = []
    if h:
        found.append(f[0] * h[0])
    if len(h) > 1:
        found.append(f[1] * h[0] ** 2 + f[0] * h[1])
    if len(h) > 2:
        found.append(f[2] * h[0] ** 3 + 3 * f[1] * h[0] * h[1] + f[0] * h[2])
    return found
