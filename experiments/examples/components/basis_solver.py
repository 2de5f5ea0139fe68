"""A basis solver of your own: one or more steps of orthogonal iteration from the previous basis.

In an experiment:

    imports: [basis_solver.py]
    recipe: {base: soap, set: {update.eigenbasis.solver: {kind: orthogonal_iteration}}}
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.preconditioners import Basis, BasisSolver


class OrthogonalIteration(BasisSolver):
    """Q <- qr(A Q),  `steps` times"""

    kind: Literal["orthogonal_iteration"] = "orthogonal_iteration"
    steps: int = Field(default=1, ge=1, description="products with A in a refresh")

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        for _ in range(self.steps):
            q = torch.linalg.qr(a @ q).Q
        return Basis(q)


if __name__ == "__main__":
    from eigengraft.testing import check_solver

    print(check_solver(OrthogonalIteration()))
