"""What is asked for speed and gives none here: updates that fall back, products in bfloat16 on other machines.

Nothing is timed: it follows from the recipe, from parameters, and from what the processor says of itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from eigengraft.component import Component
from eigengraft.errors import stage_name
from eigengraft.numerics import has_fast_bfloat16

from ..recipe.recipe import Recipe
from ..stacks.stack import StackState
from ..step.step import ParamSet


def fallbacks(param_set: ParamSet) -> dict[int, tuple[str, ...]]:
    """Why steps of parameters are not compiled, though their update asks for it, not fused, though it is Adam's chain,
    or not taken in chunks, though their size is worth it; by position of the parameter."""
    found: dict[int, dict[str, None]] = {}
    for own in param_set.stack_states:
        for position in dict.fromkeys(own.stack.param_ids.tolist()):
            for reason in _fallbacks(own, param_set, position):
                found.setdefault(position, {})[reason] = None
    return {position: tuple(reasons) for position, reasons in found.items()}


def _fallbacks(own: StackState, param_set: ParamSet, position: int) -> Iterator[str]:
    how, reason = param_set.execution(own), param_set.execution(own).reason
    if reason is None and (how.chunks or how.entries) and not param_set.local[position].is_contiguous():
        reason = "it is not contiguous"
    if how.not_fused is not None:
        yield f"not fused: {how.not_fused}"
    if reason is not None and (own.rule.compile or reason != how.not_fused):
        yield f"{'not compiled' if own.rule.compile else 'not in chunks'}: {reason}"


def slow_products(recipe: Recipe, devices: Iterable[torch.device]) -> Iterator[str]:
    """A line for each device without fast products in bfloat16, if the recipe asks for some."""
    asked = list(_in_bfloat16(recipe))
    for device in dict.fromkeys(devices) if asked else ():
        if has_fast_bfloat16(device) is False:
            yield (
                f"{', '.join(asked)}: bfloat16 saves no time on this machine, whose {device.type} has no instructions "
                "for products in it; they are taken in float32 of the rounded numbers"
            )


def _in_bfloat16(component: Component, path: str = "") -> Iterator[str]:
    """Paths of fields `precision` that say bfloat16, of a component and of those inside it."""
    for name, value in component:
        if name == "precision" and value == "bfloat16":
            yield f"{path}{name}"
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Component):
                inner = f"{name}.{stage_name(one)}" if isinstance(value, tuple) else name
                yield from _in_bfloat16(one, f"{path}{inner}.")
