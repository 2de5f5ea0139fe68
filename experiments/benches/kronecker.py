"""Dense mathematics of Kronecker approximations S = L x R of a second moment C = E[vec G vec G^T].

Legend: K gradients G `[K, m, n]`; vec stacks rows, so that (L x R) vec X = vec(L X R^T); C `[m n, m n]`; all float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOOR = 1e-12


def second_moment(g: Tensor) -> Tensor:
    """C = E[vec G vec G^T], the mean over the gradients."""
    flat = g.flatten(1)
    return flat.T @ flat / len(g)


def gram_factors(g: Tensor) -> tuple[Tensor, Tensor]:
    """L = E[G G^T], R = E[G^T G]."""
    return torch.einsum("kij,klj->il", g, g) / len(g), torch.einsum("kij,kil->jl", g, g) / len(g)


def power(a: Tensor, exponent: float) -> Tensor:
    """A^p; eigenvalues count as at least 1e-12 of the largest."""
    values, q = torch.linalg.eigh(a)
    powers = values.clamp_min(_FLOOR * values[-1]).pow(exponent)
    result: Tensor = (q * powers) @ q.T
    return result


def fixed_point(g: Tensor, q: float, rounds: int = 30) -> tuple[Tensor, Tensor]:
    """L = E[G R^(q-1) G^T] / tr(R^q),  R = E[G^T L^(q-1) G] / tr(L^q),  by alternation from the identity.

    The trace-power Bregman optimum: q = 2 Frobenius, 1 von Neumann, 1/2 square root, 0 Kullback-Leibler.
    """
    m, n = g.shape[1:]
    left, right = torch.eye(m, dtype=g.dtype), torch.eye(n, dtype=g.dtype)
    for _ in range(rounds):
        whitened = g @ power(right, q - 1)
        left = torch.einsum("kij,klj->il", whitened, g) / len(g) / power(right, q).trace()
        whitened = power(left, q - 1) @ g
        right = torch.einsum("kij,kil->jl", whitened, g) / len(g) / power(left, q).trace()
    return left, right


def cosine(a: Tensor, b: Tensor) -> float:
    """<A, B> / (||A|| ||B||) of two matrices."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def cosine_product(c: Tensor, left: Tensor, right: Tensor) -> float:
    """The cosine of C and L x R."""
    return cosine(c, torch.kron(left, right))


def best_cosine(c: Tensor, m: int, n: int) -> float:
    """The largest cosine of C with any L x R: the largest singular value of C rearranged, over ||C|| (Van Loan)."""
    rearranged = c.reshape(m, n, m, n).transpose(1, 2).reshape(m * m, n * n)
    return float(torch.linalg.matrix_norm(rearranged, ord=2) / c.norm())


def gains(held_out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """log10 of sqrt(h_i / s_i) `[m, n]` over the eigenvectors u_i of S = L x R with eigenvalues s_i, h_i = u_i^T C u_i.

    h is the second moment of gradients that S has not seen: 0 where S^(-1/2) gives them unit size.
    """
    (a, u), (b, v) = torch.linalg.eigh(left), torch.linalg.eigh(right)
    h = ((u.T @ held_out @ v) ** 2).mean(0)
    s = a.clamp_min(_FLOOR * a[-1])[:, None] * b.clamp_min(_FLOOR * b[-1])
    found: Tensor = 0.5 * (h / s).log10()
    return found


def gain_error(held_out: Tensor, left: Tensor, right: Tensor) -> float:
    """The median of |log10 gain| (Liu et al. 2026)."""
    return float(gains(held_out, left, right).abs().median())


def gain_spread(held_out: Tensor, left: Tensor, right: Tensor) -> float:
    """The median of |log10 gain - median|: the gain error left after the best common factor, a learning rate."""
    found = gains(held_out, left, right)
    return float((found - found.median()).abs().median())
