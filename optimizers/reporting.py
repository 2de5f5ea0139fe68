"""What an optimizer can say about itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .optimizer import Optimizer


@dataclass(frozen=True)
class RoutedParameter:
    """Where one parameter went and why. route: "" is the recipe's own update; state_bytes: of all its slots."""

    name: str
    shape: tuple[int, ...]
    route: str
    reason: str
    blocks: tuple[tuple[int, ...], ...]
    state_bytes: int


@dataclass(frozen=True)
class SlotSize:
    """One slot over all parameters that have it. key: "<stage path>/<slot>", or "averaging/<slot>" and the like.

    storage: the kind of quantizer, "" for none. declared: bytes in the dtype it is computed in; stored: bytes kept.
    """

    key: str
    role: str
    storage: str
    declared: int
    stored: int


def slot_sizes(optimizer: Optimizer) -> list[SlotSize]:
    """What each slot was declared to take and takes, in the order of the chains; iterates and counts last."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for stack_state in optimizer.stack_states():
        for key, slot in stack_state.slots():
            coded = stack_state.coded.get(key)
            kind = str(getattr(coded.codec, "kind", "")) if coded is not None else ""
            dtype = slot.dtype or stack_state.stack.dtype
            declared = len(stack_state.stack.param_ids) * math.prod(slot.shape) * dtype.itemsize
            stored = sum(tensor.numel() * tensor.element_size() for tensor in stack_state.stored(key))
            sizes = found.setdefault((key, slot.role, kind), [0, 0])
            sizes[0], sizes[1] = sizes[0] + declared, sizes[1] + stored
    for state in optimizer.state.values():
        for key, tensor in state.items():
            if not key[0].isdigit():  # of a whole parameter, not of its blocks
                size = tensor.numel() * tensor.element_size()
                sizes = found.setdefault((key, "count" if key == "step" else "iterate", ""), [0, 0])
                sizes[0], sizes[1] = sizes[0] + size, sizes[1] + size
    return [SlotSize(*names, *sizes) for names, sizes in found.items()]


def routing_table(optimizer: Optimizer) -> list[RoutedParameter]:
    """Where each parameter went and why, in the order of the groups."""
    rows = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter, info, label in zip(
            group["params"], optimizer.infos(index), optimizer.labels(index), strict=True
        ):
            route, reason = optimizer.recipe.route(info)
            grids = optimizer.recipe.updates()[route].blocking.grids(info.shape)
            blocks = tuple(grid.tile for grid in grids for _ in grid.keys)
            if not parameter.requires_grad and parameter not in optimizer.state:
                reason += "; frozen, no state"
            size = slot_bytes(optimizer.state.get(parameter, {}))
            rows.append(RoutedParameter(label, info.shape, route, reason, blocks, size))
    return rows


def describe(optimizer: Optimizer) -> str:
    """A few lines: the recipe, each group with how many parameters went where, the bytes of state."""
    lines = [f"Optimizer(recipe={optimizer.recipe.name or 'unnamed'}"]
    if optimizer.recipe.averaging is not None:
        kind = getattr(optimizer.recipe.averaging, "kind")  # noqa: B009  every member has a kind, the family has none
        lines.append(f"  averaging: {kind}, the parameters hold the iterate to {optimizer.iterate}")
    for index, group in enumerate(optimizer.param_groups):
        routes = Counter(optimizer.recipe.route(info)[0] or "update" for info in optimizer.infos(index))
        where = ", ".join(f"{count} by {path}" for path, count in routes.items())
        rates = f"lr={float(group['lr']):g}, weight_decay={float(group['weight_decay']):g}"
        lines.append(f"  group {index}: {len(group['params'])} parameters ({where}), {rates}")
    return "\n".join([*lines, f"  state: {optimizer.state_bytes()} bytes)"])


def slot_bytes(state: Mapping[str, Tensor]) -> int:
    """Bytes of one parameter's state."""
    return sum(slot.numel() * slot.element_size() for slot in state.values())
