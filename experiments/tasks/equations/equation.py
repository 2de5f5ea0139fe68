"""Partial differential equations in u(x, t) on a rectangle, with conditions on its sides and a known solution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.component import Component

Grid = NDArray[np.float64]
"""Numbers in float64, along x, along t, or [t, x]."""


class Partials(NamedTuple):
    """A function u and its partial derivatives at points [N].

    u: values.
    x: u_x, u_xx, ..., as many as were asked for.
    t: u_t, u_tt, ..., as many as were asked for.
    """

    u: Tensor
    x: tuple[Tensor, ...]
    t: tuple[Tensor, ...]


class Equation(Component, ABC, family="equation"):
    """residual(u, u_x, u_xx, ..., u_t, ..., x, t) = 0 on a rectangle, with conditions on its sides.

    At the start of t u is `initial`, unless the equation does not evolve; at the ends of x it is 0, unless it is
    periodic. An equation that does not evolve is 0 on all four sides, and t is its second direction in space.
    """

    x_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    """Ends of x."""
    t_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """Ends of t."""
    orders: ClassVar[tuple[int, int]]
    """Highest derivatives along x and along t that the residual has, up to 3 each."""
    periodic: ClassVar[bool] = False
    """Whether u and its derivatives are equal at both ends of x."""
    evolves: ClassVar[bool] = True
    """Whether u is given at the start of t alone."""
    at_rest: ClassVar[bool] = False
    """Whether u_t = 0 at the start of t is a condition too."""

    @abstractmethod
    def residual(self, partials: Partials, x: Tensor, t: Tensor) -> Tensor:
        """What is 0 for a solution, at points x and t [N]."""

    @abstractmethod
    def initial(self, x: Grid) -> Grid:
        """u at the start of t; of an equation that does not evolve, 0."""

    @abstractmethod
    def solution(self, x: Grid, t: Grid) -> Grid:
        """u [t, x] on the grid of increasing x and t, where t begins with the start of `t_range`."""
