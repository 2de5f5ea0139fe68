"""The two families of this room, and the one place where an eigendecomposition can fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from eigengraft.numerics import to_power
from eigengraft.ramps import Schedulable


class Root(NamedTuple):
    """value `[N, d, d]`, the inverse root; ok `[N]`, False where the solver failed and the value must not be used.

    The report stays on the device, nobody waits for it: iterations `[N]`, 0 for direct solvers; residual `[N]`, the
    solver's own measure of what is left, 0 where it has none; definite `[N]`, whether the value is positive definite.
    For a diagonal matrix kept as its diagonal, value is `[N, d]`.
    """

    value: Tensor
    ok: Tensor
    iterations: Tensor
    residual: Tensor
    definite: Tensor


class Basis(NamedTuple):
    """q `[N, d, r]`, r = d or fewer eigenvectors in columns; order `[N, r]`, the old column that each new one came
    from, or None where columns have no old counterpart; ok `[N]`, False where the solver failed."""

    q: Tensor
    order: Tensor | None
    ok: Tensor


Diagonal = Callable[[Tensor], Tensor]
"""q^T Q `[N, d, d]` of the basis before and the new one, both orthonormal -> diag(Q^T A Q) `[N, d]`."""


class RootSolver(Schedulable, ABC, family="root_solver"):
    """A^(-e) for symmetric positive semi-definite A `[N, d, d]`, e > 0 a fraction; in units of A to the power -e.

    Matrices are solved apart: one that fails is marked, the others keep every bit. An exponent that a solver cannot
    take is a ValueError when a stage is made.
    """

    @abstractmethod
    def root(self, a: Tensor, exponent: Fraction) -> Root:
        """a `[N, d, d]`, exponent e > 0.

        Never raises for a bad matrix: it is marked in `ok`, the others are unaffected.
        """

    def check(self, exponent: Fraction) -> str | None:
        """Why this solver cannot take that exponent, or None."""
        return None

    @classmethod
    def equal_to(cls, other: RootSolver, dtype: torch.dtype) -> Self | None:
        """Return the solver of this class that computes what another one does, in exact arithmetic, for matrices of a
        dtype. None: there is none, or it would not be accurate. `by_device` chooses between such solvers."""
        return None

    def runs_on(self, device: str) -> str:
        """Return the type of the device that does the work for matrices on a device of a type."""
        return device

    def regularized(self, values: Tensor) -> Tensor:
        """Eigenvalues `[N, d]` in any order as this solver would raise them to -e: with its ridge; 0: left out."""
        return values

    def diagonal_root(self, a: Tensor, exponent: Fraction) -> Root:
        """A^(-e) for diagonal matrices, given and returned as their diagonals `[N, d]`, elementwise."""
        ok = a.isfinite().all(-1)
        values = self.regularized(torch.where(ok[:, None], a, 1.0))
        power = torch.where(values > 0, to_power(values, -float(exponent)), 0.0)
        ok = ok & power.isfinite().all(-1)
        nothing = torch.zeros_like(ok)
        return Root(power, ok, nothing.int(), nothing.to(a.dtype), ok & (power > 0).all(-1))


_LONGER_THAN_ANY_AXIS = 1 << 30


class BasisSolver(Schedulable, ABC, family="basis_solver"):
    """Q `[N, d, r]`, orthonormal columns that (nearly) diagonalise symmetric A `[N, d, d]` as Q^T A Q; r <= d.

    Q has no unit. Matrices are solved apart: one that fails is marked, the others keep every bit.
    """

    unit_free: ClassVar[bool] = True
    """Whether positive multiples of A have the same basis, so that a solver may be shown any of them."""

    @classmethod
    def equal_to(cls, other: BasisSolver, dtype: torch.dtype) -> Self | None:
        """Return the solver of this class that computes what another one does, in exact arithmetic, for matrices of a
        dtype. None: there is none, or it would not be accurate. `by_device` chooses between such solvers."""
        return None

    def runs_on(self, device: str) -> str:
        """Return the type of the device that does the work for matrices on a device of a type."""
        return device

    def columns(self, d: int) -> int:
        """How many eigenvectors of a `[d, d]` matrix are kept: d, or fewer where the basis spans a subspace."""
        return d

    @property
    def keeps_all_columns(self) -> bool:
        """Whether a basis has all eigenvectors, of a matrix of any size."""
        return self.columns(_LONGER_THAN_ANY_AXIS) == _LONGER_THAN_ANY_AXIS

    @abstractmethod
    def basis(self, a: Tensor, q: Tensor, first: bool) -> Basis:
        """a `[N, d, d]`, q the basis so far; `first` at the first refresh, when q carries nothing yet."""

    def basis_and_diagonal(self, a: Tensor, q: Tensor, first: bool) -> tuple[Basis, Diagonal | None]:
        """`basis`, and what gives diag(Q^T A Q) for less than a product with A.

        None where a solver has nothing that would give it, as by default.
        """
        return self.basis(a, q, first), None
