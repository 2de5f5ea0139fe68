"""A root solver of your own: an eigendecomposition whose small eigenvalues are raised to a floor.

In an experiment:

    imports: [root_solver.py]
    recipe: {update: [{kind: shampoo, solver: {kind: floored_eigh, floor: 1.0e-6}}]}
"""

from fractions import Fraction
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import finite_blocks, identity_like, symmetrized, tiny
from eigengraft.preconditioners import Root, RootSolver


class FlooredEigh(RootSolver):
    """Q max(L, floor max(L))^(-e) Q^T  for A = Q L Q^T"""

    kind: Literal["floored_eigh"] = "floored_eigh"
    floor: float = Field(default=1e-6, gt=0, lt=1, description="least eigenvalue, in units of the largest")

    def root(self, a: Tensor, exponent: Fraction) -> Root:
        ok = finite_blocks(a)  # LAPACK raises for nan, and a solver must not
        values, q = torch.linalg.eigh(torch.where(ok[:, None, None], a, identity_like(a)))
        powers = self.regularized(values).pow(-float(exponent))  # [N, d]
        return Root(symmetrized((q * powers.unsqueeze(1)) @ q.mT), ok)

    def regularized(self, values: Tensor) -> Tensor:
        return torch.maximum(values, self.floor * values.amax(1, keepdim=True)).clamp_min(tiny(values.dtype))


if __name__ == "__main__":
    from eigengraft.testing import check_solver

    print(check_solver(FlooredEigh(), degree=-1, rotates=True))
