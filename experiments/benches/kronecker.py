"""Dense mathematics of Kronecker approximations S = L x R of a second moment C = E[vec G vec G^T].

Legend: K gradients G `[K, m, n]`; vec stacks rows, so that (L x R) vec X = vec(L X R^T); C `[m n, m n]`; all float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOOR = 1e-12


def second_moment(g: Tensor) -> Tensor:
    """Return C = E[vec G vec G^T], the mean over the gradients."""
    flat = g.flatten(1)
    return flat.T @ flat / len(g)


def power(a: Tensor, exponent: float) -> Tensor:
    """Return A^p. Eigenvalues below 1e-12 times the largest are first replaced by 1e-12 times the largest."""
    values, q = torch.linalg.eigh(a)
    powers = values.clamp_min(_FLOOR * values[-1]).pow(exponent)
    result: Tensor = (q * powers) @ q.T
    return result


def cosine(a: Tensor, b: Tensor) -> float:
    """Return <A, B> / (||A|| ||B||)."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def cosine_product(c: Tensor, left: Tensor, right: Tensor) -> float:
    """Return the cosine of C and L x R."""
    return cosine(c, torch.kron(left, right))


def best_cosine(c: Tensor, m: int, n: int) -> float:
    """Return the largest cosine of C with any L x R: the spectral norm of C rearranged, over ||C|| (Van Loan)."""
    rearranged = c.reshape(m, n, m, n).transpose(1, 2).reshape(m * m, n * n)
    return float(torch.linalg.matrix_norm(rearranged, ord=2) / c.norm())


def gains(held_out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return log10 of the gains sqrt(h_i / s_i) `[m, n]` with h_i = u_i^T C u_i, s_i = u_i^T S u_i.

    u_i are the eigenvectors of S = L x R, and C is the second moment of held-out gradients. The logarithm is 0 where
    S^(-1/2) scales the held-out gradients to unit size.
    """
    (a, u), (b, v) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    h = ((u.T @ held_out @ v) ** 2).mean(0)
    s = a.clamp_min(_FLOOR * a[-1])[:, None] * b.clamp_min(_FLOOR * b[-1])
    found: Tensor = 0.5 * (h / s).log10()
    return found


def gain_error(held_out: Tensor, left: Tensor, right: Tensor) -> float:
    """Return the median of |log10 gain| (Liu et al. 2026)."""
    return float(gains(held_out, left, right).abs().median())


def gain_spread(held_out: Tensor, left: Tensor, right: Tensor) -> float:
    """Return the median of |log10 gain - median log10 gain|.

    This is the part of the gain error that no learning rate removes.
    """
    found = gains(held_out, left, right)
    return float((found - found.median()).abs().median())
