"""Names of state: which slots a block has under an update of a recipe, and the key of each."""

from __future__ import annotations

from collections.abc import Iterable

from eigengraft.preconditioners import chain_slots
from eigengraft.quantization.base import require_stage_roles
from eigengraft.slots import Slot
from eigengraft.state_key import StateKey

from .recipe import Recipe, Route


def slot_keys(rule: Recipe | Route, path: str, block: tuple[int, ...]) -> dict[StateKey, Slot]:
    """The slots of a block under the update at `path` of a recipe, by a key that names no block."""
    found = {}
    for stages, chain in ((rule.update, "update"), (rule.after_decay, "after_decay")):
        for stage, name, slot in chain_slots(stages, block, f"{path}.{chain}" if path else chain):
            found[StateKey(None, stage, name)] = slot
    return found


def require_slots(recipe: Recipe, blocks: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raises ValueError for a storage key "<stage path>/<slot>" whose stage is there, but not the slot, and for a stage
    none of whose slots can be stored so.

    blocks: (path of the update, shape) of the blocks that there are.
    """
    if not recipe.storage:
        return
    found = [slot_keys(recipe.updates()[path], path, block) for path, block in blocks]
    slots = {key: slot for own in found for key, slot in own.items()}
    for text, quantizer in recipe.storage.items():
        require_stage_roles(text, quantizer, [slot for own, slot in slots.items() if own.stage == text])
        key = StateKey.parse(text)
        near = sorted(str(slot) for slot in slots if slot.stage == key.stage)
        if near and key not in slots:
            raise ValueError(f"storage: a slot of the stage is required ({', '.join(near)}), got '{text}'")
