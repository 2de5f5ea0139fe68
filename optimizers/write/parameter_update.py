"""An update of several tensors under constraints, on its way to parameters or to the iterates that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from eigengraft.numerics import copies

from .constraints import Constraint, ConstraintContext, Slots
from .write import StepScale, decay, put, with_decay, write


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
