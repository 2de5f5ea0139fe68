"""Warnings about combinations that are valid but rarely intended, each with a remedy and an id that silences it.

`compose` runs every registered check once. To add a check, decorate a function with `@recipe_check("some-id")`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from eigengraft.errors import name_some, warn_user
from eigengraft.numerics import active_fake_mode
from eigengraft.quantization import Quantizer
from eigengraft.quantization.base import choose
from eigengraft.schedules import schedules
from eigengraft.slots import Slot, StateKey

from ..optimizer import Optimizer
from ..recipe.recipe import slot_keys
from ..state.shown_state import own_state

_MOST = 256
"""Bytes of state per entry above which a parameter is reported as costly. Adam has 8, SOAP on square matrices 24."""
_SMALL = 1e-4
"""A small second moment, relative to the largest of its block: of a gradient 100 times smaller, which is common."""


@dataclass(frozen=True)
class Composition:
    """The argument of a check.

    optimizer: the composed optimizer, with its recipe and described parameters.
    steps: number of steps of the run; None if it is unknown.
    """

    optimizer: Optimizer
    steps: int | None

    def slots(self) -> dict[StateKey, dict[Slot, None]]:
        """Return the slots of all blocks of the model, on all ranks, by a key without a block index."""
        recipe, found = self.optimizer.recipe, dict[StateKey, dict[Slot, None]]()
        rows = self.optimizer.routing_table()
        for path, block in dict.fromkeys((row.route, block) for row in rows for block in row.blocks):
            for key, slot in slot_keys(recipe.updates()[path], path, block).items():
                found.setdefault(key, {})[slot] = None
        return found


RecipeCheck = Callable[[Composition], Iterable[str]]
"""A check: it yields a sentence for each fault, with what has no effect or goes wrong, and the remedy."""
_CHECKS: dict[str, RecipeCheck] = {}


def recipe_check(name: str) -> Callable[[RecipeCheck], RecipeCheck]:
    """Register a check under an id of lower-case words with hyphens. A second check with the same id replaces it."""

    def register(check: RecipeCheck) -> RecipeCheck:
        _CHECKS[name] = check
        return check

    return register


def known_checks() -> tuple[str, ...]:
    """Return the ids of all checks."""
    return tuple(sorted(_CHECKS))


def warn_of_faults(optimizer: Optimizer, steps: int | None = None, silence: Iterable[str] = ()) -> None:
    """Warn of every fault that the checks find.

    Raises:
        ValueError: `silence` contains an unknown id.
    """
    silent = [silence] if isinstance(silence, str) else list(silence)
    if unknown := sorted(set(silent) - _CHECKS.keys()):
        raise ValueError(f"silence: there is no check '{unknown[0]}', the ids are {', '.join(known_checks())}")
    composed = Composition(optimizer, steps)
    for name, check in _CHECKS.items():
        for message in check(composed) if name not in silent else ():
            warn_user(f"{message} [{name}]")


@recipe_check("head-unclear")
def _unclear_head(composed: Composition) -> Iterator[str]:
    """Warn if the recipe routes output heads elsewhere, and the last layer, perhaps a head, goes to its main update.

    There is no warning if the head is found, frozen or tied, nor for adapters and stacks of equal blocks.
    """
    recipe, sets = composed.optimizer.recipe, composed.optimizer.param_sets
    rows = [row for own, infos in zip(sets.parameters, sets.infos, strict=True) for row in zip(own, infos, strict=True)]
    if not any("head" in route.match.role for route in recipe.routes) or any(info.facts.factor for _, info in rows):
        return
    for parameter, info in rows:
        if info.unclear and parameter.requires_grad and not recipe.route(info)[0]:
            yield (
                f"{info.name}: the last layer goes to the recipe's own update with the hidden layers, because no "
                "output head is found and other layers may consume its outputs; if it is the head, return its module "
                "from a method `get_output_embeddings()` of the model, or put a route with "
                f"`match: {{name: '^{re.escape(info.name or '')}$'}}` before 'default'"
            )


@recipe_check("state-large")
def _large_state(composed: Composition) -> Iterator[str]:
    """Warn if the state of a parameter is out of proportion to its size, as factors of long axes of thin matrices."""
    optimizer = composed.optimizer
    sets, costly = optimizer.param_sets, list[tuple[float, str, tuple[int, ...]]]()
    labels = chain.from_iterable(sets.labels(index) for index in range(len(sets.parameters)))
    for name, parameter in zip(labels, chain(*sets.parameters), strict=True):
        size = sum(stored.nbytes for stored in own_state(optimizer.state.get(parameter)).values())
        if size > max(2**20, _MOST * parameter.numel()):
            costly.append((size / parameter.numel(), name, tuple(parameter.shape)))
    if costly:
        each, name, shape = max(costly)
        more = f", and {len(costly) - 1} others like it" if len(costly) > 1 else ""
        yield (
            f"{name}: {each:.0f} bytes of state for each entry of {list(shape)}{more}; `axes: {{max_skew: 4}}` of a "
            "statistic leaves axes so long without a factor, and a route sends parameters to another update"
        )


@recipe_check("storage-unused")
def _unused_storage(composed: Composition) -> Iterator[str]:
    """Warn if an entry of `storage` applies to no slot of this model, because all are too small or of a wrong shape.

    There is no warning for an entry of a route without parameters.
    """
    storage, unused = composed.optimizer.recipe.storage, dict[str, str]()
    slots = composed.slots() if storage else {}
    for text, quantizer in storage.items():
        named = [(key, slot) for key, own in slots.items() for slot in own if _takes(storage, text, key, slot)]
        if named and not any(choose(storage, key, slot) is quantizer for key, slot in named):
            key, slot = max(named, key=lambda pair: math.prod(pair[1].shape))
            unused[text] = f"{key}, the largest slot of {text}, cannot be stored so: {quantizer.unsupported(slot)}"
    if unused:
        yield (
            f"storage: nothing of this model is stored by {', '.join(unused)}; {next(iter(unused.values()))}. Lower "
            "`min_elements`, choose another format, or remove the entry"
        )


@recipe_check("storage-rounds-to-zero")
def _rounded_second_moments(composed: Composition) -> Iterator[str]:
    """Warn if second moments, by whose roots updates are divided, have a storage that rounds small values to 0."""
    storage = {} if active_fake_mode() is not None else composed.optimizer.recipe.storage  # fake codes have no values
    found: dict[Quantizer, list[str]] = {}
    for key, own in (composed.slots() if storage else {}).items():
        for slot in own:
            quantizer = choose(storage, key, slot) if slot.role == "second_moment" else None
            if quantizer is not None and str(key) not in found.get(quantizer, []):
                found.setdefault(quantizer, []).append(str(key))
    for quantizer, names in found.items():
        if _rounds_to_zero(quantizer):
            kind = getattr(quantizer, "kind", type(quantizer).__name__)
            yield (
                f"storage of {name_some(names, 3)}: {kind} rounds second moments {_SMALL:g} times the largest of their "
                "block to 0, and updates are divided by their roots; choose `{kind: codebook8, codebook: "
                "dynamic_unsigned}` or `{kind: uint8, compand: sqrt}`"
            )


@recipe_check("schedule-beyond-run")
def _long_schedules(composed: Composition) -> Iterator[str]:
    """Warn if a schedule is longer than the run, so that its last value is never reached."""
    recipe, steps = composed.optimizer.recipe, composed.steps or composed.optimizer.recipe.total_steps
    for path, schedule in schedules(recipe) if steps is not None else ():
        length = sum(segment.length(steps) for segment in schedule)
        if steps is not None and length > steps:
            yield (
                f"{path}: its schedule takes {length:g} steps and the run has {steps}, so that {schedule[-1].end:g} is "
                "never reached; give its length as a `fraction` of the run"
            )


def _takes(storage: dict[str, Quantizer], text: str, key: StateKey, slot: Slot) -> bool:
    """Return True if the entry `text` of a storage decides on a slot."""
    named = next((where for where in (key.name, key.stage) if where in storage), None)
    return text == named if named is not None else text == slot.role and not slot.sensitive


def _rounds_to_zero(quantizer: Quantizer) -> bool:
    """Return True if a quantizer rounds a small second moment beside a large one to 0."""
    slot = Slot((64, 64))
    x = torch.full((1, *slot.shape), _SMALL, dtype=torch.float32, device="cpu")
    x[..., 0] = 1.0
    if quantizer.unsupported(slot) is not None:
        return False
    return bool((quantizer.decode(quantizer.encode(x), slot, x.dtype) == 0).any())
