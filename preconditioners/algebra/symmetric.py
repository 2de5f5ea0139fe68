"""Products of which symmetry is known: on a CPU half of their entries are computed, the others mirrored.

Legend: N blocks; T `[N, d, d]`; Y, Z `[N, d, rest]` with Y Z^T = Z Y^T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eigengraft.numerics import may_branch_on_values, multiplied_in_float32


def symmetric_product(y: Tensor, z: Tensor) -> Tensor:
    """Y Z^T `[N, d, d]`."""
    if multiplied_in_float32(y):
        return symmetric_product(y.float(), z.float()).to(y.dtype)
    if not _halved(y):
        return torch.bmm(y, z.mT)
    return add_symmetric(y.new_empty(*y.shape[:2], y.shape[1]), y, z, beta=0)


def add_symmetric(total: Tensor, y: Tensor, z: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """In place: T <- beta T + alpha Y Z^T, for a symmetric T; what T holds is not read if beta is 0.

    Panels of c = 128 columns, each from the diagonal down, take (1 + c / d) / 2 of the operations. Every matrix is
    multiplied by itself, so that no result depends on the others of a stack.
    """
    if multiplied_in_float32(total):
        return total.copy_(add_symmetric(total.float(), y.float(), z.float(), beta, alpha))
    if y.shape[2] == 1:  # such a sum takes another kernel on a CPU in a stack of one; the product alone does not
        outer = torch.bmm(y, z.mT)
        return torch.mul(outer, alpha, out=total) if beta == 0 else total.mul_(beta).add_(outer, alpha=alpha)
    if not _halved(y):
        return total.baddbmm_(y, z.mT, beta=beta, alpha=alpha)
    for target, left, right in zip(total.unbind(0), y.unbind(0), z.unbind(0), strict=True):
        for start in range(0, len(target), _PANEL):
            panel = slice(start, start + _PANEL)
            target[start:, panel].addmm_(left[start:], right[panel].mT, beta=beta, alpha=alpha)
            if start:
                target[:start, panel] = _spread(target[panel, :start]).mT
    return total


def _spread(rows: Tensor) -> Tensor:
    """A copy of rows `[c, k]` that lie in different sets of a cache, so that columns of it are read faster."""
    copied = rows.new_empty(rows.shape[0], rows.shape[1] + 16)[:, : rows.shape[1]]
    return copied.copy_(rows)


def _halved(y: Tensor) -> bool:
    """Whether panels are faster: not in bfloat16 below 768 rows, where torch multiplies a whole stack at once."""
    return may_branch_on_values(y) and y.shape[1] >= (6 if y.dtype.itemsize < 4 else 2) * _PANEL


_PANEL = 128
"""Columns of a panel: with 64 and 256 some sides of 256 to 1024 took longer, and none much less time (measured)."""
