"""Tables of what an optimizer does with each parameter and what its state takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eigengraft.state_key import StateKey

from .apply.averaging import Mode
from .engine.param_sets import ParamSets
from .engine.schedules import steps_taken
from .engine.stack_state import StackState


@dataclass(frozen=True)
class RoutedParameter:
    """Where one parameter went, and why.

    name, shape: the parameter's.
    route: path of the route that took it; "" is the recipe's own update.
    reason: why that route took it.
    view: which matrices it is seen as, and why; "" for one tensor that nobody had to decide about.
    blocks: shapes of its blocks.
    state_bytes: bytes of all its state.
    """

    name: str
    shape: tuple[int, ...]
    route: str
    reason: str
    view: str
    blocks: tuple[tuple[int, ...], ...]
    state_bytes: int


@dataclass(frozen=True)
class SlotSize:
    """Bytes of one slot over all parameters that have it.

    key: "<stage path>/<slot>", or "averaging/<slot>" and the like.
    role: of the slot.
    storage: kind of the quantizer; "" for none.
    declared: bytes in the dtype that the slot is computed in.
    stored: bytes that it takes.
    """

    key: str
    role: str
    storage: str
    declared: int
    stored: int


def slot_sizes(stack_states: Iterable[StackState], states: Iterable[Mapping[str, Tensor]]) -> list[SlotSize]:
    """Sizes of all slots, in the order of the chains; iterates and counts, which no stack has, come last.

    states: of each parameter, by state key.
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    for stack_state in stack_states:
        for key, slot in stack_state.slots():
            coded = stack_state.encoded.get(str(key))
            kind = str(getattr(coded.codec, "kind", "")) if coded is not None else ""
            dtype = slot.dtype or stack_state.stack.dtype
            declared = len(stack_state.stack.param_ids) * math.prod(slot.shape) * dtype.itemsize
            stored = sum(tensor.numel() * tensor.element_size() for tensor in stack_state.stored(key))
            sizes = found.setdefault((str(key), slot.role, kind), [0, 0])
            sizes[0], sizes[1] = sizes[0] + declared, sizes[1] + stored
    for state in states:
        for text, tensor in state.items():
            if StateKey.parse(text).block is None:
                size = tensor.numel() * tensor.element_size()
                sizes = found.setdefault((text, "count" if text == "step" else "iterate", ""), [0, 0])
                sizes[0], sizes[1] = sizes[0] + size, sizes[1] + size
    return [SlotSize(*names, *sizes) for names, sizes in found.items()]


def routing_table(param_sets: ParamSets, state: Mapping[Tensor, Mapping[str, Tensor]]) -> list[RoutedParameter]:
    """Where each parameter went and why, in the order of the groups; state: of each parameter, by state key."""
    rows = []
    for index, infos in enumerate(param_sets.infos):
        labels, parameters = param_sets.labels(index), param_sets.parameters[index]
        for parameter, info, label in zip(parameters, infos, labels, strict=True):
            route, reason = param_sets.recipe.route(info)
            view = param_sets.recipe.view_of(info)
            grids = param_sets.recipe.updates()[route].blocking.grids(info.shape, view.matrices)
            blocks = tuple(grid.shape for grid in grids for _ in grid.keys)
            if not parameter.requires_grad and parameter not in state:
                reason += "; frozen, no state"
            size = slot_bytes(state.get(parameter, {}))
            rows.append(RoutedParameter(label, info.shape, route, reason, view.describe(info.shape), blocks, size))
    return rows


def describe(param_sets: ParamSets, groups: Sequence[Mapping[str, Any]], iterate: Mode, state_bytes: int) -> str:
    """A few lines: the recipe and how many parameters went where, averaging, each group, the bytes of state."""
    recipe = param_sets.recipe
    routes = Counter(recipe.route(info)[0] or "update" for infos in param_sets.infos for info in infos)
    where = ", ".join(f"{count} parameter{'s' * (count != 1)} by {path}" for path, count in routes.items())
    lines = [f"Optimizer(recipe={recipe.name or 'unnamed'}: {where}"]
    if recipe.averaging is not None:
        kind = getattr(recipe.averaging, "kind")  # noqa: B009  every member has a kind, the family has none
        lines.append(f"  averaging: {kind}, the parameters hold the iterate to {iterate}")
    for index, group in enumerate(groups):
        own = Counter(recipe.route(info)[0] or "update" for info in param_sets.infos[index])
        where = ", ".join(f"{count} by {path}" for path, count in own.items())
        rates = f"lr={float(group['lr']):g}, weight_decay={float(group['weight_decay']):g}"
        lines.append(f"  group {index}: {len(group['params'])} parameters ({where}), {rates}")
    for path, value in param_sets.schedules.values(steps_taken(param_sets)).items():
        lines.append(f"  {path}: {value:g}, scheduled")
    return "\n".join([*lines, f"  state: {state_bytes} bytes)"])


def slot_bytes(state: Mapping[str, Tensor]) -> int:
    """Bytes of one parameter's state."""
    return sum(slot.numel() * slot.element_size() for slot in state.values())
