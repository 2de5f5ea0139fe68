"""One step as a thing to hand over: parameters take it, or iterates that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .constraints import Constraint, Slots
from .write import StepScale, decayed, moved, write


@dataclass(frozen=True)
class Bound:
    """A constraint and its slots, for the tensors of one move."""

    constraint: Constraint
    slots: Slots


@dataclass(frozen=True)
class Move:
    """One step of n tensors. updates: of their shapes. mask: 0-d booleans, where one is False nothing changes."""

    updates: Sequence[Tensor]
    step_scale: StepScale
    mask: Sequence[Tensor] | None = None
    bounds: Sequence[Bound] = ()

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Moves the tensors in place: weight decay, update, constraints."""
        if not self.bounds:
            write(tensors, self.updates, self.step_scale, self.mask)
            return
        updates = self.updates
        before: Sequence[Tensor] = [tensor.to(u.dtype) for tensor, u in zip(tensors, updates, strict=True)]
        for bound in self.bounds:
            updates = bound.constraint.direct(bound.slots, before, updates)
        after: Sequence[Tensor] = [moved(tensor, u, self.step_scale) for tensor, u in zip(before, updates, strict=True)]
        for bound in self.bounds:
            after = bound.constraint.retract(bound.slots, before, updates, after)
        self._set(tensors, after)

    def slice_rows(self, chosen: Sequence[int], bounds: Sequence[Bound]) -> Move:
        """The same step of some of the tensors, under constraints."""
        mask = None if self.mask is None else [self.mask[index] for index in chosen]
        return Move([self.updates[index] for index in chosen], self.step_scale, mask, bounds)

    def decayed_at(self, others: Sequence[Tensor]) -> Move:
        """The same step with the weight decay of other tensors, in place of the moved ones' own."""
        if not self._decays:
            return self
        updates: Sequence[Tensor]
        alpha, pairs = self.step_scale.alpha, zip(others, self.updates, strict=True)
        if isinstance(alpha, float) and not self.step_scale.decay.cautious:
            updates = torch._foreach_add(list(self.updates), list(others), alpha=alpha)
        else:
            updates = [update + self.step_scale.decay_term(other, update) for other, update in pairs]
        return replace(self, updates=updates, step_scale=self.step_scale.without_decay)

    def decay(self, tensors: Sequence[Tensor]) -> Move:
        """Takes the weight decay of the step now, and returns the rest of the step."""
        if not self._decays:
            return self
        kept = 1 - self.step_scale.lr * self.step_scale.alpha
        if isinstance(kept, float) and self.mask is None and not self.step_scale.decay.cautious:
            torch._foreach_mul_(list(tensors), kept)
        else:
            self._set(
                tensors, [decayed(tensor, u, self.step_scale) for tensor, u in zip(tensors, self.updates, strict=True)]
            )
        return replace(self, step_scale=self.step_scale.without_decay)

    @property
    def _decays(self) -> bool:
        return isinstance(self.step_scale.alpha, Tensor) or self.step_scale.alpha != 0

    def _set(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for index, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
            tensor.copy_(value if self.mask is None else torch.where(self.mask[index], value, tensor))
