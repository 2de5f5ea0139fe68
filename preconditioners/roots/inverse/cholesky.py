"""The inverse by a Cholesky factorization: the root of exponent 1 at a fraction of an eigendecomposition's cost."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import finite_blocks, identity_like, symmetrized, tiny

from ..base import Root, RootSolver


class CholeskyInverse(RootSolver):
    """(A + r I)^(-1)  with  r = eps + ratio tr(A) / d,  A `[N, d, d]`;  by the Cholesky factors of A + r I

    The damping of Newton-Muon (Du & Su 2026, arXiv:2604.01472: ratio 0.2) and of K-FAC. Takes e = 1 alone. eps is in
    units of A, ratio has none. Fails where A is not finite or A + r I has no factor.
    """

    kind: Literal["cholesky"] = "cholesky"
    eps: float = Field(default=1e-8, ge=0, description="ridge, in units of the matrix")
    ratio: float = Field(default=0.2, ge=0, description="ridge, in units of the mean eigenvalue")

    def check(self, exponent: Fraction) -> str | None:
        return None if exponent == 1 else f"cholesky takes exponents of 1 alone, got {exponent}"

    def root(self, a: Tensor, exponent: Fraction) -> Root:
        known = finite_blocks(a)
        mean = a.diagonal(dim1=-2, dim2=-1).mean(-1)
        ridge = (self.eps + self.ratio * mean).clamp_min(tiny(a.dtype))
        damped = a + ridge[:, None, None] * identity_like(a)
        factor, info = torch.linalg.cholesky_ex(torch.where(known[:, None, None], damped, identity_like(a)))
        ok = known & (info == 0)
        factor = torch.where(ok[:, None, None], factor, identity_like(a))
        root = symmetrized(torch.cholesky_inverse(factor).contiguous())
        ok = ok & finite_blocks(root)
        nothing = torch.zeros_like(ok)
        return Root(root, ok, nothing.int(), nothing.to(a.dtype), ok)

    def regularized(self, values: Tensor) -> Tensor:
        mean = values.mean(-1, keepdim=True) if values.shape[-1] else values
        return (values + self.eps + self.ratio * mean).clamp_min(tiny(values.dtype))
