"""Spectral descent: the polar factor of the direction (Muon, Jordan et al. 2024; Bernstein & Newhouse 2024)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage
from .solvers import NewtonSchulz, PolarSolver


class Spectral(Stage):
    """polar(d) = U V^T for d = U S V^T: steepest descent in the spectral norm.

    Blocks are seen as matrices, first axis x the rest; a vector is one column, its polar factor d / ||d||.
    """

    kind: Literal["spectral"] = "spectral"
    solver: PolarSolver = Field(default=NewtonSchulz(), description="how the polar factor is computed")

    def work(self, block: tuple[int, ...]) -> float:
        rows = block[0] if block else 1
        columns = math.prod(block[1:])
        return 30.0 * min(rows, columns) * rows * columns  # five iterations of three products, each with 2 operations

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return self.solver.of_blocks(direction)
