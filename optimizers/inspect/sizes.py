"""Bytes of state: of a parameter, and of each slot over all parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eigengraft.slots import StateKey

from ..stacks.stack import StackState
from ..state.shown_state import own_state


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


def slot_sizes(stack_states: Iterable[StackState], states: Iterable[Any]) -> list[SlotSize]:
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
        for text, tensor in own_state(state).items():
            if StateKey.parse(text).block is None:
                size = tensor.numel() * tensor.element_size()
                sizes = found.setdefault((text, "count" if text == "step" else "iterate", ""), [0, 0])
                sizes[0], sizes[1] = sizes[0] + size, sizes[1] + size
    return [SlotSize(*names, *sizes) for names, sizes in found.items()]


def slot_bytes(state: Any) -> int:
    """Bytes of one parameter's state; entries of hosts are left out."""
    return sum(slot.numel() * slot.element_size() for slot in own_state(state).values())
