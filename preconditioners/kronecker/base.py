"""The base of stages with Kronecker factors: they have a statistic for each axis, and compute a matrix from it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import ClassVar, Literal, NamedTuple, Self, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import fills_lines, known_to_hold, where_blocks
from eigengraft.signals import Request
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import ProductDtype
from ..base import Stage, Traits
from ..cadence import Cadence, Every
from ..roots import Basis
from ..roots.power_qr import identity_order
from ..statistics import Gram, Power, Statistic


class Factored(Stage):
    """A stage with a statistic A_i for each axis i of the block. A refresh computes a root or a basis of A_i.

    The root or basis is stored in the slot `root.<i>` or `basis.<i>`, `[N, d, d]`, and is the identity before the first
    refresh. If the solver fails for a matrix, the slot keeps the last root or basis of this matrix. The slot
    `failures.<i>` counts consecutive failures; a refresh that succeeds resets the count. The root of a diagonal factor
    is stored as its diagonal `[N, d]`. If the stage is inside an `eigenbasis`, this diagonal is transformed whenever
    the basis changes.

    matrix: "root" or "basis", the kind of matrix that a refresh computes.
    """

    statistic: Statistic = Field(default=Gram(), description="statistic that each axis accumulates")
    every: Cadence = Field(default=Every(), alias="refresh", description="steps in which roots or bases are recomputed")
    precision: ProductDtype = Field(
        default="input",
        description="dtype of the products of blocks with the matrices; the stored matrices are not rounded",
    )
    matrix: ClassVar[Literal["root", "basis"]]

    @model_validator(mode="after")
    def _has_observations(self) -> Self:
        first = self.every.first_due(1)
        if first < self.statistic.start:
            raise ValueError(
                f"statistic.start: must be at most {first}, the step of the first refresh, because a refresh needs an "
                f"observed gradient, got {self.statistic.start}; set refresh.start to {self.statistic.start} or more"
            )
        return self

    @model_validator(mode="after")
    def _delay_fits(self) -> Self:
        if self.every.postponed and self.statistic.sequential:
            raise ValueError(
                f"refresh: `delay: {self.every.postponed}` cannot be combined with a statistic with "
                "`order: gauss_seidel`, which reads the refreshed matrix of an axis in the same step; remove delay, or "
                "set `order: jacobi`"
            )
        return self

    @property
    def pending_order(self) -> bool:
        """True if a delayed refresh stores not only a new basis, but also the new order of its columns, until it takes
        effect.
        """
        return False

    def factor_axes(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes of a block that have a factor."""
        return self.statistic.axes.of(block)

    def columns(self, d: int) -> int:
        """Return the number of columns of the root or basis of an axis of length d: d, unless a basis keeps fewer."""
        return d

    def solved_alike(self, block: tuple[int, ...], axis: int) -> Hashable:
        """Return a key for an axis. A solver may compute the matrices of axes with equal keys and equal shapes in one
        call. The default is the same key for all axes.
        """
        return None

    @abstractmethod
    def refresh_axes(self, state: State, axes: Sequence[int], context: StepContext) -> None:
        """Recompute the roots or bases of these axes from their statistics, and store them by `commit`."""

    @abstractmethod
    def power(self, state: State, axis: int, exponent: Fraction, estimate: Tensor) -> Power:
        """Return A^exponent for the statistic A of an axis, in the form of a `Power`. Statistics whiten gradients by
        this power if their `needs_power` is not None.

        The power is computed from the root or basis that the stage stores, and from the estimate.

        estimate: the present estimate of A, `[N, d, d]`, or `[N, d]` for a diagonal factor.
        """

    def cadence(self) -> Cadence:
        return self.every

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        slots = dict(self.statistic.slots(block, self.factor_axes(block)))
        for axis in self.factor_axes(block):
            d = block[axis]
            if self.statistic.axes.full(block, axis):
                slot = Slot((d, self.columns(d)), fill="identity", role=self.matrix, axes=(axis,))
            else:
                slot = Slot((d,), fill=1.0, role=self.matrix, frame="square", axes=(axis,))
            slots[f"{self.matrix}.{axis}"] = slot
            slots[f"failures.{axis}"] = Slot((), role="failures", dtype=torch.int32)
            if self.every.postponed:
                slots[_pending_slot(self.matrix, axis)] = Slot(slot.shape, role="pending")
                slots[_pending_slot("result", axis)] = Slot((), role="pending", dtype=torch.int32)
                if self.pending_order:
                    slots[_pending_slot("order", axis)] = Slot(slot.shape[-1:], role="pending", dtype=torch.int64)
        return slots

    def traits(self, block: tuple[int, ...]) -> Traits:
        axes, source = self.statistic.axes, self.statistic.source
        cost = sum(block[axis] ** (3 if axes.full(block, axis) else 1) for axis in self.factor_axes(block))
        return Traits(
            signals=tuple(Request(name, interval=self.statistic.interval) for name in sorted(self.statistic.requires)),
            matrices=source == "orthogonalized" or self.statistic.of_inputs,
            learns="gradient" if source == "gradient" else "direction",
            refresh_cost=float(cost),
            left_out=axes.left_out(block),
        )

    def in_frame(self, state: State, x: Tensor, context: StepContext) -> Tensor:
        """Return x `[N, *block]` in the basis in which the statistic accumulates.

        The default is the basis of the gradient, in which x is given.
        """
        return x

    def frame_changed(self, state: State, rows: tuple[int, int], context: StepContext) -> None:
        """Rotate a cached gradient to the new basis, after a refresh changed the basis of some blocks.

        A stage may cache results of `in_frame` for the later hooks of a step. The default has no cache and does
        nothing.

        state: state of these blocks.
        rows: (start, stop). The blocks have the numbers start to stop - 1 in the stack.
        """

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        x, axes = self.statistic.observed(gradient), self.factor_axes(state.block)
        if self.statistic.warm_start:
            self._observe_first(state, x, context)
        if not self.statistic.sequential:
            self._observe(state, x, axes, (), context)
            return
        for k, axis in enumerate(axes):
            self._observe(state, x, (axis,), axes[:k], context)
            for start, stop, first in self.due(context):
                rows = state if stop - start == len(x) else state.slice_rows(start, stop)
                self.refresh_axes(rows, (axis,), context.slice_rows(start, stop, first))
                self.frame_changed(rows, (start, stop), context)

    def _observe_first(self, state: State, x: Tensor, context: StepContext) -> None:
        """Observe x `[N, *block]` and refresh, for blocks whose first refresh is in this step.

        With `warm_start` these blocks observe x twice, and this method is the first of the two observations.
        """
        begins = self.every.first_due(self._earliest)
        if context.holds(lambda steps: steps == begins) is False:
            return
        axes = self.factor_axes(state.block)
        for start, stop, first in self.due(context):
            if first:
                rows = state if stop - start == len(x) else state.slice_rows(start, stop)
                own = context.slice_rows(start, stop, first)
                self._observe(rows, x[start:stop], axes, (), own)
                self.refresh_axes(rows, axes, own)

    def _observe(
        self, state: State, x: Tensor, axes: tuple[int, ...], observed: tuple[int, ...], context: StepContext
    ) -> None:
        """Accumulate the contributions of x to the statistics of some axes.

        axes: the axes whose statistics are updated.
        observed: other axes whose statistics already contain the contribution of this step.
        """

        def power(axis: int, exponent: Fraction) -> Power:
            behind = 0 if axis in observed else 1
            return self.power(state, axis, exponent, self.estimate(state, axis, context, behind))

        # cached, because several axes may need the same power
        powers = power if self.statistic.needs_power is None else cache(power)
        self.statistic.observe(state, self.in_frame(state, x, context), context, axes, powers)

    @final
    def estimate(self, state: State, axis: int, context: StepContext, behind: int = 0) -> Tensor:
        """Return the estimate of the statistic of one axis, from which roots and bases are computed.

        behind: 1 if the statistic does not contain the contribution of this step yet, else 0.
        """
        return self.statistic.estimate(state, axis, context, behind, self.cached_traits().lagged)

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        if not self.statistic.sequential:  # else `observe` has already refreshed each axis
            self.refresh_axes(state, self.factor_axes(state.block), context)

    def matrices(self, state: State) -> dict[int, Tensor]:
        """Return the root or basis of every axis that has a factor, by axis. They must not be changed in place."""
        return {axis: state.read(f"{self.matrix}.{axis}") for axis in self.factor_axes(state.block)}

    def equal_axes(self, state: State, axes: Sequence[int]) -> list[list[int]]:
        """Return the axes in groups, such that a solver may receive the matrices of a group as one stack.

        Matrices of a group have equal shapes and equal keys `solved_alike`, and are not quantized. The stack has only
        the matrices of the blocks that are refreshed now, the blocks of `state`.

        Stacking copies the matrices. Axes are grouped only if the copies have at most as many entries as all N blocks
        of the optimizer's stack, so that the copies need no more memory than other tensors of a step.

        If the size of a matrix is no multiple of a cache line, the last bits of its products depend on its index in the
        stack, and therefore on the groups. The groups must therefore be the same for any number n of refreshed blocks.
        In this case the limit is the number of entries of these n blocks. Copies and limit are then both proportional
        to n, so that the groups do not depend on n.
        """
        found: dict[object, list[int]] = {}
        for axis in axes:
            name, key = f"{self.matrix}.{axis}", object()  # a key that no other axis has
            known = None if state.coded(name) else state[name]
            room = 0 if known is None else math.prod(state.block) * (state.blocks if fills_lines(known) else len(known))
            if known is not None and len(axes) * known.numel() <= room:
                key = known.shape, self.solved_alike(state.block, axis)
            found.setdefault(key, []).append(axis)
        return list(found.values())

    def commit(self, state: State, axis: int, value: Tensor, ok: Tensor, tried: Tensor | None = None) -> None:
        """Write the new root or basis of an axis where ok `[N]` is True, and set the count of failures to 0 there.

        Where ok is False, the slot keeps its value, and the count of failures increases by 1.

        value: the new matrices, with the shape of the slot.
        tried: bool `[N]`, True where a solver was run. Where no solver was run, nothing changes. None: a solver was run
            for all blocks.
        """
        name, count = f"{self.matrix}.{axis}", f"failures.{axis}"
        if known_to_hold(ok):
            state[name], state[count] = value, state[count].zero_()
        else:
            failed = state[count] + (1 if tried is None else tried.int())
            state[name], state[count] = where_blocks(ok, value, state[name]), torch.where(ok, 0, failed)

    def results(self, axis: int, value: Tensor, ok: Tensor, order: Tensor | None = None) -> dict[str, Tensor]:
        """Return the results of a delayed refresh of one axis, as {name of a slot of role "pending": its value}.

        The slot `pending.result.<axis>` is 1 where the solver succeeded, -1 where it failed, and 0 without a result.

        value: the root or basis, with the shape of its slot.
        ok: bool `[N]`, False where the solver failed.
        order: `[N, r]`, the index of the old column from which each new column was computed. None: columns keep their
            order.
        """
        found = {_pending_slot(self.matrix, axis): value, _pending_slot("result", axis): ok.int() * 2 - 1}
        if self.pending_order:
            found[_pending_slot("order", axis)] = identity_order(value) if order is None else order
        return found

    def pending(self, state: State, axis: int) -> Pending:
        """Return the stored result of a delayed refresh of one axis, and mark it as used.

        A stage calls this method when the refresh takes effect. The slot `pending.result.<axis>` is set to 0, so that
        the result is used once.
        """
        result = state[_pending_slot("result", axis)]
        ok, tried = result > 0, result != 0
        state[_pending_slot("result", axis)] = torch.zeros_like(result)
        order = state[_pending_slot("order", axis)] if self.pending_order else None
        return Pending(Basis(state[_pending_slot(self.matrix, axis)], order, ok), tried)


class Pending(NamedTuple):
    """The result of a delayed refresh of one axis.

    found: the result of the solver. Its `q` is the root or basis in the shape of the slot, and `ok` is True where the
        solver succeeded. `order` is None if columns keep their order (`pending_order` is False).
    tried: bool `[N]`, True where there is a result.
    """

    found: Basis
    tried: Tensor


def _pending_slot(name: str, axis: int) -> str:
    """Return the name of the slot that keeps one part of a delayed refresh's result until the refresh takes effect.

    name: the part: "root", "basis", "order" or "result".
    axis: axis of the block whose root or basis is refreshed.
    """
    return f"pending.{name}.{axis}"


def joined(stacks: Sequence[Tensor]) -> Tensor:
    """Return several stacks of matrices as one stack. A single stack is returned as it is, without a copy."""
    return stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))
