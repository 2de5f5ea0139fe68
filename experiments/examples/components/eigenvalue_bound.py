"""A bound of your own on the largest eigenvalue: the trace of A^4 to the power 1/4.

In an experiment:

    imports: [eigenvalue_bound.py]
    recipe: {update: [{kind: shampoo, solver: {kind: coupled_newton, scaling: fourth_trace}}]}
"""

from typing import Literal

import torch
from torch import Tensor

from eigengraft.preconditioners import EigenvalueBound


class FourthTrace(EigenvalueBound):
    """tr(A^4)^(1/4) = ||A^2||_F^(1/2),  at most d^(1/4) times the largest eigenvalue"""

    kind: Literal["fourth_trace"] = "fourth_trace"

    def of_scaled(self, a: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.matrix_norm(a @ a)
        return norm.sqrt()


if __name__ == "__main__":
    from eigengraft.testing import check_eigenvalue_bound

    print(check_eigenvalue_bound(FourthTrace()))
