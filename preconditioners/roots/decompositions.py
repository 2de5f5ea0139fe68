"""Solvers that decompose each matrix once: roots and bases by `eigh`, inverses by Cholesky.

All eigendecompositions of the library are computed by `eigh` below, which handles failures.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import (
    apply_aligned,
    block_norm,
    finite_blocks,
    identity_like,
    may_branch_on_values,
    on_host,
    symmetrized,
    tiny,
    to_power,
    where_blocks,
)

from ..algebra.products import symmetric_product
from .base import Basis, BasisSolver, MatrixSolver, Root, RootSolver
from .by_device import ByDevice, chosen


def eigh(a: Tensor, host: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvalues `[N, d]` in ascending order, eigenvectors `[N, d, d]`, and bool `[N]`, False for failures.

    A failure is a matrix that is not finite, an error of LAPACK, or a result with nan: on a CPU, divide and conquer in
    float32 returns nan without an error for some finite singular matrices. On a CPU, a decomposition that fails in
    float32 is repeated in float64. On a device a result with nan is not computed again, because a test for nan would
    make the host wait. For a matrix that fails, the result is the decomposition of the identity.

    a: symmetric matrices `[N, d, d]`.
    host: True to copy matrices of a device to the host and decompose them there. The host waits once, for the copies.
    """
    if host and not a.is_cpu:
        values, vectors, ok = on_host(eigh, a)
        return values, vectors, ok
    ok = finite_blocks(a)
    if a.shape[-1] == 0 or a.shape[0] == 0:
        return a.new_zeros(a.shape[:-1]), a.clone(), ok
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    a = torch.where(ok[:, None, None], symmetrized(a), eye)
    try:
        values, vectors = apply_aligned(torch.linalg.eigh, a)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return _one_by_one(a.double(), a.dtype, ok)
    fine = finite_blocks(vectors) & finite_blocks(values)
    if not may_branch_on_values(a):
        values, vectors = torch.where(fine[:, None], values, 1.0), torch.where(fine[:, None, None], vectors, eye)
        return values, vectors, ok & fine
    if not fine.all():
        values[~fine], vectors[~fine], ok[~fine] = _one_by_one(a[~fine].double(), a.dtype, ok[~fine])
    return values, vectors, ok


def leading_eigenvectors(a: Tensor, columns: int | None = None, host: bool = False) -> Basis:
    """Return bases of eigenvectors by descending eigenvalue, computed by an eigendecomposition.

    columns: number of eigenvectors; None for all.
    host: True to decompose matrices of a device on the host, as in `eigh`.
    """
    _, vectors, ok = eigh(a, host)
    return Basis(vectors.flip(-1)[..., :columns], None, ok)


