"""How the state of a chain follows when its basis changes along one axis.

Legend: N blocks; d length of the axis; r columns of a basis, d or fewer.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from eigengraft.chains import SIDES, known_signals
from eigengraft.slots import Slot, State

from ..base import Stage, chain_slots, walk
from .products import mode_product
from .reordering import reordered

Transport = Literal["exact", "marginals", "permute", "none"]


class Turn:
    """A change of basis by R = Q_old^T Q_new `[N, r, r]`, a product that is made when something first needs it.

    old, new: Q_old and Q_new `[N, d, r]`; without `old`, new is R itself.
    """

    def __init__(self, new: Tensor, old: Tensor | None = None) -> None:
        self.new, self.old = new, old

    @cached_property
    def rotation(self) -> Tensor:
        return self.new if self.old is None else torch.bmm(self.old.mT, self.new)

    def of_vectors(self, x: Tensor, axis: int) -> Tensor:
        """R^T x along an axis; as Q_new^T (Q_old x) where R alone would take more operations than both."""
        d, r = self.new.shape[1:]
        rest = x[0].numel() // r
        if self.old is None or "rotation" in vars(self) or 2 * d * rest >= r * (d + rest):
            return mode_product(x, self.rotation.mT, axis)
        return mode_product(mode_product(x, self.old, axis), self.new.mT, axis)


def transport(
    stages: tuple[Stage, ...], state: State, axis: int, turn: Turn, order: Tensor | None, how: Transport = "exact"
) -> None:
    """Change the basis of all slots of a chain along one axis by R, the rotation of a turn.

    state: of the chain, with the block as it sees it. exact: vectors are rotated, squares are transported by the
    Hadamard square, (R*R)^T v; marginals: the same, as a start; permute: vectors are rotated, squares are reordered by
    `order` `[N, r]`, the old column of each new one; none: everything stays.
    """
    if how == "none":
        return
    for path, name, slot in chain_slots(stages, state.block):
        place = slot_axis(slot, axis, len(state.block))
        if place is None:
            continue
        scope = state.scope(path)
        if slot.frame == "vector":
            scope[name] = turn.of_vectors(scope[name], place)
        elif how != "permute":
            scope[name] = mode_product(scope[name], turn.rotation.square().mT, place)
        elif order is not None:
            scope[name] = reordered(scope[name], place, order)


def require_frameless(stages: tuple[Stage, ...], path: str) -> None:
    """Raises ValueError for state that cannot follow a change of basis."""
    for here, name, slot in chain_slots(stages, (2, 2), path):
        if slot.frame == "none" and slot.role in ("statistic", "root", "basis"):
            raise ValueError(
                f"{here}: '{name}' does not follow a change of basis; a stage with factors of its own cannot live in "
                "another's basis, move it outside"
            )
    for here, stage in walk(stages, path):
        for signal in sorted(stage.signals() | stage.accepts):
            if signal in known_signals() and known_signals()[signal].extent in ("entry", "partner", *SIDES):
                raise ValueError(f"{here}: '{signal}' does not follow a change of basis, move the stage outside")


def order_or_identity(order: Tensor | None, ok: Tensor) -> Tensor | None:
    """The order of the columns `[N, r]` where the solver succeeded, the identity elsewhere; None stays None."""
    if order is None:
        return None
    return torch.where(ok[:, None], order, torch.arange(order.shape[-1], device=order.device))


def slot_axis(slot: Slot, axis: int, order: int) -> int | None:
    """The place of the block's axis among the axes of a slot; None: the slot does not have it."""
    spans = {"row": range(order - 1), "column": [*range(order - 2), order - 1], "none": ()}
    axes = list(spans.get(slot.frame, slot.axes if slot.axes is not None else range(order)))
    return axes.index(axis) if axis in axes else None
