"""Step sizes that are rules of the shape of a block."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage
from ..traits import Traits, matrix_shape


class Scale(Stage):
    """factor * rule(m, n) * d, for blocks seen as m x n matrices (first axis x the rest; a vector is m x 1).

    constant:      1
    match_rms:     sqrt(max(m, n)), with factor 0.2 the update RMS of Adam (Liu et al. 2025, Moonlight)
    aspect:        sqrt(max(1, m / n)) (Jordan et al. 2024, Muon)
    spectral:      sqrt(m / n) (Yang et al. 2023)
    inverse_mean:  2 / (m + n) (Frans et al. 2025, SPlus)
    dimensions:    sqrt(m / n) / (sqrt(m) + sqrt(n)) (OKLS)
    fan_in:        1 / n (Pethick et al. 2025, Scion, for signs)
    kernel:        sqrt(m / c) / p for blocks m x c x kernel, p the number of positions of the kernel: a convolution is
                   a sum of p matrices m x c (Bernstein & Newhouse 2024, Modular Duality; Pethick et al. 2025, Scion).
                   sqrt(m / n) for matrices. Blocking must not merge axes, which would hide p.

    Factors that depend on the norm of d are the stage `normalize`.
    """

    kind: Literal["scale"] = "scale"
    rule: Literal["constant", "match_rms", "aspect", "spectral", "inverse_mean", "dimensions", "fan_in", "kernel"] = (
        Field(default="constant", description="how the factor depends on the shape")
    )
    factor: float | None = Field(
        default=None, gt=0, description="multiplies the rule; default 0.2 for match_rms, 1 for the others"
    )

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction * (self._factor * self._rule(direction.shape[1:]))

    def traits(self, block: tuple[int, ...]) -> Traits:
        if self.rule == "kernel":  # the shape as a matrix does not tell how many positions a kernel has
            return Traits()
        return Traits(spectral_gain=self._factor * self._rule(matrix_shape(block)))

    @property
    def _factor(self) -> float:
        return self.factor if self.factor is not None else (0.2 if self.rule == "match_rms" else 1.0)

    def _rule(self, block: tuple[int, ...]) -> float:
        m, n = matrix_shape(block)
        positions = math.prod(block[2:])
        if self.rule == "match_rms":
            return math.sqrt(max(m, n))
        if self.rule == "aspect":
            return math.sqrt(max(1.0, m / n))
        rules = {
            "spectral": math.sqrt(m / n),
            "inverse_mean": 2 / (m + n),
            "dimensions": math.sqrt(m / n) / (math.sqrt(m) + math.sqrt(n)),
            "fan_in": 1 / n,
            "kernel": math.sqrt(m / (n * positions)),  # n = c p
        }
        return rules.get(self.rule, 1.0)
