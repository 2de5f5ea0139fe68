"""The two families of solvers: inverse roots, and eigenbases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from eigengraft.numerics import to_power
from eigengraft.schedules import Schedulable


class Root(NamedTuple):
    """The result of a root solver.

    value: `[N, d, d]`, the inverse root; `[N, d]`, the diagonal of the root, if matrices were given as diagonals.
    ok: bool `[N]`, False where the solver failed and the value must not be used.
    iterations: `[N]`, 0 for direct solvers.
    residual: `[N]`, the solver's own measure of the remaining error, 0 if it has none.
    definite: bool `[N]`, True where the value is positive definite.

    All tensors stay on the device, so that the host does not wait.
    """

    value: Tensor
    ok: Tensor
    iterations: Tensor
    residual: Tensor
    definite: Tensor


class Basis(NamedTuple):
    """The result of a basis solver.

    q: `[N, d, r]`, r <= d eigenvectors in columns.
    order: `[N, r]`, the index of the old column from which each new column was computed. None: there is no such order.
    ok: bool `[N]`, False where the solver failed.
    """

    q: Tensor
    order: Tensor | None
    ok: Tensor


Diagonal = Callable[[Tensor], Tensor]
"""A function that maps q^T Q `[N, d, d]` to diag(Q^T A Q) `[N, d]`, where q is the old and Q the new orthonormal basis.
"""


class RootSolver(Schedulable, ABC, family="root_solver"):
    """A^(-e) for symmetric positive semi-definite A `[N, d, d]`, where e > 0 is a fraction.

    Each matrix is solved separately: a matrix that fails is marked in `ok`, and the results of all other matrices do
    not change by a bit. A stage raises ValueError at construction for an exponent that its solver does not accept.
    """

    @abstractmethod
    def root(self, a: Tensor, exponent: Fraction) -> Root:
        """Return the inverse roots of a `[N, d, d]` for an exponent e > 0.

        A solver never raises for a bad matrix. Instead the matrix is marked in `ok`, and the results of other matrices
        do not change.
        """

    def check(self, exponent: Fraction) -> str | None:
        """Return the reason why this solver does not accept an exponent, or None if the exponent is accepted."""
        return None

    @classmethod
    def equal_to(cls, other: RootSolver, dtype: torch.dtype) -> Self | None:
        """Return the solver of this class that has the same result as another solver in exact arithmetic.

        Return None if there is no such solver, or if it would not be accurate for matrices of this dtype. `by_device`
        chooses between equal solvers.
        """
        return None

    def runs_on(self, device: str) -> str:
        """Return the type of the device that does the work for matrices on a device of the given type."""
        return device

    def regularized(self, values: Tensor) -> Tensor:
        """Return eigenvalues with the solver's ridge and its treatment of small eigenvalues.

        The solver raises the returned values to -e. A result of 0 marks an eigenvalue that is left out of the root.

        values: eigenvalues `[N, d]` of A, in any order.
        """
        return values

    def diagonal_root(self, a: Tensor, exponent: Fraction) -> Root:
        """Return A^(-e) for diagonal matrices. Matrices and roots are represented by their diagonals `[N, d]`."""
        ok = a.isfinite().all(-1)
        values = self.regularized(torch.where(ok[:, None], a, 1.0))
        power = torch.where(values > 0, to_power(values, -float(exponent)), 0.0)
        ok = ok & power.isfinite().all(-1)
        nothing = torch.zeros_like(ok)
        return Root(power, ok, nothing.int(), nothing.to(a.dtype), ok & (power > 0).all(-1))


_LONGER_THAN_ANY_AXIS = 1 << 30
"""Length that no axis of a parameter reaches. A solver keeps all columns if it does so even for an axis of this length.
"""


class BasisSolver(Schedulable, ABC, family="basis_solver"):
    """Q `[N, d, r]`, r <= d orthonormal columns for which Q^T A Q is (nearly) diagonal, for symmetric A `[N, d, d]`.

    Each matrix is solved separately: a matrix that fails is marked in `ok`, and the results of all other matrices do
    not change by a bit.
    """

    unit_free: ClassVar[bool] = True
    """True if the solver returns the same basis for every positive multiple of A, so that it may receive A in any
    scale.
    """

    @classmethod
    def equal_to(cls, other: BasisSolver, dtype: torch.dtype) -> Self | None:
        """Return the solver of this class that has the same result as another solver in exact arithmetic.

        Return None if there is no such solver, or if it would not be accurate for matrices of this dtype. `by_device`
        chooses between equal solvers.
        """
        return None

    def runs_on(self, device: str) -> str:
        """Return the type of the device that does the work for matrices on a device of the given type."""
        return device

    def columns(self, d: int) -> int:
        """Return the number r of eigenvectors of a `[d, d]` matrix that are computed.

        r is d, or less if the solver computes only the basis of a subspace.
        """
        return d

    @property
    def keeps_all_columns(self) -> bool:
        """True if a basis has all eigenvectors of a matrix of any size."""
        return self.columns(_LONGER_THAN_ANY_AXIS) == _LONGER_THAN_ANY_AXIS

    @abstractmethod
    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        """Return the basis of a `[N, d, d]`.

        q: `[N, d, r]`, the basis of the last refresh.
        first: True at the first refresh, when q contains no information yet.
        """

    def basis_and_diagonal(self, a: Tensor, q: Tensor, first: bool) -> tuple[Basis, Diagonal | None]:
        """Return the result of `basis`, and a function that computes diag(Q^T A Q) with less work than a product with
        A.

        Instead of the function, the default returns None, as does a solver that cannot compute the diagonal so.
        """
        return self.basis(a, q, first), None
