"""A polar solver that no shipped recipe names: Newton-Schulz on the smaller Gram matrix (Gram-NS, Dao AI Lab, 2026)."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import block_norm, identity_like, per_block

from ..algebra.products import add_symmetric, symmetric_product
from ..polar.coefficients import Coefficients, require_used, triples
from ..polar.spectral import PolarSolver


class GramNewtonSchulz(PolarSolver):
    """P = a I + b R + c R^2,  Q <- P Q,  R <- P R P  from  R = X X^T, Q = I;  X <- Q X after every `restart` steps

    X `[m, n]`, m <= n, starts as G / ||G||_F for a block G, transposed if G is tall. Step k uses the k-th triple (a, b,
    c) of `coefficients`; the last triple repeats. In exact arithmetic the result is that of `newton_schulz`, but all
    products between restarts are m x m, which is cheaper for n > m.

    R contains the squares of the singular values of X, in which small singular values lose digits. Each restart
    therefore recomputes R from X.
    """

    kind: Literal["gram_newton_schulz"] = "gram_newton_schulz"
    steps: int = Field(default=5, ge=1, le=50, description="number of polynomial steps")
    coefficients: Coefficients = Field(
        default=((3.4445, -4.7750, 2.0315),), description="triples (a, b, c), one triple, or the name of published ones"
    )
    restart: int = Field(default=2, ge=1, description="steps after which the Gram matrix is recomputed from X")
    eps: float = Field(default=1e-8, gt=0, description="lower bound of the norm that a block is divided by")

    @model_validator(mode="after")
    def _triples_are_used(self) -> Self:
        require_used(self.coefficients, self.steps)
        return self

    def polar(self, x: Tensor) -> Tensor:
        y = x / per_block(block_norm(x).clamp_min(self.eps), x)
        tall = y.shape[1] > y.shape[2]
        y, coefficients = y.mT if tall else y, triples(self.coefficients, self.steps)
        for start in range(0, self.steps, self.restart):
            gram = symmetric_product(y, y)
            q: Tensor | None = None
            last = min(start + self.restart, self.steps) - 1
            for step in range(start, last + 1):
                a, b, c = coefficients[step]
                p = add_symmetric(gram.clone(), gram, gram, b, c) + a * identity_like(gram)
                q = p if q is None else symmetric_product(p, q)
                if step < last:
                    gram = symmetric_product(p, symmetric_product(gram, p))
            assert q is not None
            y = torch.bmm(q, y)
        return y.mT if tall else y
