"""A solver of polar factors of your own: the cubic Newton-Schulz iteration.

In an experiment:

    imports: [polar_solver.py]
    recipe: {update: [{kind: momentum}, {kind: spectral, solver: {kind: cubic, steps: 12}}]}
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.numerics import block_norm, per_block, tiny
from eigengraft.preconditioners import PolarSolver


class Cubic(PolarSolver):
    """X <- (3 X - X X^T X) / 2  from X = G / ||G||_F"""

    kind: Literal["cubic"] = "cubic"
    steps: int = Field(default=12, ge=1, description="steps; each multiplies small singular values by 3/2")

    def polar(self, x: Tensor) -> Tensor:
        y = x / per_block(block_norm(x).clamp_min(tiny(x.dtype)), x)
        for _ in range(self.steps):
            y = 1.5 * y - 0.5 * (y @ y.mT) @ y
        return y

    def operations(self, m: int, n: int) -> float:
        return 4.0 * self.steps * m * m * n


if __name__ == "__main__":
    from eigengraft.testing import check_solver

    print(check_solver(Cubic()))
