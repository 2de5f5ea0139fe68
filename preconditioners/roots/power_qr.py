"""Eigenbases by orthogonal iteration: a power step from the last basis, then a QR (Vyas et al. 2024, Algorithm 4).

`PowerQR` makes a fixed number of steps, and `AdaptiveQR` as many steps as each matrix needs. All solvers that start
from the last basis use the functions of this module.

Legend:
    A: `[N, d, d]`, N matrices.
    Q: `[N, d, r]`, their bases, with r <= d orthonormal columns.
    o: `[N, r]`, the old index of each column.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import (
    apply_aligned,
    finite_blocks,
    may_branch_on_values,
    per_block,
    signs,
    transposed,
)

from ..algebra.products import reordered
from .base import Basis, BasisSolver, Diagonal
from .by_device import ByDevice, chosen, decomposed_on_host
from .decompositions import leading_eigenvectors, off_diagonal, unit_sized

Orthonormal = Callable[[Tensor, Tensor], Tensor]
"""Function of (A Q, Q) that returns the orthonormal factor of A Q, with the signs of Q."""


class PowerQR(BasisSolver, ByDevice):
    """Q <- qr(A Q[:, o]).Q,  o = columns by descending diag(Q^T A Q);  the first basis is eigh(A).

    A `[N, d, d]` is the statistic, and Q `[N, d, r]` its basis. The basis converges to the eigenvectors although a
    refresh has few steps, because the columns are sorted: orthogonal iteration needs the dominant columns first
    (Rutishauser). In ascending order it does not converge.

    With `by_device`, on an accelerator `cholesky_qr` replaces this solver if it is faster, and the first
    eigendecomposition is computed on the host if that is faster.
    """

    kind: Literal["power_qr"] = "power_qr"
    steps: int = Field(default=1, ge=1, le=100, description="number of power steps in one refresh")
    bootstrap: bool = Field(
        default=True, description="compute the first basis by an eigendecomposition; false: start from the identity"
    )

    def choice(self, device: str, order: int, dtype: torch.dtype) -> str:
        host = self.bootstrap and decomposed_on_host(device, order, dtype)
        return super().choice(device, order, dtype) + "; the first basis by eigh on the host" * host

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        if first and self.bootstrap:
            return leading_eigenvectors(
                a, host=self.by_device and decomposed_on_host(a.device.type, a.shape[-1], a.dtype)
            )
        solver = self if a.is_cpu else chosen(self, a)
        return self._iterated(a, q)[0] if solver is self else solver.basis(a, q, first)

    def basis_and_diagonal(self, a: Tensor, q: Tensor, first: bool) -> tuple[Basis, Diagonal | None]:
        if self.steps > 1 or (first and self.bootstrap) or not (a.is_cpu or chosen(self, a) is self):
            return self.basis(a, q, first), None
        basis, factors = self._iterated(a, q)
        return basis, None if basis.order is None else partial(factors.diagonal, basis.order)

    def _iterated(self, a: Tensor, q: Tensor) -> tuple[Basis, QRFactors]:
        """Make all steps of orthogonal iteration for the matrices a, from the bases q. Return the new basis, and the QR
        factors of the last step.
        """
        order, factors = _sorted_step(a, q)
        ok = factors.finite
        for _ in range(self.steps - 1):
            descending, factors = _sorted_step(a, factors.q)
            order, ok = order.gather(-1, descending), ok & factors.finite
        return Basis(factors.q, order, ok & finite_blocks(factors.q)), factors


def _sorted_step(a: Tensor, q: Tensor) -> tuple[Tensor, QRFactors]:
    """Return the order o that sorts columns by descending diag(Q^T A Q), and the QR factors of A Q[:, o].

    For a matrix A of zeros, the order of the columns and the basis do not change.
    """
    aq = torch.bmm(q.mT, a).mT  # A Q = (Q^T A)^T for symmetric A, with the entries of a column contiguous in memory
    descending = _rayleigh(aq, q).argsort(dim=-1, descending=True, stable=True)
    return descending, QRFactors.of(_columns(aq, descending), q)


def identity_order(q: Tensor) -> Tensor:
    """Return the order `[N, r]` in which all columns of q `[N, d, r]` keep their index: 0, 1, ..., r - 1."""
    return torch.arange(q.shape[-1], dtype=torch.int64, device=q.device).expand(q.shape[0], -1)


def ordered_step(aq: Tensor, q: Tensor, order: Tensor, orthonormal: Orthonormal) -> tuple[Tensor, Tensor]:
    """Return the basis and the order of its columns after one step of orthogonal iteration.

    The step first sorts the columns by descending diag(Q^T A Q).

    aq: A Q, the product of the matrices A with their bases Q.
    q: Q.
    order: `[N, r]`, for each column of q, the index of the column of the last refresh's basis from which it was
        computed. The returned order is `order`, permuted in the same way as the columns of q.
    orthonormal: function that orthonormalizes A Q.
    """
    descending = (q * aq).sum(-2).argsort(dim=-1, descending=True, stable=True)  # [N, r]
    return orthonormal(_columns(aq, descending), _columns(q, descending)), order.gather(-1, descending)


def _rayleigh(aq: Tensor, q: Tensor) -> Tensor:
    """Return diag(Q^T A Q) `[N, r]` for matrices A and their bases Q.

    aq: A Q, with the entries of each column contiguous in memory.
    q: Q.
    """
    by_columns = torch.mul(q, aq) if q.mT.is_contiguous() else transposed(q).mT.mul_(aq)
    return by_columns.sum(-2)


def _columns(x: Tensor, order: Tensor) -> Tensor:
    """Return x `[N, d, r]` with its columns reordered. If the columns of x are contiguous in memory, those of the
    result are, too.

    order: `[N, r]`, the old index of each column.
    """
    return reordered(x.mT, 0, order).mT if x.mT.is_contiguous() else reordered(x, 1, order)


def householder(aq: Tensor, q: Tensor) -> Tensor:
    """Return the orthonormal factor of qr(aq), with signs as in `same_signs`.

    aq is scaled first, so that the QR neither over- nor underflows for any size of A.

    aq: A Q, the product of the matrices A with their bases Q.
    q: Q.
    """
    return same_signs(QRFactors.of(aq, q).q, q)


class QRFactors(NamedTuple):
    """The factors Q and R of a QR decomposition of X `[N, d, r]`. R stays in LAPACK's packed form, because few callers
    need it.

    q: `[N, d, r]`, Q, with the entries of each column contiguous in memory, as LAPACK returns them.
    packed: `[N, d, r]`, the packed form of LAPACK: R on and above the diagonal, not yet multiplied by `scale`, and
        Householder vectors below the diagonal.
    scale: `[N, r]`, factor by which each row of R in `packed` must be multiplied; 0 where X is 0 or not finite.
    finite: bool `[N]`, True where X is finite.
    """

    q: Tensor
    packed: Tensor
    scale: Tensor
    finite: Tensor

    @classmethod
    def of(cls, x: Tensor, q: Tensor) -> QRFactors:
        """Return the QR factors of x for which the diagonal of R is not negative. Where x is 0 or not finite, Q is the
        given q.

        x is scaled first, unless its norm shows that squares of its entries can neither over- nor underflow.
        """
        x, unit, finite = _sized(x, q)
        new, packed = apply_aligned(_factored, x)
        turned = signs(packed.diagonal(dim1=-2, dim2=-1))  # [N, r]
        scale = turned if unit is None else turned * unit[:, None]
        return cls(new.mul_(turned.unsqueeze(-2)), packed, scale, finite)

    def diagonal(self, order: Tensor, rotation: Tensor) -> Tensor:
        """Return diag(Q^T A Q) `[N, d]` for the new basis Q of a step of orthogonal iteration, without a product with
        A.

        Such a step computes the QR factors Q and R of X = A q[:, order], where q `[N, d, d]` is the old basis and
        `order` a permutation of its columns. With the orthogonal matrix q[:, order], A = Q R q[:, order]^T, and
        therefore Q^T A Q = R q[:, order]^T Q. Only the diagonal of this product is computed.

        The method overwrites the Householder vectors in `packed` with zeros.

        order: `[N, d]`, the column of q from which each column of X was computed.
        rotation: q^T Q `[N, d, d]`.
        """
        sorted_rows = _columns(rotation.mT, order).mT
        triangle = self.packed.mT.tril_()  # in place: the Householder vectors below the diagonal are no longer needed
        return sorted_rows.mul_(triangle).sum(-2) * self.scale


def _sized(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (x / unit, unit, finite), with x scaled to a size at which squares of entries neither over- nor underflow.

    x / unit: the scaled x. Where x is 0 or not finite, it is replaced by q.
    unit: `[N]`, the number by which the matrix of a block was divided; 0 where x is 0 or not finite. None: no matrix
        was scaled or replaced.
    finite: bool `[N]`, True where x is finite.

    x: `[N, d, r]`.
    q: `[N, d, r]`, matrices of ordinary size.
    """
    norm = torch.linalg.vector_norm(x, dim=(-2, -1))
    far = torch.finfo(x.dtype).max ** 0.4
    if may_branch_on_values(norm) and all(1 / far < one < far for one in norm.tolist()):
        return x, None, torch.ones_like(norm, dtype=torch.bool)
    easy = (norm > 1 / far) & (norm < far)
    size = x.abs().amax((-2, -1))  # [N]; torch's maximum norm takes twenty times as long
    finite = size.isfinite()
    live = finite & (size > torch.finfo(x.dtype).tiny)
    unit = torch.where(easy | ~live, 1.0, size)
    return torch.where(per_block(live, x), x / per_block(unit, x), q), torch.where(live, unit, 0.0), finite


