"""One step of iterative proportional fitting: nonnegative numbers scaled, axis by axis, to sums that are known.

Legend: v the numbers `[N, *block]`; s_i `[N, d_i]` sums of v over all axes but i; d_i `[N, d_i]` what these sums should
be; w_j `[N, d_j]` weights of axis j in the sums of other axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eigengraft.numerics import per_block, tiny


def fit_(
    v: Tensor, marginals: Mapping[int, Tensor], weights: Mapping[int, Tensor] | None = None, power: float = 1.0
) -> Tensor:
    """In place: v <- v * prod_i (d_i / s_i)^power, scaled to the sum that v had.

    marginals: d_i by axis of v, in any unit; 0: not known.
    weights: w_j by axis of v, with which s_i sums v prod_(j != i) w_j.

    One step of iterative proportional fitting (Deming & Stephan 1940) that takes all axes alike. It is exact where v is
    a product of one factor for each axis, and whatever v is for a single axis.
    """
    total, sums = v.flatten(1).sum(-1), _sums(v, weights or {})
    factors = {axis: _factor(d, sums[axis], power) for axis, d in marginals.items()}
    if 0 in factors:
        v.mul_(factors[0].reshape(*v.shape[:2], *[1] * (v.ndim - 2)))
    if (rest := _outer(_after_first(factors), v.shape[2:])) is not None:
        v.mul_(rest[:, None])
    return v.mul_(per_block(total / v.flatten(1).sum(-1).clamp_min(tiny(v.dtype)), v))


def _factor(d: Tensor, s: Tensor, power: float) -> Tensor:
    """(d_i / s_i)^power `[N, d_i]`, in the unit of s_i; 1 where one of both is not known."""
    known = (d > 0) & (s > 0)
    unit = (s * known).sum(-1) / (d * known).sum(-1).clamp_min(tiny(d.dtype))
    factor = torch.where(known, d * unit[:, None] / s.clamp_min(tiny(s.dtype)), 1.0)
    return factor if power == 1 else factor.pow(power)


def _sums(v: Tensor, weights: Mapping[int, Tensor]) -> list[Tensor]:
    """s_i `[N, d_i]` of every axis: the first axis against all others, then those, which are few, in the same way."""
    if v.ndim <= 2:
        return [v]
    rows, others = v.flatten(2), _after_first(weights)
    weight = _outer(others, v.shape[2:])
    own = rows.sum(2) if weight is None else (rows * weight.flatten(1)[:, None]).sum(2)
    rest = rows.sum(1) if 0 not in weights else (rows * weights[0][..., None]).sum(1)
    return [own, *_sums(rest.reshape(-1, *v.shape[2:]), others)]


def _after_first(by_axis: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """What axes but the first have, by axis counted from the second one."""
    return {axis - 1: x for axis, x in by_axis.items() if axis}


def _outer(factors: Mapping[int, Tensor], shape: Sequence[int]) -> Tensor | None:
    """The product of factors `[N, d_i]` by axis, `[N, *shape]`; None: there are none."""
    product = None
    for axis, factor in factors.items():
        placed = factor.reshape(-1, *(n if place == axis else 1 for place, n in enumerate(shape)))
        product = placed if product is None else product * placed
    return None if product is None else product.expand(-1, *shape).contiguous()
