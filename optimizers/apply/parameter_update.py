"""Updates of several tensors, as objects: on their way to parameters, or to the iterates that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.numerics import copies

from .constraints import Constraint, ConstraintContext, Slots
from .weight_decay import StepScale
from .write import decay, put, with_decay, write


class EntryUpdates(NamedTuple):
    """n updates, in three columns: no object is made for each of the many parameters of a stack.

    positions: `[n]`, position of the parameter that each changes.
    entries: the entries that it changes, a view of what this rank holds of the parameter, or all of that.
    values: what they are changed by, of the same shape.
    """

    positions: NDArray[np.int64]
    entries: Sequence[Tensor]
    values: Sequence[Tensor]

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, Tensor, Tensor]]) -> Self:
        """The updates (position, entries, value)."""
        found = list(rows)
        positions = np.fromiter((position for position, _, _ in found), np.int64, len(found))
        return cls(positions, [entries for _, entries, _ in found], [value for _, _, value in found])

    @classmethod
    def of_parameters(
        cls, parameters: Sequence[Tensor], positions: NDArray[np.int64], values: Iterable[Tensor]
    ) -> Self:
        """Updates of whole parameters, given in any shape."""
        entries = [parameters[position] for position in positions.tolist()]
        values, shape = list(values), attrgetter("shape")
        if list(map(shape, values)) != list(map(shape, entries)):
            values = [value.reshape(own.shape) for own, value in zip(entries, values, strict=True)]
        return cls(positions, entries, values)

    def chosen(self, rows: NDArray[np.bool_]) -> Self:
        """The updates where `rows` `[n]` is True."""
        if rows.all():
            return self
        entries, values = (list(compress(column, rows.tolist())) for column in (self.entries, self.values))
        return type(self)(self.positions[rows], entries, values)


@dataclass(frozen=True)
class BoundConstraint:
    """A constraint, its slots for the n tensors of one update, and what it knows beside them."""

    constraint: Constraint
    slots: Slots
    context: ConstraintContext


@dataclass(frozen=True)
class ParameterUpdate:
    """One update of n tensors:  W <- W - lr alpha W - lr U, constrained.

    updates: n tensors U, of the shapes of W.
    step_scale: lr and alpha.
    mask: n 0-d booleans, False where nothing changes; None: everything may change.
    constraints: applied in order before the write, and in order after it.
    """

    updates: Sequence[Tensor]
    step_scale: StepScale
    mask: Sequence[Tensor] | None = None
    constraints: Sequence[BoundConstraint] = ()

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Changes the tensors in place: weight decay, update, constraints."""
        if not self.constraints:
            write(tensors, self.updates, self.step_scale, self.mask)
            return
        updates = self.updates
        before: Sequence[Tensor] = [tensor.to(u.dtype) for tensor, u in zip(tensors, updates, strict=True)]
        lr, mask = self.step_scale.lr, self.mask
        for bound in self.constraints:
            updates = bound.constraint.adjust(bound.slots, before, updates, replace(bound.context, lr=lr, mask=mask))
        after: Sequence[Tensor] = copies(before, before[0].dtype)
        write(after, updates, self.step_scale)
        for bound in self.constraints:
            after = bound.constraint.retract(
                bound.slots, before, updates, after, replace(bound.context, lr=lr, mask=mask)
            )
        put(tensors, after, self.mask)

    def slice_rows(self, chosen: Sequence[int], constraints: Sequence[BoundConstraint]) -> ParameterUpdate:
        """The update of the chosen tensors alone, under constraints."""
        mask = None if self.mask is None else [self.mask[index] for index in chosen]
        return ParameterUpdate([self.updates[index] for index in chosen], self.step_scale, mask, constraints)

    def decayed_at(self, others: Sequence[Tensor]) -> ParameterUpdate:
        """This update with weight decay taken at other tensors:  U <- U + alpha W_other, and no decay of its own."""
        updates = with_decay(self.updates, others, self.step_scale)
        return replace(self, updates=updates, step_scale=self.step_scale.without_decay)

    def decay(self, tensors: Sequence[Tensor]) -> ParameterUpdate:
        """Decay the tensors now, and return the update without its decay."""
        targets = tensors if self.mask is None else copies(tensors, tensors[0].dtype)
        decay(targets, self.updates, self.step_scale)
        if targets is not tensors:
            put(tensors, targets, self.mask)
        return replace(self, step_scale=self.step_scale.without_decay)
