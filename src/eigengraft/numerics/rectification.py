"""Columns that are nearly orthonormal, brought back to orthonormal ones by products alone.

Legend: N blocks of a stack; V `[N, d, r]`, r <= d; E = V^T V - I.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .guards import may_branch_on_values, per_block, tiny

_SAFE = 2.9
"""Bounds of |V|_2^2 below this are below 3 in any rounding."""


def rectified(v: Tensor, steps: int, safe: bool = False) -> Tensor:
    """V <- 3/2 V - 1/2 V V^T V, `steps` times: towards the orthonormal V (V^T V)^(-1/2) (Bjorck & Bowie 1971, order 2).

    v `[N, d, r]`, r <= d. Singular values in (0, sqrt 3) converge to 1; after one step none is above 1. Unless V is
    known to be safe, it is scaled down first where they might reach sqrt 3: |V|_2^2 <= 1 + |E^4|_F^(1/4).
    """
    if steps == 0:
        return v
    v, gram = (v, torch.bmm(v.mT, v)) if safe else _made_safe(v)[:2]
    for step in range(steps):
        if step:
            gram = torch.bmm(v.mT, v)
        v = torch.baddbmm(v, v, gram, beta=1.5, alpha=-0.5)
    return v


def safe_factor(v: Tensor) -> Tensor:
    """c `[N]`, at most 1, so that singular values of c V are below sqrt 3; 1 where the bound says that they are."""
    return _made_safe(v)[2]


def _made_safe(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(c V, c^2 V^T V, c).

    The bounds 1 + |E|_F, 1 + |E^2|_F^(1/2) and 1 + |E^4|_F^(1/4) of |V|_2^2 grow with r^(1/2), r^(1/4) and r^(1/8) for
    errors of one size: with columns of 3 bits the second one reaches 3 at r = 1024, where |V|_2^2 is 1.7. A CPU stops
    at the first that is small enough.
    """
    peak = v.abs().amax((-2, -1)).clamp_min(1.0)  # no entry of an orthonormal matrix is larger
    v = v / per_block(peak, v)
    gram = torch.bmm(v.mT, v)
    off = gram.clone()
    off.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    size = torch.linalg.matrix_norm(off)
    bound, branches = 1 + size, may_branch_on_values(v)
    if branches and bool((bound < _SAFE).all()):
        return v, gram, 1 / peak
    power = off / per_block(size.clamp_min(tiny(v.dtype)), off)  # powers of E itself would overflow
    for order in (2, 4):
        power = torch.bmm(power, power)
        bound = 1 + size * torch.linalg.matrix_norm(power) ** (1 / order)
        if branches and bool((bound < _SAFE).all()):
            return v, gram, 1 / peak
    # From the bound on down to 2, not to 1: the bound is loose, and values near 1 should stay near 1.
    scale = torch.where(bound < _SAFE, torch.ones_like(bound), 2 / bound)
    return v * per_block(scale.sqrt(), v), gram * per_block(scale, gram), scale.sqrt() / peak
