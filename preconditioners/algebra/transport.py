"""Frames: how the state of a chain follows when the basis that it lives in changes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from eigengraft.slots import Slot, State

from ..base import Stage, chain_slots
from .mode_product import mode_product

Transport = Literal["exact", "permute", "none"]


def transport(
    stages: tuple[Stage, ...],
    state: State,
    axis: int,
    rotation: Tensor,
    order: Tensor | None,
    how: Transport = "exact",
) -> None:
    """Change the basis of all slots of a chain along one axis by R = Q_old^T Q_new `[N, r, r]`.

    state: of the chain, with the block as it sees it. exact: vectors are rotated, squares are transported by the
    Hadamard square, (R*R)^T v; permute: vectors are rotated, squares are reordered by `order` `[N, r]`, the old column
    of each new one; none: everything stays.
    """
    if how == "none":
        return
    for path, name, slot in chain_slots(stages, state.block):
        place = _slot_axis(slot, axis, len(state.block))
        if place is None:
            continue
        scope = state.scope(path)
        if slot.frame == "vector":
            scope[name] = mode_product(scope[name], rotation.mT, place)
        elif how == "exact":
            scope[name] = mode_product(scope[name], rotation.square().mT, place)
        elif order is not None:
            x = scope[name]
            index = order.reshape(-1, *(order.shape[1] if a == place else 1 for a in range(x.ndim - 1)))
            scope[name] = x.gather(place + 1, index.expand_as(x))


def require_frameless(stages: tuple[Stage, ...], path: str) -> None:
    """Raises ValueError for state that cannot follow a change of basis."""
    for here, name, slot in chain_slots(stages, (2, 2), path):
        if slot.frame == "none" and slot.role in ("statistic", "root", "basis"):
            raise ValueError(
                f"{here}: '{name}' does not follow a change of basis; a stage with factors of its own cannot live in "
                "another's basis, move it outside"
            )


def order_or_identity(order: Tensor | None, ok: Tensor) -> Tensor | None:
    """The order of the columns `[N, r]` where the solver succeeded, the identity elsewhere; None stays None."""
    if order is None:
        return None
    return torch.where(ok[:, None], order, torch.arange(order.shape[-1], device=order.device))


def _slot_axis(slot: Slot, axis: int, order: int) -> int | None:
    """The place of the block's axis among the axes of a slot; None: the slot does not have it."""
    spans = {"row": range(order - 1), "column": [*range(order - 2), order - 1], "none": ()}
    axes = list(spans.get(slot.frame, slot.axes if slot.axes is not None else range(order)))
    return axes.index(axis) if axis in axes else None
