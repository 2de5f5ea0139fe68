"""Names of state: which slots a block has under an update of a recipe, and the key of each."""

from __future__ import annotations

from eigengraft.preconditioners import chain_slots
from eigengraft.slots import Slot

from .recipe import Recipe, Route


def slot_keys(rule: Recipe | Route, path: str, block: tuple[int, ...]) -> dict[str, Slot]:
    """The slots of a block under the update at `path` of a recipe, by "<stage path>/<slot>"."""
    found = {}
    for stages, chain in ((rule.update, "update"), (rule.after_decay, "after_decay")):
        for stage, name, slot in chain_slots(stages, block, f"{path}.{chain}" if path else chain):
            found[f"{stage}/{name}"] = slot
    return found
