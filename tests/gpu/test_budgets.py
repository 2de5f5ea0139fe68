"""No step asks a device for more than the table says; see `budgets.py` for what it holds and how it is renewed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eigengraft.optimizers import WeightDecay
from eigengraft.optimizers.write import Averaging, Constraint

from ..recipes import ALONE
from .budgets import measure, steady, table

BUDGETS = table()
QUICK = ("adamw", "muon", "soap_fitted", "shampoo")
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(BUDGETS)]


def test_every_recipe_has_a_budget() -> None:
    assert set(BUDGETS) == set(ALONE)


@pytest.mark.parametrize("name", EVERY)
def test_a_step_keeps_to_its_budget(name: str) -> None:
    found, counts = measure(name)
    exceeded = found.exceeded(BUDGETS[name])
    assert not exceeded, f"(measured, limit): {exceeded}; waits and copies of a steady step: {counts.by_line('waits')}"


@pytest.mark.parametrize("name", EVERY)
def test_a_step_with_a_mask_waits_for_nothing(name: str) -> None:
    """Two layers have stacks of several blocks, and 12 layers no other stacks."""
    _, found = steady({"base": name, "failure": {"detect": "device"}}, 2)
    assert (found.waits, found.uploads) == (0, 0), found.by_line("waits", "uploads")


@pytest.mark.parametrize("kind", sorted(WeightDecay.members))
def test_decays_and_writes_are_launched_for_stacks(kind: str) -> None:
    """8 more layers are 96 more parameters: a launch for each would be that many."""
    few, many = (steady({"base": "lion", "weight_decay": kind}, layers)[1] for layers in (4, 12))
    assert many.kernels - few.kernels <= 8, many.by_line("kernels")


def test_masks_of_usable_gradients_are_launched_for_stacks() -> None:
    """A step of Adam's chain then moves 22 times the bytes of the parameters, where a fused kernel alone moves 5."""
    recipe = {"base": "adamw", "failure": {"detect": "device"}}
    (_, few), (size, many) = (steady(recipe, layers) for layers in (4, 12))
    assert few.kernels <= 86 and many.kernels <= 92, many.by_line("kernels")
    assert many.traffic <= 22 * size and many.waits == 0, many.by_line("traffic")


@pytest.mark.parametrize("recipe", ["soap_fitted", "shampoo"])
def test_roots_and_bases_are_not_copied_under_a_mask(recipe: str) -> None:
    """Statistics and moments are, because a step writes them."""
    _, found = steady({"base": recipe, "failure": {"detect": "device"}}, 4)
    lines = found.by_line("kernels")
    copied, stored = (
        [own.kernels for line, own in lines.items() if "/slots.py" in line and end in line.split()]
        for end in ("clone", "where")
    )
    assert copied == stored, lines


OTHERS = [
    *({"averaging": kind} for kind in sorted(Averaging.members.keys() - {"anchored"})),
    {"averaging": {"kind": "anchored", "start": 2, "full": 3}},
    *({"constraints": kind} for kind in sorted(Constraint.members.keys() - {"qk_clip", "rounding"})),
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_averages_and_constraints_are_launched_for_stacks(changes: dict[str, Any]) -> None:
    few, many = (steady({"base": "lion", **changes}, layers)[1] for layers in (4, 12))
    assert many.kernels - few.kernels <= 8, many.by_line("kernels")
    assert few.waits == many.waits == 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["stochastic", "compensated", "split"])
def test_roundings_of_bfloat16_are_launched_for_stacks(rule: str) -> None:
    recipe = {"base": "lion", "constraints": {"kind": "rounding", "rule": rule}}
    few, many = (steady(recipe, layers, torch.bfloat16)[1] for layers in (4, 12))
    assert many.kernels - few.kernels <= 8, many.by_line("kernels")
