"""The steps of PSGD: how far from whitening a gradient finds each factor, and how the factor moves (see `psgd.py`).

A step is scale-free, but its terms are in units of the gradient and their squares may leave the range of numbers:
they are made of blocks divided by `size` `[N]`, and come with it.

Legend: N blocks; n entries in a block; d length of an axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eigengraft.numerics import identity_like, per_block, symmetrized

from ..algebra.factors import Factors, gram, solved
from ..algebra.products import mode_products
from .base import peak_of

Terms = dict[int, tuple[Tensor, Tensor]]
"""By axis: what shrinks and what grows a factor, both positive semi-definite; equal on average where it whitens."""


class FactorStep(NamedTuple):
    """terms: (factors, h, v) -> (size, terms). move: (factor, m T / L) -> factor. probed: whether v is needed."""

    terms: Callable[[Factors, Tensor, Tensor | None], tuple[Tensor, Terms]]
    move: Callable[[Tensor, Tensor], Tensor]
    probed: bool


def triangular_terms(factors: Factors, h: Tensor, v: Tensor | None) -> tuple[Tensor, Terms]:
    """A A^T and B B^T with A = Q h, B = Q^(-T) v."""
    assert v is not None
    a, b = mode_products(h, factors), v
    for axis, q in factors.items():
        b = solved(b, q, axis)
    size = torch.maximum(peak_of(a), peak_of(b))
    divisor = per_block(torch.where(size > 0, size, 1.0), h)
    a, b = a / divisor, b / divisor
    return size, {axis: (gram(a, axis, q.ndim == 3), gram(b, axis, q.ndim == 3)) for axis, q in factors.items()}


def triangular_move(q: Tensor, t: Tensor) -> Tensor:
    """Q - triu(T) Q: Q stays in the group of upper triangular matrices with a positive diagonal.

    No entry of the diagonal shrinks more than tenfold in one step: a whole step, m = 1, could take it to 0.
    """
    longest = (t if t.ndim == 2 else t.diagonal(dim1=-2, dim2=-1)).amax(-1)
    t = t * per_block(0.9 / longest.clamp_min(0.9), t)
    return q - (t * q if q.ndim == 2 else torch.bmm(t.triu(), q))


def quad_terms(factors: Factors, h: Tensor, v: Tensor | None) -> tuple[Tensor, Terms]:
    """A A^T and (n / d) I with A = P h, P = Q Q."""
    a = mode_products(mode_products(h, factors), factors)
    size = peak_of(a).clamp_min(1.0)
    a = a / per_block(size, a)
    terms = {}
    for axis, q in factors.items():
        white = (a[0].numel() / q.shape[-1]) / size.square()
        unit = torch.ones_like(q) if q.ndim == 2 else identity_like(q)
        terms[axis] = gram(a, axis, q.ndim == 3), unit * per_block(white, q)
    return size, terms


def quad_move(q: Tensor, t: Tensor) -> Tensor:
    """(I - T / 2) Q (I - T / 2): Q stays symmetric and positive definite."""
    half = t / 2
    if q.ndim == 2:
        return q * (1 - half).square()
    left = q - torch.bmm(half, q)
    return symmetrized(left - torch.bmm(left, half))


FACTOR_STEPS = {
    "triangular": FactorStep(triangular_terms, triangular_move, probed=True),
    "quad": FactorStep(quad_terms, quad_move, probed=False),
}
