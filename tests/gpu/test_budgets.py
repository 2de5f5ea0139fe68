"""No step asks a device for more than the table says; see `budgets.py` for what it holds and how it is renewed."""

from __future__ import annotations

import pytest

from eigengraft.optimizers import WeightDecay

from ..recipes import ALONE
from .budgets import measure, steps, table

BUDGETS = table()
QUICK = ("adamw", "muon", "soap_fitted", "shampoo")


def test_every_recipe_has_a_budget() -> None:
    assert set(BUDGETS) == set(ALONE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(BUDGETS)]
)
def test_a_step_keeps_to_its_budget(name: str) -> None:
    found, steady = measure(name)
    exceeded = found.exceeded(BUDGETS[name])
    assert not exceeded, f"(measured, limit): {exceeded}; waits and copies of a steady step: {steady.by_line('waits')}"


@pytest.mark.parametrize("kind", sorted(WeightDecay.members))
def test_decays_and_writes_are_launched_for_stacks(kind: str) -> None:
    """8 more layers are 96 more parameters: a launch for each would be that many."""
    few, many = (steps({"base": "lion", "weight_decay": kind}, layers)[1][-1] for layers in (4, 12))
    assert many.kernels - few.kernels <= 8, many.by_line("kernels")
