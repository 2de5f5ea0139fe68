"""Spectral descent: the polar factor of the direction (Muon, Jordan et al. 2024; Bernstein & Newhouse 2024)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.numerics import per_block
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage
from ..traits import Traits, matrix_shape
from .solvers import NewtonSchulz, PolarSolver


class Spectral(Stage):
    """polar(d) = U V^T for d = U S V^T: steepest descent in the spectral norm.

    Blocks are seen as matrices, first axis x the rest; a vector is one column, its polar factor d / ||d||. With
    `nuclear_norm` the result is <d, polar(d)> polar(d), where <d, U V^T> = sum(S): the step of steepest descent with
    its length (Bernstein & Newhouse 2024, Proposition 5; PolarGrad, Lau, Long & Su 2025, arXiv:2505.21799).
    """

    kind: Literal["spectral"] = "spectral"
    solver: PolarSolver = Field(default=NewtonSchulz(), description="how the polar factor is computed")
    nuclear_norm: bool = Field(default=False, description="multiply by <d, polar(d)>, in units of the direction")

    def traits(self, block: tuple[int, ...]) -> Traits:
        m, n = matrix_shape(block)
        work = 30.0 * min(m, n) * m * n  # five iterations of three products, each with 2 operations
        return Traits(matrices=True, work=work, spectral_norm=None if self.nuclear_norm else 1.0)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        polar = self.solver.of_blocks(direction)
        if not self.nuclear_norm:
            return polar
        return polar * per_block((direction * polar).flatten(1).sum(1), polar)
