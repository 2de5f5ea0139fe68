"""How the state of a chain follows when its basis changes along one axis.

Legend: N blocks; d length of the axis; r columns of a basis, d or fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from eigengraft.chains import SIDES, known_signals, requested
from eigengraft.numerics import identity_like, known_to_hold, may_branch_on_values
from eigengraft.slots import Slot, State

from ..base import Stage, chain_slots, walk
from .products import mode_product, rotate
from .reordering import reordered

Transport = Literal["exact", "marginals", "permute", "none"]


class Turn:
    """A change of basis by R = Q_old^T Q_new `[N, r, r]`, a product that is made when something first needs it.

    old, new: Q_old and Q_new `[N, d, r]`; without `old`, new is R itself. order: `[N, r]`, the old column of each new
    one; None: columns have no old counterpart.
    """

    def __init__(self, new: Tensor, old: Tensor | None = None, order: Tensor | None = None) -> None:
        self.new, self.old, self.order = new, old, order

    @cached_property
    def rotation(self) -> Tensor:
        return self.new if self.old is None else torch.bmm(self.old.mT, self.new)

    @cached_property
    def stays(self) -> bool:
        """Whether R is known to be the identity of every block; False where asking would wait for a device."""
        before = identity_like(self.new) if self.old is None else self.old
        return may_branch_on_values(self.new) and torch.equal(self.new, before)

    def chunk(self, parts: int) -> list[Turn]:
        """The turns of that many equal numbers of blocks, one after the other."""
        if parts == 1:
            return [self]
        order: Sequence[Tensor | None] = [None] * parts if self.order is None else self.order.chunk(parts)
        old: Sequence[Tensor | None] = [None] * parts if self.old is None else self.old.chunk(parts)
        found = [Turn(*own) for own in zip(self.new.chunk(parts), old, order, strict=True)]
        if "rotation" in vars(self):  # is known
            for turn, rotation in zip(found, self.rotation.chunk(parts), strict=True):
                turn.rotation = rotation
        return found

    def by_parts(self, x: Tensor, axis: int) -> Tensor | None:
        """R^T x along an axis as Q_new^T (Q_old x); None where R and a product with it take fewer operations."""
        d, r = self.new.shape[1:]
        rest = x[0].numel() // r
        if self.old is None or 2 * d * rest >= r * (d + rest):
            return None
        return mode_product(mode_product(x, self.old, axis), self.new.mT, axis)


def transport(stages: tuple[Stage, ...], state: State, turns: Mapping[int, Turn], how: Transport = "exact") -> None:
    """Change the basis of all slots of a chain, along each axis of the block that `turns` has, by R, its rotation.

    state: of the chain, with the block as it sees it. exact: vectors are rotated, squares are transported by the
    Hadamard square, (R*R)^T v; marginals: the same, as a start; permute: vectors are rotated, squares are reordered by
    the turn's order; none: everything stays.
    """
    turns = {axis: turn for axis, turn in turns.items() if how != "none" and not turn.stays}
    slots = list(chain_slots(stages, state.block)) if turns else []
    squared = how != "permute" and any(slot.frame in ("square", "row", "column") for _, _, slot in slots)
    for path, name, slot in slots:
        places = {axis: slot_axis(slot, axis, len(state.block)) for axis in turns}
        own = {place: turns[axis] for axis, place in places.items() if place is not None}
        if not own:
            continue
        scope = state.scope(path)
        if slot.frame == "vector":
            scope[name] = _rotated(scope[name], own, whole=squared)
        elif how != "permute":
            scope[name] = rotate(scope[name], {place: turn.rotation.square().mT for place, turn in own.items()})
        else:
            scope[name] = _reordered(scope[name], own)


def _rotated(x: Tensor, turns: Mapping[int, Turn], whole: bool) -> Tensor:
    """R^T x along the axes of all turns; whole: by R itself, which something else needs too."""
    rotations = dict[int, Tensor]()
    for axis, turn in turns.items():
        if whole or (rotated := turn.by_parts(x, axis)) is None:
            rotations[axis] = turn.rotation.mT
        else:
            x = rotated
    return rotate(x, rotations)


def _reordered(x: Tensor, turns: Mapping[int, Turn]) -> Tensor:
    for axis, turn in turns.items():
        x = x if turn.order is None else reordered(x, axis, turn.order)
    return x


def require_frameless(stages: tuple[Stage, ...], path: str) -> None:
    """Raises ValueError for state that cannot follow a change of basis."""
    for here, name, slot in chain_slots(stages, (2, 2), path):
        if slot.frame == "none" and slot.role in ("statistic", "root", "basis"):
            raise ValueError(
                f"{here}: '{name}' does not follow a change of basis; a stage with factors of its own cannot live in "
                "another's basis, move it outside"
            )
    for here, stage in walk(stages, path):
        for signal in sorted(requested(stage)):
            if signal in known_signals() and known_signals()[signal].extent in ("entry", "partner", *SIDES):
                raise ValueError(f"{here}: '{signal}' does not follow a change of basis, move the stage outside")


def order_or_identity(order: Tensor | None, ok: Tensor) -> Tensor | None:
    """The order of the columns `[N, r]` where the solver succeeded, the identity elsewhere; None stays None."""
    if order is None or known_to_hold(ok):
        return order
    return torch.where(ok[:, None], order, torch.arange(order.shape[-1], dtype=order.dtype, device=order.device))


def slot_axis(slot: Slot, axis: int, order: int) -> int | None:
    """The place of the block's axis among the axes of a slot; None: the slot does not have it."""
    spans = {"row": range(order - 1), "column": [*range(order - 2), order - 1], "none": ()}
    axes = list(spans.get(slot.frame, slot.axes if slot.axes is not None else range(order)))
    return axes.index(axis) if axis in axes else None
