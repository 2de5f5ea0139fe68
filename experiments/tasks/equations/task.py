"""The task of solving a differential equation, whose batches are points drawn at random."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from ..base import Batch, Dataset, Fingerprint, Task, generator
from .burgers import Burgers
from .equation import Equation, Grid
from .network import EquationNetwork

WEIGHT = 100.0
"""Weight of the conditions on the sides where the task says none."""
GRID = (33, 128)
"""Points along t and x at which a network is compared with the solution."""


class DifferentialEquation(Task):
    """mean r^2 + w_i (mean (u - u_0)^2 + mean u_t^2) + w_b mean u^2,  over points inside, at the start and at the ends

    A physics-informed network (Raissi, Perdikaris & Karniadakis 2019, J. Comput. Phys. 378): r is the residual of the
    equation at points inside; u_t counts only where the equation starts at rest, u at the ends of x only where it is
    not periodic. All points are new at every step. The validation loss is the relative error
    |u - solution| / |solution| (Euclidean norms) on a grid of 33 times and 128 places.
    """

    kind: Literal["differential_equation"] = "differential_equation"
    equation: Equation = Field(default=Burgers(), description="what is solution_on_grid")
    layers: int = Field(default=3, ge=1, le=16, description="hidden layers, with tanh")
    width: int = Field(default=64, ge=1, le=4096, description="units per hidden layer")
    harmonics: int = Field(
        default=1, ge=0, le=64, description="sines and cosines of each coordinate as inputs; 0: the coordinate alone"
    )
    batch_size: int = Field(
        default=128, ge=8, description="points inside per step; a quarter as many for each condition on a side"
    )
    initial_weight: float | None = Field(default=None, gt=0, description="w_i; none: 100, where there is a start")
    boundary_weight: float | None = Field(default=None, gt=0, description="w_b; none: 100, where there are ends")

    @model_validator(mode="after")
    def _suits_the_equation(self) -> Self:
        equation = self.equation
        kind = getattr(equation, "kind", "?")
        if equation.periodic and self.harmonics == 0:
            raise ValueError(f"harmonics: 1 or more is required by {kind}, which is periodic, got 0")
        if equation.periodic and self.boundary_weight is not None:
            raise ValueError(f"boundary_weight: none is required by {kind}, which is periodic and has no ends of x")
        if not equation.evolves and self.initial_weight is not None:
            raise ValueError(f"initial_weight: none is required by {kind}, which has no start")
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
    """Rows (x, t, a, b, c) that ask a residual + b u_t + c u, with weights such that the mean square is the loss."""

    def __init__(self, task: DifferentialEquation) -> None:
        self.equation, self.size = task.equation, task.batch_size
        self.start, self.ends = task.initial_weight or WEIGHT, task.boundary_weight or WEIGHT
        x, t, u = solution_on_grid(task.equation)
        size = math.sqrt(float(np.mean(u**2)))
        places = np.stack(np.broadcast_arrays(x, t[:, None]), axis=-1).reshape(-1, 2)
        asked = np.zeros((len(places), 3))
        asked[:, 2] = 1 / size  # the mean square is then that of the relative error
        self.validation = _batch(np.concatenate([places, asked], axis=1), u.reshape(-1) / size)
        kind, content = getattr(task.equation, "kind", "?"), u.astype(np.float32).tobytes()
        self.fingerprint = Fingerprint(f"the solution of {kind}", len(content), hashlib.sha256(content).hexdigest())

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
    """x, t and the solution [t, x] on the grid that validates; a periodic x leaves out its last end."""
    x = np.linspace(*equation.x_range, GRID[1], endpoint=not equation.periodic)
    t = np.linspace(*equation.t_range, GRID[0])
    return x, t, equation.solution(x, t)


def _drawn(random: np.random.Generator, count: int, equation: Equation) -> Grid:
    """Points [count, 2], uniform in x and t."""
    lows, highs = zip(equation.x_range, equation.t_range, strict=True)
    return random.uniform(lows, highs, (count, 2))


def _weighted(groups: list[tuple[Grid, tuple[float, float, float], float, Grid]]) -> tuple[Grid, Grid]:
    """Rows and targets whose mean square is the sum over groups (points, asked, weight, values) of weighted means."""
    total = sum(len(points) for points, *_ in groups)
    rows, targets = [], []
    for points, asked, weight, values in groups:
        scale = math.sqrt(weight * total / len(points))
        rows.append(np.concatenate([points, np.tile(np.multiply(asked, scale), (len(points), 1))], axis=1))
        targets.append(scale * values)
    return np.concatenate(rows), np.concatenate(targets)


def _batch(rows: Grid, targets: Grid) -> Batch:
    return Batch(torch.from_numpy(rows).float(), torch.from_numpy(targets).float())
