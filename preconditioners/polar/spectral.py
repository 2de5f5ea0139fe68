"""Spectral descent (Muon, Jordan et al. 2024; Bernstein & Newhouse 2024), and solvers that compute polar factors.

The polar factor of a matrix with the singular value decomposition G = U S V^T is U V^T.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Self, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.blocking.blocks import matrix_shape
from eigengraft.numerics import apply_aligned, block_norm, multiplied_in_float32, per_block, safe_ratio, tiny
from eigengraft.schedules import Schedulable
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..algebra.products import add_symmetric, as_matrices, symmetric_product
from ..base import Stage, Traits
from .coefficients import Coefficients, require_used, triples


class PolarSolver(Schedulable, ABC, family="polar_solver"):
    """A method that computes the polar factor of a matrix, the nearest semi-orthogonal matrix, exactly or nearly."""

    @abstractmethod
    def polar(self, x: Tensor) -> Tensor:
        """Return the polar factors of matrices x `[N, m, n]`, in the same shape. A zero matrix stays zero.

        The method is called in every step. It must not write to x.
        """

    def operations(self, m: int, n: int) -> float:
        """Return the number of floating-point operations for a matrix [m, n].

        The default is the number for five Newton-Schulz steps.
        """
        return newton_schulz_operations(5, m, n)

    @final
    def of_blocks(self, x: Tensor) -> Tensor:
        """Return the polar factors of blocks `[N, *block]`, in the same shape.

        Blocks are treated as matrices, first axis x the rest. A vector is one column.
        """
        return self.polar(as_matrices(x)).reshape(x.shape)


def newton_schulz_operations(steps: int, m: int, n: int) -> float:
    """Return the number of floating-point operations of Newton-Schulz for a matrix [m, n].

    Each step is counted as three products of 2 a^2 b operations, where a is the shorter side and b the longer side.
    """
    return 6.0 * steps * min(m, n) * m * n


class NewtonSchulz(PolarSolver):
    """X <- a X + b (X X^T) X + c (X X^T)^2 X  from X = G / max(||G||_F, eps), with products on the shorter side.

    G is a block as a matrix, and X the iterate. The default coefficients have the steepest slope at zero: five steps
    map singular values in [0.01, 1] to [0.68, 1.13], not to 1 (Jordan et al. 2024). Step k uses the k-th triple (a, b,
    c); the last triple repeats.

    `scaling: almost_orthogonal` divides row i of the shorter side by (sum_j |X X^T|_ij)^(1/2) before the first step
    (Boissin et al. 2025, arXiv:2512.04632, Turbo-Muon). All singular values are then at most 1 and closer to 1 than
    with `frobenius`, which saves a step. The result is the polar factor of the matrix with scaled rows, not of G.
    """

    kind: Literal["newton_schulz"] = "newton_schulz"
    steps: int = Field(default=5, ge=1, le=50, description="number of polynomial steps")
    coefficients: Coefficients = Field(
        default=((3.4445, -4.7750, 2.0315),), description="triples (a, b, c), one triple, or the name of published ones"
    )
    scaling: Literal["frobenius", "almost_orthogonal"] = Field(
        default="frobenius", description="scaling that makes singular values at most 1 before the first step"
    )
    eps: float = Field(default=1e-8, gt=0, description="lower bound of the norm that a block is divided by")
    precision: Literal["input", "bfloat16"] = Field(default="input", description="dtype of the products")

    @model_validator(mode="after")
    def _triples_are_used(self) -> Self:
        require_used(self.coefficients, self.steps)
        return self

    def operations(self, m: int, n: int) -> float:
        return newton_schulz_operations(self.steps, m, n)

    def polar(self, x: Tensor) -> Tensor:
        y = x / per_block(block_norm(x).clamp_min(self.eps), x)
        if self.precision == "bfloat16":
            y = y.bfloat16()
        tall = y.shape[1] > y.shape[2]
        y = y.mT if tall else y
        if self.scaling == "almost_orthogonal":
            sums = symmetric_product(y, y).abs().sum(-1, keepdim=True).sqrt()
            y = y * safe_ratio(torch.ones_like(sums), sums)
        for a, b, c in triples(self.coefficients, self.steps):
            gram = symmetric_product(y, y)
            y = _add_product(y, add_symmetric(gram.clone(), gram, gram, b, c), y, a)
        if tall and not x.is_cpu:
            # One kernel transposes and converts. Because the result is contiguous, one kernel can later add it to the
            # parameter.
            return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(y.mT)
        return (y.mT if tall else y).to(x.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, beta: float) -> Tensor:
    """Return beta * total + a b, for stacks of matrices. In low precision the sum is computed in float32 and rounded
    once.
    """
    if multiplied_in_float32(total):
        return torch.baddbmm(total.float(), a.float(), b.float(), beta=beta).to(total.dtype)
    return torch.baddbmm(total, a, b, beta=beta)


class SVD(PolarSolver):
    """U V^T by a singular value decomposition, without the directions whose singular value is only a rounding error.

    It is the exact reference for the iterations of other polar solvers, in tests and in `eigengraft bench polar`.

    A singular value of an m x n matrix is treated as a rounding error if it is at most `cutoff` * max(m, n) * machine
    epsilon * the largest singular value.
    """

    kind: Literal["svd"] = "svd"
    cutoff: float = Field(
        default=1.0,
        ge=0,
        description="largest singular value that counts as a rounding error, in units of max(m, n) * machine epsilon "
        "* the largest singular value",
    )

    def polar(self, x: Tensor) -> Tensor:
        x = torch.where(x.isfinite(), x, 0.0)  # LAPACK raises for inf and nan, also in masked blocks
        peak = torch.linalg.vector_norm(x, ord=float("inf"), dim=(1, 2), keepdim=True)
        peak = torch.where(peak > 0, peak, 1.0)
        u, s, vh = apply_aligned(lambda own: torch.linalg.svd(own, full_matrices=False), x / peak)
        floor = s[:, :1] * (self.cutoff * max(x.shape[1:]) * torch.finfo(x.dtype).eps)
        return torch.bmm(u * (s > floor).to(x.dtype).unsqueeze(1), vh)


class Triangular(PolarSolver):
    """Q <- rows(tril(Q Q^T)^-1 Q)  from  Q = rows(X),  `passes` times;  rows(A): rows of A divided by their norms

    X is a block as a matrix, transposed if its second side is shorter, and tril is the lower triangle. This is MUD
    (Southworth & Thomas 2026, arXiv:2603.17970). One forward substitution replaces Newton-Schulz: to first order, it
    removes from row i its components along the rows before row i.

    The rows become nearly orthogonal unit vectors, but not the orthonormal rows nearest to X. The result depends on the
    order of the rows. A rotation of X from the left rotates a polar factor in the same way, but not this result. Rows
    of zeros stay zero.
    """

    kind: Literal["triangular"] = "triangular"
    passes: int = Field(default=1, ge=1, le=20, description="number of steps")

    def operations(self, m: int, n: int) -> float:
        return 3.0 * self.passes * min(m, n) * m * n  # a product, and a substitution of half as many operations

    def polar(self, x: Tensor) -> Tensor:
        tall = x.shape[1] > x.shape[2]
        q = _unit_rows(x.mT if tall else x)
        for _ in range(self.passes):
            # the diagonal of Q Q^T is 1, or 0 for rows of zeros; with unitriangular=True it is read as 1 for all rows
            q = _unit_rows(torch.linalg.solve_triangular(q @ q.mT, q, upper=False, unitriangular=True))
        return q.mT if tall else q


def _unit_rows(x: Tensor) -> Tensor:
    """Return the rows of each matrix divided by their norms. Rows of zeros stay zero."""
    largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    x = x / largest.clamp_min(tiny(x.dtype))  # so that squares neither over- nor underflow
    norms = x.square().sum(-1, keepdim=True).sqrt()
    return x * safe_ratio(torch.ones_like(norms), norms)


class Spectral(Stage):
    """polar(d) = U V^T for d = U S V^T: steepest descent in the spectral norm.

    d is the direction. Blocks are treated as matrices, first axis x the rest; a vector is one column, with polar factor
    d / ||d||. With `nuclear_norm` the result is <d, polar(d)> polar(d), where <d, U V^T> = sum(S). This is the full
    step of steepest descent, with its length (Bernstein & Newhouse 2024, Proposition 5; PolarGrad, Lau, Long & Su 2025,
    arXiv:2505.21799).
    """

    kind: Literal["spectral"] = "spectral"
    solver: PolarSolver = Field(default=NewtonSchulz(), description="how the polar factor is computed")
    nuclear_norm: bool = Field(default=False, description="multiply by <d, polar(d)>, the nuclear norm of d")

    def traits(self, block: tuple[int, ...]) -> Traits:
        work = self.solver.operations(*matrix_shape(block))
        bounded = not self.nuclear_norm
        return Traits(matrices=True, work=work, spectral_norm=1.0 if bounded else None, scale_free=bounded)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        polar = self.solver.of_blocks(direction)
        if not self.nuclear_norm:
            return polar
        return polar * per_block((direction * polar).flatten(1).sum(1), polar)