def _one_by_one(a: Tensor, dtype: torch.dtype, ok: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (eigenvalues, eigenvectors, ok) in the form of `eigh`. Matrices are decomposed one by one, so that a
    failure affects no other matrix.

    a: matrices `[N, d, d]`, in the dtype of the decomposition.
    dtype: dtype of the results.
    ok: bool `[N]`, False for matrices that count as failed in any case.
    """
    values, vectors, fine = [], [], []
    for matrix in a:
        try:
            value, vector = torch.linalg.eigh(matrix)
            fine.append(bool(value.isfinite().all() and vector.isfinite().all()))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            fine.append(False)
        if not fine[-1]:
            value, vector = torch.ones_like(matrix[0]), torch.eye(len(matrix), dtype=a.dtype, device=a.device)
        values.append(value.to(dtype))
        vectors.append(vector.to(dtype))
    return torch.stack(values), torch.stack(vectors), ok & torch.tensor(fine, dtype=torch.bool, device=ok.device)


def unit_sized(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return (A / max |A|, ok), where max |A| is the largest absolute value in each matrix A.

    Products of scaled matrices cannot overflow, and a scaled matrix has the same eigenvectors as A.

    ok: bool `[N]`, True where A is finite. Elsewhere the scaled matrix is 0.
    """
    ok = finite_blocks(a)
    a = where_blocks(ok, a, 0.0)
    return a / a.abs().amax((-2, -1), keepdim=True).clamp_min(tiny(a.dtype)), ok


def off_diagonal(b: Tensor, tolerance: float) -> Tensor:
    """Return bool `[N]`, True for matrices B that are not diagonal: ||B - diag B||_F > tolerance ||B||_F.

    This is the criterion of Eschenhagen et al. 2025.
    """
    rest = b - torch.diag_embed(b.diagonal(dim1=-2, dim2=-1))
    return block_norm(rest) > tolerance * block_norm(b)


class Eigh(RootSolver, ByDevice):
    """Q diag(f(lambda))^(-e) Q^T  with A = Q diag(lambda) Q^T `[N, d, d]`;  `deficiency` chooses f, for singular A.

    f(lambda) for each value of `deficiency`, with lambda the eigenvalues and r the ridge:

    add: max(lambda, 0) + r.
    floor: max(lambda, r).
    clip_shift: lambda + r - min(0, smallest lambda) (Shi et al. 2023, section 3.2.1; the ridge is added once).
    perturb_before: the eigenvalues of A + r I, shifted so that the smallest is at least r (the default of Distributed
        Shampoo). The result equals clip_shift up to rounding, but the matrix that is decomposed is not singular.
    pseudo_inverse: lambda, but eigenvalues up to max(r, atol, rtol * lambda_max) are left out of the root.

    The ridge r is eps, or eps * lambda_max if `relative`, plus `ratio` times the mean of max(lambda, 0). eps is in
    units of A unless it is relative. Each eigenvalue has a rounding error of about d u lambda_max, where u is the
    rounding unit, so a smaller r has no effect. Every exponent e > 0 is accepted. The solver fails where A or the root
    is not finite. A decomposition that does not converge in float32 is repeated in float64.

    With `by_device` a faster solver may replace this one on an accelerator: decompositions on the host, or
    `coupled_minimax` with the same ridge. `coupled_minimax` requires a ridge that is relative, added to all
    eigenvalues, and larger than rounding errors.
    """

    kind: Literal["eigh"] = "eigh"
    eps: float = Field(
        default=1e-12, ge=0, description="ridge r, in units of the matrix; relative: of its largest eigenvalue"
    )
    relative: bool = Field(default=False, description="true: eps is relative to the largest eigenvalue")
    ratio: float = Field(default=0.0, ge=0, description="second part of the ridge, in units of the mean eigenvalue")
    deficiency: Literal["add", "clip_shift", "floor", "perturb_before", "pseudo_inverse"] = Field(
        default="clip_shift", description="treatment of eigenvalues at and below zero"
    )
    rtol: float | None = Field(
        default=0.0,
        ge=0,
        description="pseudo_inverse: cutoff relative to the largest eigenvalue; null: d * machine epsilon",
    )
    atol: float = Field(default=0.0, ge=0, description="pseudo_inverse: cutoff in units of the matrix")
    precision: Literal["input", "float64"] = Field(default="input", description="dtype of the decomposition")

    on_host: bool = Field(
        default=False, description="copy matrices of an accelerator to the host and decompose them there"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.deficiency == "perturb_before" and (self.relative or self.ratio):
            raise ValueError(
                "deficiency: 'perturb_before' cannot be combined with "
                + (f"`ratio: {self.ratio}`" if self.ratio else "`relative: true`")
                + ", because it adds a ridge before eigenvalues are known; "
                + ("remove ratio" if self.ratio else "set `relative: false`")
            )
        if self.deficiency != "pseudo_inverse" and (self.rtol != 0 or self.atol != 0):
            raise ValueError(
                f"deficiency: '{self.deficiency}' uses neither `rtol` nor `atol`; remove them, or set `deficiency: "
                "pseudo_inverse`"
            )
        return self

    @classmethod
    def equal_to(cls, other: MatrixSolver, dtype: torch.dtype) -> Self | None:
        return other.replace(on_host=True, by_device=False) if isinstance(other, cls) and not other.on_host else None

    def runs_on(self, device: str) -> str:
        return "cpu" if self.on_host else device

    def root(self, a: Tensor, exponent: Fraction) -> Root:
        solver = self if a.is_cpu else chosen(self, a)
        if solver is not self and solver.check(exponent) is None:
            return solver.root(a, exponent)
        a, dtype = a.double() if self.precision == "float64" else a, a.dtype
        values, q, ok = eigh(
            a + self.eps * identity_like(a) if self.deficiency == "perturb_before" else a, self.on_host
        )
        values = self._treat(values)
        power = to_power(values, -float(exponent))
        if self.deficiency == "pseudo_inverse":
            power = torch.where(values > 0, power, 0.0)
        root = symmetric_product(q * power.unsqueeze(1), q).to(dtype)
        ok = ok & finite_blocks(root)
        return Root(root, ok, definite=ok & (power > 0).all(-1))

    def regularized(self, values: Tensor) -> Tensor:
        return self._treat(values + self.eps if self.deficiency == "perturb_before" else values)

    def _treat(self, values: Tensor) -> Tensor:
        """Return the eigenvalues f(lambda) `[N, d]` from which the root is computed. The field `deficiency` chooses f.

        A returned 0 marks an eigenvalue that is left out of the root.

        values: eigenvalues lambda `[N, d]`; with `perturb_before`, the eigenvalues of A + r I with the ridge r.
        """
        if values.shape[1] == 0:
            return values
        floor = tiny(values.dtype)
        least, peak = values.amin(1, keepdim=True), values.amax(1, keepdim=True).clamp_min(floor)  # [N, 1]
        ridge = self.eps * peak if self.relative else torch.full_like(peak, self.eps)
        if self.ratio:
            ridge = ridge + self.ratio * values.clamp_min(0).mean(1, keepdim=True)
        if self.deficiency == "pseudo_inverse":
            cutoff = ridge.clamp_min(max(floor, self.atol))
            rtol = values.shape[1] * torch.finfo(values.dtype).eps if self.rtol is None else self.rtol
            return torch.where(values > torch.maximum(cutoff, rtol * peak), values, 0.0)
        if self.deficiency == "floor":
            return torch.maximum(values, ridge).clamp_min(floor)
        if self.deficiency == "add":
            return (values.clamp_min(0) + ridge).clamp_min(floor)
        if self.deficiency == "perturb_before":
            return torch.where(least < ridge, values - least + ridge, values).clamp_min(floor)
        return (values - least.clamp_max(0) + ridge).clamp_min(floor)


class CholeskyInverse(RootSolver):
    """(A + r I)^(-1)  with  r = eps + ratio tr(A) / d,  A `[N, d, d]`;  by the Cholesky factors of A + r I

    This is the damping of Newton-Muon (Du & Su 2026, arXiv:2604.01472: ratio 0.2) and of K-FAC. Only e = 1 is accepted.
    eps is in units of A; ratio has no unit. The solver fails where A is not finite or A + r I has no Cholesky factor.
    """

    kind: Literal["cholesky"] = "cholesky"
    eps: float = Field(default=1e-8, ge=0, description="first part of the ridge r, in units of the matrix")
    ratio: float = Field(default=0.2, ge=0, description="second part of the ridge r, in units of the mean eigenvalue")

    def check(self, exponent: Fraction) -> str | None:
        return None if exponent == 1 else f"cholesky takes exponents of exactly 1, got {exponent}"

    def root(self, a: Tensor, exponent: Fraction) -> Root:
        known = finite_blocks(a)
        mean = a.diagonal(dim1=-2, dim2=-1).mean(-1)
        ridge = (self.eps + self.ratio * mean).clamp_min(tiny(a.dtype))
        damped = a + ridge[:, None, None] * identity_like(a)
        factor, info = torch.linalg.cholesky_ex(torch.where(known[:, None, None], damped, identity_like(a)))
        ok = known & (info == 0)
        factor = torch.where(ok[:, None, None], factor, identity_like(a))
        root = symmetrized(torch.cholesky_inverse(factor).contiguous())
        return Root(root, ok & finite_blocks(root))

    def regularized(self, values: Tensor) -> Tensor:
        mean = values.mean(-1, keepdim=True) if values.shape[-1] else values
        return (values + self.eps + self.ratio * mean).clamp_min(tiny(values.dtype))


class EighBasis(BasisSolver):
    """Eigenvectors by eigendecomposition, columns by descending (or ascending) eigenvalue.

    With a tolerance, a matrix A keeps its old basis Q bit for bit as long as ||B - diag B||_F <= tolerance ||B||_F for
    B = Q^T A Q (Eschenhagen et al. 2025, arXiv:2506.03595). On a CPU such a matrix is not decomposed. On a device,
    where a test would make the host wait, all matrices are decomposed, and such a matrix does not use the result.
    """

    kind: Literal["eigh"] = "eigh"
    order: Literal["descending", "ascending"] = Field(
        default="descending", description="order of the columns by eigenvalue"
    )
    tolerance: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="largest ||B - diag B|| / ||B|| with which a matrix keeps its basis; 0: always decompose",
    )

    on_host: bool = Field(
        default=False, description="copy matrices of an accelerator to the host and decompose them there"
    )

    def runs_on(self, device: str) -> str:
        return "cpu" if self.on_host else device

    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        if first or self.tolerance == 0:
            return self._decomposed(a)
        scaled, ok = unit_sized(a)
        due = off_diagonal(torch.bmm(q.mT, torch.bmm(scaled, q)), self.tolerance)
        if not may_branch_on_values(a):
            vectors, _, fine = self._decomposed(a)
            return Basis(torch.where(due[:, None, None], vectors, q), None, torch.where(due, fine, ok))
        q = q.clone()
        if bool(due.any()):
            q[due], _, ok[due] = self._decomposed(a[due])
        return Basis(q, None, ok)

    def _decomposed(self, a: Tensor) -> Basis:
        """Return the eigenvectors of the matrices a `[N, d, d]`, with columns sorted as the field `order` says."""
        _, vectors, ok = eigh(a, self.on_host)
        return Basis(vectors.flip(-1) if self.order == "descending" else vectors, None, ok)
