"""The base classes of two families of solvers: for inverse roots of matrices, and for eigenbases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from typing import ClassVar, NamedTuple, Self, final

import torch
from torch import Tensor

from eigengraft.numerics import finite_blocks, to_power
from eigengraft.schedules import Schedulable


class _RootTensors(NamedTuple):
    """The fields of `Root`. `Root` computes their default values in `__new__`, which a NamedTuple cannot define."""

    value: Tensor
    ok: Tensor
    iterations: Tensor
    residual: Tensor
    definite: Tensor


class Root(_RootTensors):
    """The result of a root solver. All tensors stay on the device, so that the host does not wait.

    `Root(value)` is enough for a solver whose result has a number that is not finite whenever it fails.

    value: `[N, d, d]`, the inverse root. For a diagonal matrix given as its diagonal it is `[N, d]`.
    ok: bool `[N]`, False where the solver failed and the value must not be used. Default: True where the value is
        finite.
    iterations: int32 `[N]`, number of iterations. Default: 0, as for direct solvers.
    residual: `[N]` in the dtype of the value, the solver's own measure of the remaining error. Default: 0.
    definite: bool `[N]`, True where the value is positive definite. Default: `ok`.
    """

    __slots__ = ()

    def __new__(
        cls,
        value: Tensor,
        ok: Tensor | None = None,
        iterations: Tensor | None = None,
        residual: Tensor | None = None,
        definite: Tensor | None = None,
    ) -> Self:
        ok = finite_blocks(value) if ok is None else ok
        iterations = torch.zeros_like(ok, dtype=torch.int32) if iterations is None else iterations
        residual = torch.zeros_like(ok, dtype=value.dtype) if residual is None else residual
        return super().__new__(cls, value, ok, iterations, residual, ok if definite is None else definite)


class _BasisTensors(NamedTuple):
    """The fields of `Basis`. `Basis` computes their default values in `__new__`, which a NamedTuple cannot define."""

    q: Tensor
    order: Tensor | None
    ok: Tensor


class Basis(_BasisTensors):
    """The result of a basis solver. `Basis(q)` is enough for a solver whose result has a number that is not finite
    whenever it fails.

    q: `[N, d, r]`, eigenvectors in columns, r = d or fewer.
    order: `[N, r]`, the index of the old column from which each new column was computed. None, the default: columns
        have no old counterpart.
    ok: bool `[N]`, False where the solver failed. Default: True where q is finite.
    """

    __slots__ = ()

    def __new__(cls, q: Tensor, order: Tensor | None = None, ok: Tensor | None = None) -> Self:
        if order is not None and (order.dtype is torch.bool or order.ndim != 2):
            raise TypeError(
                f"Basis: order must be whole numbers of shape [N, r], got {order.dtype} of shape {list(order.shape)}; "
                "pass `ok` by its name, as in Basis(q, ok=ok)"
            )
        return super().__new__(cls, q, order, finite_blocks(q) if ok is None else ok)


Diagonal = Callable[[Tensor], Tensor]
"""A function that maps q^T Q `[N, d, d]` to diag(Q^T A Q) `[N, d]`, with the old basis q and the new basis Q."""


class MatrixSolver(Schedulable):
    """Base class of root and basis solvers. `by_device` may replace a solver by a faster one with an equal result."""

    @classmethod
    def equal_to(cls, other: MatrixSolver, dtype: torch.dtype) -> Self | None:
        """Return the solver of this class that has the same result as `other` in exact arithmetic.

        Return None if there is no such solver, or if it would not be accurate for matrices of this dtype. `by_device`
        chooses between equal solvers.
        """
        return None

    def runs_on(self, device: str) -> str:
        """Return the type of the device on which the solver computes, for matrices on a device of type `device`."""
        return device


class RootSolver(MatrixSolver, ABC, family="root_solver"):
    """A^(-e) for symmetric positive semi-definite A `[N, d, d]`, where e > 0 is a fraction.

    Each matrix is solved separately. A matrix that fails is marked in `ok`. The failure changes no bit of the results
    of the other matrices. A stage raises ValueError at construction for an exponent that its solver does not accept.
    """

    @abstractmethod
    def root(self, a: Tensor, exponent: Fraction) -> Root:
        """Return the inverse roots A^(-e) of the matrices a `[N, d, d]`.

        This method is called when the refresh of a stage is due, with the estimate of its statistic. It never raises
        for a bad matrix: it sets `ok` of the result to False for this matrix, and the stage keeps its old root. The
        results of other matrices do not change.

        a: symmetric positive semi-definite matrices, float32 or float64. They must not be written to.
        exponent: e, a fraction such as 1/4 for A^(-1/4), that `check` accepts.
        """

    def check(self, exponent: Fraction) -> str | None:
        """Return the reason why this solver does not accept an exponent, as "<kind> takes exponents ..., got 1/3".

        None: the solver accepts the exponent. This method is called when a recipe is composed.
        """
        return None

    def regularized(self, values: Tensor) -> Tensor:
        """Return eigenvalues with the solver's ridge and its treatment of small eigenvalues.

        The eigenvalues of the root are the returned values raised to -e, with e the exponent. A returned 0 marks an
        eigenvalue that is left out of the root. The default changes no eigenvalue. A solver with a ridge must define
        this method, because `check_solver` compares the roots with it.

        values: eigenvalues `[N, d]` of A, in any order.
        """
        return values

    def diagonal_root(self, a: Tensor, exponent: Fraction) -> Root:
        """Return A^(-e) for diagonal matrices. They are given and returned as their diagonals `[N, d]`.

        This method is called in place of `root` for axes whose factor is a diagonal. The default raises the values of
        `regularized` to -e.
        """
        ok = a.isfinite().all(-1)
        values = self.regularized(torch.where(ok[:, None], a, 1.0))
        power = torch.where(values > 0, to_power(values, -float(exponent)), 0.0)
        ok = ok & power.isfinite().all(-1)
        return Root(power, ok, definite=ok & (power > 0).all(-1))


_LONGER_THAN_ANY_AXIS = 1 << 30
"""A length that no axis of a parameter reaches. `keeps_all_columns` tests with it if a solver keeps all columns of
any matrix.
"""


class BasisSolver(MatrixSolver, ABC, family="basis_solver"):
    """Q `[N, d, r]`, r <= d orthonormal columns for which Q^T A Q is (nearly) diagonal, for symmetric A `[N, d, d]`.

    Each matrix is solved separately. A matrix that fails is marked in `ok`. The failure changes no bit of the results
    of the other matrices.
    """

    unit_free: ClassVar[bool] = True
    """True if the solver returns the same basis for every positive multiple of A, so that A may have any unit."""

    def columns(self, d: int) -> int:
        """Return the number r of eigenvectors that are computed of a matrix `[d, d]`.

        r is d, or less if the solver computes only the basis of a subspace.
        """
        return d

    @property
    @final
    def keeps_all_columns(self) -> bool:
        """True if the solver computes all eigenvectors of a matrix of any size."""
        return self.columns(_LONGER_THAN_ANY_AXIS) == _LONGER_THAN_ANY_AXIS

    @abstractmethod
    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        """Return the bases of the matrices a `[N, d, d]`.

        This method is called when the refresh of a stage is due, with the estimate of its statistic. It never raises
        for a bad matrix: it sets `ok` of the result to False for this matrix, and the stage keeps its old basis.

        a: symmetric positive semi-definite matrices, float32 or float64. They must not be written to.
        q: `[N, d, r]`, the old bases. They must not be written to.
        first: True at the first refresh, when q has no information yet.
        """

    def basis_and_diagonal(self, a: Tensor, q: Tensor, first: bool) -> tuple[Basis, Diagonal | None]:
        """Return (basis, diagonal).

        basis: the result of the method `basis`, with the new basis Q.
        diagonal: function that maps q^T Q to diag(Q^T A Q), with less work than a product with A. None, as in the
            default: the solver has no such function.

        The arguments are those of `basis`.
        """
        return self.basis(a, q, first), None
