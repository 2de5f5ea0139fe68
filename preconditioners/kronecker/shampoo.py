"""Shampoo: a Kronecker product of inverse roots (Gupta, Koren & Singer 2018, arXiv:1802.09568)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.component import Component
from eigengraft.numerics import identity_like, per_block, to_power
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.exponents import Exponents, default_exponent, exponent_of
from ..algebra.products import mode_products
from ..algebra.spectra import root_residual
from ..base import DelayedRefresh
from ..roots import Eigh, RootSolver
from ..statistics import Power, has_data, mean_eigenvalue
from .base import Factored, joined


class Shampoo(Factored, DelayedRefresh):
    """d x_1 A_1^(-e) x_2 ... x_k A_k^(-e)  with A_i the statistic of axis i and e = 1 / (2k) by default.

    d is the direction, and x_i is the product along axis i. k is the number of axes that have a factor, so that
    one-sided Shampoo has e = 1/2 (as in Distributed Shampoo in JAX; An et al. 2025, ASGO, arXiv:2503.20762). Along an
    axis without a factor, or with exponent 0, d stays as it is.
    """

    kind: Literal["shampoo"] = "shampoo"
    exponent: Exponents = Field(
        default=None,
        description="e of each axis, or by order of the block as {2: 1/2, 1: 1/4} or {2: [1/2, 0]}; "
        "default 1 / (2 * number of axes with a factor)",
    )
    solver: RootSolver = Field(default=Eigh(), description="how roots are computed")
    matrix: ClassVar[Literal["root", "basis"]] = "root"

    @model_validator(mode="after")
    def _exponents_fit(self) -> Self:
        if self.exponent is not None:  # the default depends on the number of axes of a block, and `slots` checks it
            for order in self.exponent if isinstance(self.exponent, dict) else (2,):
                self._require_fit((2,) * order)
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"exponent": self.exponent}

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        self._require_fit(block)
        return super().slots(block)

    def _require_fit(self, block: tuple[int, ...]) -> None:
        """Raise ValueError if the stage cannot compute the roots and powers of factors that a block needs.

        The solver must accept the exponents of the block. If the statistic whitens gradients by powers of the factors
        (`Statistic.needs_power`), the stage must be able to compute these powers from a factor, or from its root.
        """
        order = len(block)
        for exponent in sorted({self._exponent(block, axis) for axis in range(order)} - {Fraction(0)}):
            problem = self.solver.check(exponent)
            if problem:
                able = ", ".join(kind for kind, solver in RootSolver.members.items() if _solves(solver, exponent))
                remedy = f"set another `exponent` for blocks of {order} axes, or a `solver` that accepts it ({able})"
                raise ValueError(f"exponent: {problem}; {remedy}")
            power = self.statistic.needs_power
            if order > 1 and power is not None and self.statistic.axes.entries == "full":
                self._require_power(power, exponent)

    def _require_power(self, p: Fraction, exponent: Fraction) -> None:
        """Raise ValueError unless A^p is a whole power of the factor A, or a whole power of its root A^(-exponent)."""
        if (p > 0 and p.denominator > 1) or (p < 0 and (-p / exponent).denominator > 1):
            raise ValueError(
                f"statistic: with q = {p + 1} it reads the power A^({p}) of each factor A, but this stage can compute "
                f"only A, A^2, ... from the factor, and A^(-{exponent}), A^(-{2 * exponent}), ... from its root; "
                f"choose q so that q - 1 is a whole number >= 0, or 1 - q a multiple of the exponent {exponent}"
            )

    def _exponent(self, block: tuple[int, ...], axis: int) -> Fraction:
        return exponent_of(self.exponent, len(block), axis, default_exponent(self.statistic.axes.of(block)))

    def factor_axes(self, block: tuple[int, ...]) -> tuple[int, ...]:
        if block not in self._factor_axes:  # cached, because this method is called several times a step for each stack
            axes = self.statistic.axes.of(block)
            self._factor_axes[block] = tuple(axis for axis in axes if self._exponent(block, axis))
        return self._factor_axes[block]

    @cached_property
    def _factor_axes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The axes that `factor_axes` has returned before, by shape of the block."""
        return {}

    def solved_alike(self, block: tuple[int, ...], axis: int) -> Hashable:
        # If 4 does not divide the length of an axis, the last bits of products of its matrix depend on the index of the
        # matrix in a stack. Such an axis has a key of its own, so that a solver computes its matrix alone.
        return self._exponent(block, axis), 0 if block[axis] % 4 == 0 else axis

    def refresh_axes(self, state: State, axes: Sequence[int], context: StepContext) -> None:
        for axis, value, ok in self._roots(state, axes, context):
            self.commit(state, axis, value, ok)

    def solve(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        found = dict[str, Tensor]()
        for axis, value, ok in self._roots(state, self.factor_axes(state.block), context):
            found |= self.results(axis, value, ok)
        return found

    def adopt(self, state: State, context: StepContext) -> None:
        for axis in self.factor_axes(state.block):
            (root, _, ok), tried = self.pending(state, axis)
            self.commit(state, axis, root, ok, tried)

    def _roots(self, state: State, axes: Sequence[int], context: StepContext) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Compute the roots of the present statistics of these axes. Yield (axis, root, ok).

        ok: bool `[N]`, True where the solver succeeded.
        """
        for equal in self.equal_axes(state, axes):
            estimate = joined([self.estimate(state, axis, context) for axis in equal])
            solve = self.solver.root if estimate.ndim == 3 else self.solver.diagonal_root
            found, parts = solve(estimate, self._exponent(state.block, equal[0])), len(equal)
            yield from zip(equal, found.value.chunk(parts), found.ok.chunk(parts), strict=True)

    def power(self, state: State, axis: int, exponent: Fraction, estimate: Tensor) -> Power:
        unit = mean_eigenvalue(estimate)
        if estimate.ndim == 2:
            return self._diagonal_power(exponent, estimate, unit)
        root, own = state[f"root.{axis}"], self._exponent(state.block, axis)
        scaled = estimate / per_block(unit, estimate)
        if exponent == 0:
            return Power(None, None, unit, scaled.diagonal(dim1=-2, dim2=-1).sum(-1), has_data(estimate))
        # True where A has data, and where its root has been computed at least once
        known = has_data(estimate) & (root != identity_like(root)).flatten(1).any(-1)
        base = scaled if exponent > 0 else root * per_block(to_power(unit, float(own)), root)
        times = int(exponent if exponent > 0 else -exponent / own)
        left = torch.linalg.matrix_power(base, (times + 1) // 2)
        right = torch.linalg.matrix_power(base, times // 2) if times > 1 else None
        if exponent == -1:
            trace = unit.new_full(unit.shape, estimate.shape[-1])
        else:
            trace = (scaled * (left if right is None else torch.bmm(left, right))).sum((-2, -1))
        return Power(left, right, unit, trace, known)

    def _diagonal_power(self, exponent: Fraction, estimate: Tensor, unit: Tensor) -> Power:
        """Return the power of a diagonal factor, after the solver has added its ridge to the factor.

        The power is computed from the present estimate of the factor, not from the stored root, which may be old.

        exponent: the power.
        estimate: the present estimate `[N, d]` of the factor.
        unit: `[N]`, the mean eigenvalue of the estimate.
        """
        values = self.solver.regularized(estimate) / per_block(unit, estimate)
        half = torch.where(values > 0, to_power(values, float(exponent) / 2), 0.0)
        trace = (values * half.square()).sum(-1) if exponent != -1 else unit.new_full(unit.shape, values.shape[-1])
        return Power(half, half, unit, trace, has_data(estimate))

    def measures(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        """Return `residual` of each root X: ||A (X^(1/e) A - I)||_F / ||A||_F, with A the present estimate of the
        statistic and e the exponent.

        A has changed since the last refresh of X, which makes the residual larger.
        """
        found = {}
        for axis, root in self.matrices(state).items():
            exponent = self._exponent(state.block, axis)
            powers = (exponent.denominator, exponent.numerator)
            found[f"root.{axis}/residual"] = root_residual(self.estimate(state, axis, context), root, powers)
        return found

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        first = self.every.first_due(1)
        if first > 1 and self.precision == "input" and context.holds(lambda steps: steps >= first) is False:
            return direction  # before their first refresh all roots are the identity
        return mode_products(direction, self.matrices(state), self.precision)


def _solves(solver: type[Component], exponent: Fraction) -> bool:
    """Return True if a root solver with its default settings accepts an exponent."""
    needs = any(field.is_required() for field in solver.model_fields.values())
    return issubclass(solver, RootSolver) and not needs and solver().check(exponent) is None