def _factored(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q `[N, d, r]` of a QR decomposition of x, and R in the packed form of LAPACK."""
    d = x.shape[-2]
    if x.device.type == "cpu" and d * x.element_size() % _SAME_SET == 0:
        x = _below_by_zeros(x)
    # Q is computed from the Householder vectors, because torch.linalg.qr would also copy R out of the packed form
    packed, tau = torch.geqrf(x)
    return torch.linalg.householder_product(packed, tau)[..., :d, :], packed[..., :d, :]


_SAME_SET = 4096
"""Distance between columns, in bytes, at which a QR is slow: for multiples of it, all columns compete for one set of
a CPU's first-level cache.
"""


def _below_by_zeros(x: Tensor) -> Tensor:
    """Return x `[N, d, r]` with 16 rows of zeros appended, `[N, d + 16, r]`.

    The zeros do not change R or the first d rows of Q. They change the distance between columns in memory, which must
    not be a multiple of `_SAME_SET` bytes, because a QR is then slow.
    """
    n, d, r = x.shape
    longer = x.new_zeros(n, r, d + 16).mT
    longer[:, :d].copy_(x)
    return longer


def same_signs(new: Tensor, q: Tensor) -> Tensor:
    """Return `new` with each column multiplied by 1 or -1, so that its product with the column of q is not negative."""
    return new * signs((new * q).sum(-2, keepdim=True))


class AdaptiveQR(BasisSolver):
    """Q <- qr(A Q[:, o]).Q  until ||B - diag B||_F <= tolerance ||B||_F;  B = Q^T A Q, o = columns by descending diag B

    A `[N, d, d]` is the statistic, and Q its basis. The ratio ||B - diag B||_F / ||B||_F is the relative error of Q
    diag(B) Q^T as an approximation of A. A matrix whose ratio is small enough keeps its basis bit for bit, and on a CPU
    no further step is computed for it. On a device, where a test would make the host wait, `max_steps` steps are
    computed for all matrices, and matrices that are finished do not use the results.
    """

    kind: Literal["adaptive_qr"] = "adaptive_qr"
    tolerance: float = Field(default=0.1, ge=0, lt=1, description="largest ||B - diag B|| / ||B|| that is good enough")
    max_steps: int = Field(default=5, ge=1, le=1000, description="largest number of power steps in one refresh")
    bootstrap: bool = Field(
        default=True, description="compute the first basis by an eigendecomposition; false: start from the identity"
    )

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        if first and self.bootstrap:
            return leading_eigenvectors(a)
        a, ok = unit_sized(a)
        q, order = self.gathered(a, q) if may_branch_on_values(a) else self.masked(a, q)
        return Basis(q, order, ok & finite_blocks(q))

    def masked(self, a: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new basis of the matrices a and the order of its columns, computed from the last basis q on a
        device.

        All steps are computed for every matrix, and matrices whose basis is good enough do not use the results.
        """
        order = identity_order(q)
        for _ in range(self.max_steps):
            aq = torch.bmm(a, q)
            due = off_diagonal(torch.bmm(q.mT, aq), self.tolerance)
            stepped, places = ordered_step(aq, q, order, householder)
            q = torch.where(due[:, None, None], stepped, q)
            order = torch.where(due[:, None], places, order)
        return q, order

    def gathered(self, a: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new basis of the matrices a and the order of its columns, computed from the last basis q on a CPU.

        Each step is computed only for matrices whose basis is not good enough yet.
        """
        q, order = q.clone(), identity_order(q).clone()
        rows = torch.arange(len(q), dtype=torch.int64, device=q.device)
        for _ in range(self.max_steps):
            active = q[rows]
            aq = torch.bmm(a[rows], active)
            due = off_diagonal(torch.bmm(active.mT, aq), self.tolerance)
            rows = rows[due]
            if not len(rows):
                break
            q[rows], order[rows] = ordered_step(aq[due], active[due], order[rows], householder)
        return q, order
