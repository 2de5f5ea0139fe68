"""Storage of slots by a recipe: the tensors in which each slot of a block is stored, and where they are between steps.

Allocation, checkpoints, plans and reports read the storage of a slot here. Nothing is allocated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from eigengraft.quantization import Quantizer, choose
from eigengraft.quantization.base import Location
from eigengraft.slots import FORMAT, Slot, StateKey

from ..recipe.recipe import Recipe, Route, slot_keys

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a state tensor of one block."""


@dataclass(frozen=True)
class StoredSlot:
    """A slot of a block, and how it is stored.

    slot: the declaration of the slot.
    dtype: dtype in which stages read the slot.
    codec: quantizer that encodes the slot. None: the slot is stored as it is.
    location: memory in which the recipe stores the slot between steps. None: the memory of the block's device.
    """

    slot: Slot
    dtype: torch.dtype
    codec: Quantizer | None
    location: Location | None

    def forms(self) -> dict[str, Form]:
        """Return shape and dtype of each tensor that stores the slot, by the `part` of its key."""
        if self.codec is None:
            return {"": (self.slot.shape, self.dtype)}
        return {**_codes(self.codec, self.slot.shape, self.dtype), FORMAT: ((), torch.int64)}

    def nbytes(self) -> int:
        """Return the bytes of these tensors. The size of large codes is extrapolated from a slot with fewer rows."""
        shape, numel = self.slot.shape, math.prod(self.slot.shape)
        if self.codec is None:
            return numel * self.dtype.itemsize
        shrunk = (max(1, (1 << 22) * shape[0] // max(numel, 1)), *shape[1:]) if numel > 1 << 22 else shape
        nbytes = sum(math.prod(own) * dtype.itemsize for own, dtype in _codes(self.codec, shrunk, self.dtype).values())
        return nbytes * numel // max(math.prod(shrunk), 1) + torch.int64.itemsize


@lru_cache(maxsize=4096)
def _codes(codec: Quantizer, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, Form]:
    """Return shape and dtype of each code of a slot, by name."""
    codes = codec.encode(torch.zeros((1, *shape), dtype=dtype, device="cpu"))
    return {name: (tuple(code.shape[1:]), code.dtype) for name, code in codes.items()}


def stored_slots(
    rule: Recipe | Route, path: str, block: tuple[int, ...], dtype: torch.dtype, storage: Mapping[str, Quantizer]
) -> dict[StateKey, StoredSlot]:
    """Return {state key: storage of the slot} for the slots of a block. The keys do not have the number of the block.

    rule: the update rule of the block.
    path: path of the rule in the recipe.
    block: shape of the block.
    dtype: dtype in which the block's update is computed.
    storage: quantizers of slots, by role or path.
    """
    found = {}
    for key, slot in slot_keys(rule, path, block).items():
        quantizer = choose(storage, key, slot) if storage else None
        codec, location = (None, None) if quantizer is None else (quantizer.codec, quantizer.location)
        found[key] = StoredSlot(slot, slot.dtype or dtype, codec, location)
    return found


def block_bytes(
    rule: Recipe | Route, path: str, block: tuple[int, ...], dtype: torch.dtype, storage: Mapping[str, Quantizer]
) -> Counter[str]:
    """Return the bytes of a block's state by its location between steps: "" for the device of the block.

    The arguments are those of `stored_slots`.
    """
    found = Counter[str]()
    for stored in stored_slots(rule, path, block, dtype, storage).values():
        found["" if stored.location is None else stored.location.to] += stored.nbytes()
    return found
