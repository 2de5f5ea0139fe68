"""A chain run in the eigenbasis of the statistics: SOAP and its relatives (Vyas et al. 2024, arXiv:2409.11321)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.blocking.blocks import matrix_shape
from eigengraft.numerics import identity_like, may_branch_on_values, per_block, rectified, tiny, to_power, where_blocks
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..algebra.products import rotate
from ..algebra.spectra import off_diagonal_share, turning_angle
from ..base import DelayedRefresh, Inner, Stages, Traits, chain_bounds, chain_slots, run_chain
from ..roots import Basis, BasisSolver, PowerQR
from ..roots.base import Diagonal
from ..statistics import Power, has_data, mean_eigenvalue
from .base import Factored, joined
from .basis_change import (
    ChainSlot,
    Transport,
    Turn,
    fit_second_moments,
    marginals,
    order_or_identity,
    require_frameless,
    require_marginals,
    transport,
    weights,
)


class Eigenbasis(Factored, DelayedRefresh):
    """Q inner(Q^T g, Q^T d)  with Q = Q_1 x ... x Q_k,  Q_i the eigenvectors of the statistic A_i of axis i

    g is the gradient, d the direction, and Q^T g is g multiplied by Q_i^T along every axis i. SOAP is `inner:
    [momentum, rms]`.

    timing: the order of learning from a gradient and using it.
      current: the stage observes and refreshes before the gradient is used. A single gradient is diagonal in its own
          basis, and the inner chain would normalize the rounding errors off the diagonal. Therefore set `refresh.start`
          to 2 or more.
      lagged: the stage observes and refreshes afterwards, as in the authors' code of SOAP. The first gradient is used
          for the basis only.

    transport: the change of inner state when Q changes by R = Q_old^T Q_new. Vectors are slots such as first moments,
    squares are slots such as second moments.
      exact: vectors are rotated, squares are transported by (R*R)^T, where * is the product of entries.
      marginals: as exact, and then the second moments v are fitted. In any basis, the statistics give the sums that v
          should have: for the first axis of a matrix, sum_j v_ij = diag(Q_1^T A_1 Q_1)_i. v is fitted to these sums for
          every axis. Finally v of each block is scaled up until RMS(m / sqrt(v)), with m the first moment, is at most
          the larger of RMS(m) / sqrt(mean v) and sqrt(1 - beta), with beta the decay of v.
      permute: vectors are rotated. Squares are only reordered in the order of the columns of Q, as in the authors' code
          of SOAP.
      none: no state changes.

    statistic_frame: the basis in which the statistic of axis i is accumulated.
      fixed: the statistic is A_i.
      basis: the statistic is B_i = Q_i^T A_i Q_i, accumulated from gradients that are in the basis already. At a
          refresh the solver computes the eigenvectors P of B_i; the new basis is Q_i P, rectified by one Bjorck step,
          and R is P.

    In exact arithmetic `fixed` and `basis` give the same result. With `basis`, B_i is nearly diagonal, and R is
    orthogonal even if Q_i is coarsely quantized. Quantizing Q_i then only rotates the basis slightly, and adds no error
    to state that is in the basis.
    """

    kind: Literal["eigenbasis"] = "eigenbasis"
    chain: Stages = Field(alias="inner", min_length=1, description="the chain that runs in the basis")
    solver: BasisSolver = Field(default=PowerQR(by_device=True), description="how the basis is computed")
    matrix: ClassVar[Literal["root", "basis"]] = "basis"
    timing: Literal["current", "lagged"] = Field(
        default="current", description="observe and refresh before (current) or after (lagged) the gradient is used"
    )
    transport: Transport = Field(default="exact", description="how the state of `inner` changes with the basis")
    statistic_frame: Literal["fixed", "basis"] = Field(
        default="fixed",
        description="basis in which statistics accumulate; fixed: that of the gradient; basis: their own basis Q",
    )
    floor: float = Field(
        default=1e-3,
        ge=0,
        lt=1,
        description="lower bound of the eigenvalues by which gradients are whitened for other axes, in units of their "
        "mean",
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.statistic.needs_power is None and self.floor != type(self).model_fields["floor"].default:
            raise ValueError(
                f"floor: {self.floor} has no effect with a statistic that reads no factors of other axes; remove it"
            )
        if self.statistic.needs_power is None and (scaling := self.statistic.trace_scaling):
            raise ValueError(f"statistic: trace_scaling: has no effect on a basis and must be 0, got {scaling}")
        if self.statistic.axes.has_diagonals:
            raise ValueError("statistic: axes: eigenbasis needs full factors, got diagonal ones; set entries: full")
        if not self.solver.keeps_all_columns:
            if self.statistic.needs_power is not None:
                raise ValueError(
                    "statistic: it reads powers of full factors, but the solver computes only a subspace; use a "
                    "`solver` that keeps all columns"
                )
            if self.statistic_frame == "basis":
                raise ValueError(
                    "statistic_frame: 'basis' needs all columns of a basis, but the solver keeps fewer; use another "
                    "`solver`"
                )
        require_frameless(self.chain, "inner")
        if self.transport == "marginals":
            require_marginals(self.statistic, self.chain, self.solver.keeps_all_columns)
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"statistic_frame": self.statistic_frame}

    def columns(self, d: int) -> int:
        return self.solver.columns(d)

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        axes = self.factor_axes(block)
        inner_block = tuple(self.columns(d) if axis in axes else d for axis, d in enumerate(block))
        return {"inner": Inner(self.chain, inner_block)}

    def traits(self, block: tuple[int, ...]) -> Traits:
        norm, gain = chain_bounds(self.chain, block)
        if all(stage.cached_traits(block).entrywise for stage in self.chain):
            # The bounds of entry-wise stages are made for the worst m x n matrix of signs, whose spectral norm is
            # sqrt(m n). In the basis, the signs of a direction are like random signs, with a spectral norm of about
            # sqrt(m) + sqrt(n). `share` is the ratio of the two norms.
            m, n = matrix_shape(block)
            share = 1 / math.sqrt(m) + 1 / math.sqrt(n)
            norm, gain = (bound if bound is None else bound * share for bound in (norm, gain))
        own = super().traits(block)
        return replace(own, lagged=self.timing == "lagged", spectral_norm=norm, spectral_gain=gain)

    def in_frame(self, state: State, x: Tensor, context: StepContext) -> Tensor:
        if self.statistic_frame == "fixed":
            return x
        cached = context.kept.get(state.path)
        if cached is None:
            cached = context.kept[state.path] = self._rotated(state, x)
        rotated: Tensor = cached.rotated if x is cached.x else self._inward(x, cached.bases)
        return rotated

    def frame_changed(self, state: State, rows: tuple[int, int], context: StepContext) -> None:
        if (cached := context.kept.get(state.path)) is None:
            return
        own = slice(*rows)
        new = self._rotated(state, cached.x[own])
        for axis, q in cached.bases.items():
            # if reading the slot made a copy, q still has the old basis; otherwise q is the slot, with the new basis
            if state.copied(f"basis.{axis}"):
                q[own].copy_(new.bases[axis])
        if cached.bases:  # if no axis has a basis, `rotated` is the gradient itself, which must not be written to
            cached.rotated[own].copy_(new.rotated)

    def _rotated(self, state: State, x: Tensor) -> _Rotated:
        """Return x `[N, *block]`, the present bases, and x multiplied by the transpose of the basis of each axis."""
        bases = self.matrices(state)
        return _Rotated(x, bases, self._inward(x, bases))

    def _inward(self, x: Tensor, bases: Mapping[int, Tensor]) -> Tensor:
        return rotate(x, {axis: q.mT for axis, q in bases.items()}, self.precision)

    @property
    def pending_order(self) -> bool:
        return self.transport == "permute"

    def refresh_axes(self, state: State, axes: Sequence[int], context: StepContext) -> None:
        self._change_basis(state, self._solutions(state, axes, context))

    def solve(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        found, axes = dict[str, Tensor](), self.factor_axes(state.block)
        if self.statistic_frame == "basis":
            for axis in axes:
                p, order, ok = self._in_basis(state, axis, context)
                found |= self.results(axis, p, ok, order)
            return found
        for equal in self.equal_axes(state, axes):
            _, (q, order, ok), _ = self._computed(state, equal, context)
            orders: Sequence[Tensor | None] = [None] * len(equal) if order is None else order.chunk(len(equal))
            parts = zip(equal, q.chunk(len(equal)), ok.chunk(len(equal)), orders, strict=True)
            for axis, q_axis, ok_axis, order_axis in parts:
                found |= self.results(axis, q_axis, ok_axis, order_axis)
        return found

    def adopt(self, state: State, context: StepContext) -> None:
        solved = dict[int, _Solved]()
        for axis in self.factor_axes(state.block):
            found, tried = self.pending(state, axis)
            if self.statistic_frame == "basis":
                turn = self._turned(state, axis, found, tried)
            else:
                turn = self._turn(state, axis, state[f"basis.{axis}"], found, tried)
            solved[axis] = turn, found.ok, tried, None
        self._change_basis(state, solved)

    def _change_basis(self, state: State, solved: Mapping[int, _Solved]) -> None:
        """Transport the state of the inner chain along all axes in `solved`, then write the new bases to their slots.

        solved: by axis, the change of basis and the outcome of the solver, as `_solutions` returns them.
        """
        turns = {axis: turn for axis, (turn, *_) in solved.items()}
        transport(self._inside(state.block).slots, self._inner_state(state), turns, self.transport)
        for axis, (turn, ok, tried, _) in solved.items() if self.statistic_frame == "fixed" else ():
            if not state.coded(f"basis.{axis}"):
                self.commit(state, axis, turn.new, ok, tried)
        if self.transport == "marginals":
            self._fit(state, {axis: diagonal for axis, (*_, diagonal) in solved.items() if diagonal is not None})

    def _fit(self, state: State, found: Mapping[int, Tensor]) -> None:
        """Scale the second moments of the inner chain so that they fit the statistics in the new basis.

        For an axis with the basis Q and the statistic A, diag(Q^T A Q) are the sums of squared gradients in the basis
        over all other axes. `fit_second_moments` gives the second moments these sums.

        found: by axis, diag(Q^T A Q) `[N, d]` if the solver computed it as a by-product; NaN for blocks without it.
        """
        axes = self.factor_axes(state.block)
        bases = {} if self.statistic_frame == "basis" else self.matrices(state)
        d = {axis: marginals(state[f"factor.{axis}"], bases.get(axis), found.get(axis)) for axis in axes}
        power = self.statistic.needs_power
        scales = {} if power is None else {axis: weights(own, power, self.floor) for axis, own in d.items()}
        fit_second_moments(self._inside(state.block).slots, self._inner_state(state), d, scales)

    def _solutions(self, state: State, axes: Sequence[int], context: StepContext) -> dict[int, _Solved]:
        """Compute new bases of these axes. Return {axis: (change of basis, ok, tried, diagonal)}.

        `_Solved` describes the four values: ok says where the solver succeeded, tried where it was run, and diagonal is
        diag(Q^T A Q) if it was computed.
        """
        if self.statistic_frame == "basis":
            found = {axis: self._in_basis(state, axis, context) for axis in axes}
            return {axis: (self._turned(state, axis, own), own.ok, None, None) for axis, own in found.items()}
        solved = dict[int, _Solved]()
        for equal in self.equal_axes(state, axes):
            solved |= zip(equal, self._solved(state, equal, context), strict=True)
        return solved

    def _computed(
        self, state: State, axes: Sequence[int], context: StepContext
    ) -> tuple[Tensor, Basis, Diagonal | None]:
        """Compute the bases of several axes, whose matrices have the same shape, as one stack.

        Return (old, found, diagonal).

        old: the present bases.
        found: the new bases Q, as the solver returned them.
        diagonal: function that computes diag(Q^T A Q), as `BasisSolver.basis_and_diagonal` returns it, or None.
        """
        # Without a slow mean the estimate is a multiple of the stored factor. A solver with `unit_free` returns the
        # same basis for both, and then receives the factor, so that the estimate need not be computed.
        stored = self.solver.unit_free and self.statistic.slow is None
        old = joined([state[f"basis.{axis}"] for axis in axes])
        a = (state[f"factor.{axis}"] if stored else self.estimate(state, axis, context) for axis in axes)
        return old, *self.solver.basis_and_diagonal(joined(list(a)), old, context.first)

    def _turn(self, state: State, axis: int, old: Tensor, found: Basis, tried: Tensor | None = None) -> Turn:
        """Return the change from the present basis of an axis to a new basis.

        A quantized basis is written to its slot at once, because the change must be computed from the basis that is
        stored, with its rounding. A basis that is not quantized is written later by `_change_basis`, after the state of
        the inner chain was transported to the new basis.

        axis: the axis, or the first of several axes whose bases are one stack. Quantized bases are never in one stack.
        old: the present basis.
        found: the new basis, as the solver returned it.
        tried: bool `[N]`, True where the solver was run. None: it was run for all blocks.
        """
        q, order, ok = found
        coded = state.coded(f"basis.{axis}")
        if coded:
            self.commit(state, axis, q, ok, tried)
        return Turn(state[f"basis.{axis}"] if coded else where_blocks(ok, q, old), old, order_or_identity(order, ok))

    def _solved(self, state: State, axes: Sequence[int], context: StepContext) -> list[_Solved]:
        """Compute the new bases of several axes, whose matrices have the same shape, as one stack.

        Return for each axis (change of basis, ok, tried, diagonal). `_Solved` describes the four values: ok says where
        the solver succeeded, tried where it was run, and diagonal is diag(Q^T A Q) if it was computed.
        """
        parts = len(axes)
        old, found, diagonal = self._computed(state, axes, context)
        turn = self._turn(state, axes[0], old, found)
        diagonals: Sequence[Tensor | None] = [None] * parts
        if self.transport == "marginals" and diagonal is not None and not turn.stays and may_branch_on_values(old):
            same = (turn.new == found.q).flatten(1).all(1) if state.coded(f"basis.{axes[0]}") else found.ok
            diagonals = torch.where(same[:, None], diagonal(turn.rotation), math.nan).chunk(parts)
        return list(zip(turn.chunk(parts), found.ok.chunk(parts), [None] * parts, diagonals, strict=True))

    def _in_basis(self, state: State, axis: int, context: StepContext) -> Basis:
        """Return P `[N, d, d]`, the eigenvectors of the statistic of an axis, for `statistic_frame: basis`."""
        eye = identity_like(state[f"basis.{axis}"])
        return self.solver.basis(self.estimate(state, axis, context), eye, context.first)

    def _turned(self, state: State, axis: int, found: Basis, tried: Tensor | None = None) -> Turn:
        """Multiply the basis of an axis by P, the eigenvectors of the statistic in this basis, and rotate the statistic
        by P.

        Return the change of basis.

        found: P, as `_in_basis` returns it.
        tried: bool `[N]`, True where the solver was run. None: it was run for all blocks.
        """
        (p, order, ok), q = found, state[f"basis.{axis}"]
        turn = Turn(where_blocks(ok, p, identity_like(q)), order=order_or_identity(order, ok))
        self.commit(state, axis, rectified(torch.bmm(q, turn.new), 1), ok, tried)
        if not turn.stays:
            self.statistic.rotate(state, axis, turn.new)
        return turn

    def power(self, state: State, axis: int, exponent: Fraction, estimate: Tensor) -> Power:
        unit = mean_eigenvalue(estimate)
        if self.statistic_frame == "basis":
            values = estimate.diagonal(dim1=-2, dim2=-1) / unit[:, None]
        else:
            q = state[f"basis.{axis}"]
            values = (q * torch.bmm(estimate / per_block(unit, estimate), q)).sum(-2)  # [N, d]: diag(Q^T A Q) / unit
        values = values.clamp_min(max(self.floor, tiny(values.dtype)))
        trace = to_power(values, float(exponent + 1)).sum(-1)
        if exponent == 0:
            return Power(None, None, unit, trace, has_data(estimate))
        half = to_power(values, float(exponent) / 2)
        if self.statistic_frame == "fixed":
            half = half.unsqueeze(-1) * q.mT
        return Power(half, half, unit, trace, has_data(estimate))

    def _inner_state(self, state: State) -> State:
        return state.scope("inner", self._inside(state.block).block)

    def _inside(self, block: tuple[int, ...]) -> _Inside:
        """Return the shape of a block inside the inner chain and the slots of the chain. They are cached by shape of
        the block.
        """
        if block not in self._insides:
            inner = self.inner(block)["inner"].block
            self._insides[block] = _Inside(inner, tuple(chain_slots(self.chain, inner)))
        return self._insides[block]

    @cached_property
    def _insides(self) -> dict[tuple[int, ...], _Inside]:
        return {}

    def measures(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        """Return `off_diagonal` and `angle` of each basis if statistics are accumulated in the basis.

        Otherwise return an empty mapping, because `inspect` then computes both measures from the slots.
        """
        found = {}
        for axis in self.factor_axes(state.block) if self.statistic_frame == "basis" else ():
            b = self.estimate(state, axis, context)
            found[f"basis.{axis}/off_diagonal"] = off_diagonal_share(b)
            found[f"basis.{axis}/angle"] = turning_angle(b, identity_like(b))
        return found

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        cached = context.kept.get(state.path)
        if cached is None:
            cached = self._rotated(state, gradient)
            if self.statistic_frame == "basis":  # in a lagged stage, `observe` runs after `apply`, and reads the cache
                context.kept[state.path] = cached
        elif not self.statistic.sequential:
            for start, stop, _ in self.due(context):
                rows = state if stop - start == len(gradient) else state.slice_rows(start, stop)
                self.frame_changed(rows, (start, stop), context)
            del context.kept[state.path]
        g, d = (cached.rotated if x is cached.x else self._inward(x, cached.bases) for x in (gradient, direction))
        mapped, bases = run_chain(self.chain, self._inner_state(state), g, d, context), cached.bases
        del cached, g, d  # frees the rotated tensors before the products allocate others
        return rotate(mapped, bases, self.precision)


class _Inside(NamedTuple):
    """The shape of a block inside the inner chain, and the slots of the chain."""

    block: tuple[int, ...]
    slots: Sequence[ChainSlot]


class _Rotated(NamedTuple):
    """A gradient in the basis of its statistics, cached between the hooks of a step.

    x: `[N, *block]`, the gradient that was rotated.
    bases: by axis, the basis Q `[N, d, d]` at the time of the rotation.
    rotated: `[N, *block]`, x multiplied by Q^T along every axis that has a basis.
    """

    x: Tensor
    bases: Mapping[int, Tensor]
    rotated: Tensor


_Solved = tuple[Turn, Tensor, Tensor | None, Tensor | None]
"""The result of a refresh of one axis, as four values:

turn: the change of basis.
ok: bool `[N]`, True where the solver succeeded.
tried: bool `[N]`, True where the solver was run. None: it was run for all blocks.
diagonal: diag(Q^T A Q) `[N, d]`. None: the solver did not compute this diagonal.
"""
