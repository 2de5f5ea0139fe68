"""The base of iterative root solvers: it scales matrices, adds a ridge, rejects bad results and tries again."""

from __future__ import annotations

from abc import abstractmethod
from fractions import Fraction
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import (
    apply_aligned,
    finite_blocks,
    has_values,
    identity_like,
    may_wait_for_values,
    per_block,
    symmetrized,
    tiny,
)

from .base import Root, RootSolver
from .bounds import EigenvalueBound, FrobeniusBound

Precision = Literal["input", "bfloat16", "float16"]
Scaling = Annotated[EigenvalueBound, Field(description="size that a matrix is divided by before it is solved")]


class Solved(NamedTuple):
    """The result of one call of `Iterative.solve`.

    root: `[N, d, d]`, a matrix X for which X^power = C^-e, with C the matrix and e the exponent.
    residual: `[N]`, the solver's measure of the error.
    iterations: `[N]`, number of steps of each matrix.
    power: positive integer.
    """

    root: Tensor
    residual: Tensor
    iterations: Tensor
    power: int = 1


class Iterative(RootSolver):
    """t^(-e) C^(-e)  with  C = (A + r I) / t `[N, d, d]`,  t `[N]` the `scaling` of A + r I,  r `[N]` the ridge

    A is the matrix and e the exponent. The ridge is added in this class only. With `relative` it is r = max(eps * size,
    floor), else r = max(eps, floor). size is a bound or an estimate of the largest eigenvalue of A, chosen by the field
    `relative_to`. t is a bound or an estimate of the largest eigenvalue of A + r I, chosen by the field `scaling`. If t
    is a bound, the eigenvalues of C are in [r / t, 1]. t, r and `floor` are in units of A.

    A matrix fails if it or its root is not finite, if the residual (which has no unit) is not below `max_error`, or if
    the root has no Cholesky factor. The last test is needed because the iterations may converge to a matrix with
    eigenvalues of the wrong sign. An even power of this matrix has the right sign, so that the residual does not show
    the failure.

    Failures are solved again up to `retries` times, each time with ten times the ridge. In place of a matrix that is
    not finite, the identity is solved. Products never mix matrices, so that the results of the other matrices are bit
    for bit the same as if no matrix had failed.
    """

    eps: float = Field(default=1e-6, ge=0, le=1, description="ridge, in units of the matrix; relative: of its size")
    relative: bool = Field(default=True, description="true: eps is in units of the size, see `relative_to`")
    floor: float = Field(default=0.0, ge=0, description="lower bound of the ridge, in units of the matrix")
    scaling: Scaling = FrobeniusBound()
    relative_to: EigenvalueBound | None = Field(
        default=None, description="size of the matrix that is the unit of a relative eps; default: `scaling`"
    )
    max_error: float = Field(default=0.1, gt=0, description="a root whose residual is not below this counts as failed")
    retries: int = Field(
        default=0,
        ge=0,
        le=10,
        description="number of further attempts after a failure; attempt i has 10^i times the ridge",
    )
    retry_above: float | None = Field(
        default=None, gt=0, description="residual from which a matrix is solved again; default: `max_error`"
    )
    precision: Precision = Field(default="input", description="dtype to which the factors of products are rounded")

    @model_validator(mode="after")
    def _options_matter(self) -> Self:
        if not self.relative and self.relative_to not in (None, type(self).model_fields["relative_to"].default):
            raise ValueError("relative_to: has no effect with `relative: false`; remove it")
        if self.retry_above is not None and not self.retries:
            raise ValueError("retry_above: has no effect with `retries: 0`; set retries or remove it")
        return self

    @abstractmethod
    def solve(self, c: Tensor, exponent: Fraction, ridge: float) -> Solved:
        """Return a matrix X and a whole number `power` for which X^power = C^-e, with the error and the number of
        steps.

        c: C = (A + r I) / t `[N, d, d]`, the scaled matrices with the ridge r.
        exponent: e.
        ridge: lower bound of r / s, where s is the largest eigenvalue of A as `scaling` bounds or estimates it. 0: the
            host knows no lower bound.
        """

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the products a b of stacks of matrices, with factors rounded to the field `precision`."""
        return product(a, b, self.precision)

    def plus_product(self, base: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
        """Return base + factor a b, with a and b rounded to the field `precision`.

        If `precision` is `input`, nothing is rounded, and one kernel computes the result.
        """
        if self.precision == "input":
            return torch.baddbmm(base, a, b, alpha=factor)
        found = self.times(a, b)
        return base + (found if factor == 1 else factor * found)

    def power(self, t: Tensor, p: int) -> Tensor:
        """Return (I + t)^p - I by repeated squaring, with (I + a)(I + b) - I = a + b + a b."""
        result, square = None, t
        while True:
            if p & 1:
                result = square if result is None else result + square + self.times(result, square)
            p >>= 1
            if p == 0:
                assert result is not None
                return result
            square = 2 * square + self.times(square, square)

    def root(self, a: Tensor, exponent: Fraction) -> Root:
        finite = finite_blocks(a)
        a = torch.where(per_block(finite, a), symmetrized(a), identity_like(a))
        if a.numel() == 0:
            return Root(a, finite, finite.int(), finite.to(a.dtype), finite)
        found = self._attempt(a, exponent, 1.0)
        for attempt in range(1, self.retries + 1):
            failed = ~found.definite | ~(found.residual < (self.retry_above or self.max_error))
            if not has_values(a):
                break
            if may_wait_for_values(a):
                rows = failed.nonzero().squeeze(1)
                if len(rows) == 0:
                    break
                again = self._attempt(a[rows], exponent, 10.0**attempt)
                again = Root(*(old.index_copy(0, rows, new) for old, new in zip(found, again, strict=True)))
            else:  # a traced graph cannot select the failed matrices, so all matrices are solved again
                again = self._attempt(a, exponent, 10.0**attempt)
            better = failed & again.ok & (~found.ok | (again.residual < found.residual))
            found = Root(*(torch.where(per_block(better, x), y, x) for x, y in zip(found, again, strict=True)))
        return found._replace(ok=found.ok & finite)

    def regularized(self, values: Tensor) -> Tensor:
        values = values.clamp_min(0)
        size = values.amax(1, keepdim=True) if values.shape[1] else values
        ridge = (self.eps * size).clamp_min(self.floor) if self.relative else max(self.eps, self.floor)
        return (values + ridge).clamp_min(tiny(values.dtype))

    def _attempt(self, a: Tensor, exponent: Fraction, times: float) -> Root:
        """Return the roots A^(-e) of all matrices a, computed in one attempt, with the ridge multiplied by `times`.

        a: finite symmetric matrices `[N, d, d]`.
        exponent: e.
        """
        size, ridge = self._size_and_ridge(a, times)
        c = a / per_block(size, a) + per_block(ridge, a) * identity_like(a)
        peak = self.scaling.upper(c)
        total = size * peak
        known = self.eps * times if self.relative and self.relative_to is None else 0.0
        root, residual, iterations, power = self.solve(c / per_block(peak, a), exponent, known)
        eye, usable = identity_like(a), finite_blocks(root)
        root = torch.where(per_block(usable, a), symmetrized(root), eye)
        definite = apply_aligned(torch.linalg.cholesky_ex, root)[1] == 0
        value = symmetrized(torch.linalg.matrix_power(root, power)) * per_block(total ** -float(exponent), a)
        usable = usable & finite_blocks(value)
        value = torch.where(per_block(usable, a), value, eye)
        definite = definite & usable
        return Root(value, definite & (residual < self.max_error), iterations, residual, definite)

    def _size_and_ridge(self, a: Tensor, times: float) -> tuple[Tensor, Tensor]:
        """Return (size, ridge), `[N]` each: the size by which matrices A are divided, and their ridge in this unit.

        size: bound of the largest eigenvalue of A that `scaling` gives, or the absolute ridge if that is larger.
        ridge: ridge in units of `size`; 1 for a zero matrix.

        times: factor by which the ridge is multiplied, which rises with every retry.
        """
        none, least = tiny(a.dtype), (self.floor if self.relative else max(self.eps, self.floor)) * times
        upper = self.scaling.upper(a)
        size = upper.clamp_min(max(none, least))
        ridge = least / size
        if self.relative:
            peak = upper if self.relative_to is None else self.relative_to.upper(a)
            ridge = torch.maximum(ridge, self.eps * times * (peak / size))
        return size, torch.where((upper < none) & (ridge < 1), 1.0, ridge)


def product(a: Tensor, b: Tensor, precision: Precision) -> Tensor:
    """Return the products a b of stacks of matrices, with factors rounded to `precision`.

    Sums and results have at least float32. Because float16 has a small range, factors in float16 are first divided by
    powers of two, which is exact, so that no entry exceeds 1. On a CPU the rounding is emulated: results are rounded as
    on a device, but no time is saved.
    """
    if precision == "input":
        return torch.bmm(a, b)
    if precision == "float16":
        (a, size_a), (b, size_b) = _at_most_one(a), _at_most_one(b)
        return _rounded(a, b, torch.float16) * (size_a * size_b)
    return _rounded(a, b, torch.bfloat16)


def _rounded(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products a b, with factors rounded to a dtype and sums in float32."""
    low, lower = a.to(dtype), b.to(dtype)
    if a.device.type == "cuda":
        return torch.bmm(low, lower, out_dtype=torch.float32).to(a.dtype)
    return torch.bmm(low.float(), lower.float()).to(a.dtype)


def _at_most_one(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return (a / power, power). For each matrix, power `[N, 1, 1]` is the smallest power of two with which no entry of
    a / power exceeds 1.
    """
    size = a.abs().amax((-2, -1), keepdim=True).clamp_min(tiny(a.dtype)).log2().ceil().exp2()
    return a / size, size


def largest_entry(a: Tensor) -> Tensor:
    """Return the largest absolute value in each matrix of a `[N, d, d]`, as `[N]`."""
    return a.abs().amax((-2, -1))
