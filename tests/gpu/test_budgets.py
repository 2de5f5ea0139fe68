"""No step asks a device for more than the table says; see `budgets.py` for what it holds and how it is renewed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import eigengraft
from eigengraft.optimizers import WeightDecay
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.write import Averaging, Constraint
from eigengraft.testing import accelerator
from eigengraft.testing.accelerator import SimulatedTensor

from ..recipes import ALONE
from .budgets import declared, gpt2, measure, random_tensors, steady, table
from .models import on_host

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


STORED = (
    "adafactor",
    "adamw",
    "apollo",
    "mars",
    "muon",
    "prodigy",
    "psgd_kron",
    "schedule_free_adamw",
    "shampoo",
    "soap_fitted",
)


@pytest.mark.parametrize("name", STORED)
def test_state_takes_the_planned_bytes_after_a_load_too(name: str) -> None:
    """The plan also counts the steps of a parameter, in 8 bytes on the host."""
    shapes, declaration = gpt2(1), declared(name)
    planned = int(plan(declaration, shapes, (1,), "ddp").state[0]) - 8 * len(shapes)
    with accelerator("cuda"):
        held(shapes, declaration)  # which makes the tables that optimizers share
        gc.collect()
        assert held(shapes, declaration) == (planned, 0)


def held(shapes: list[tuple[str, tuple[int, ...]]], declaration: Any) -> tuple[int, int]:
    """(bytes of an optimizer after a step and a load, most bytes that the load added)."""
    generator = torch.Generator().manual_seed(0)
    values, gradients = (random_tensors([shape for _, shape in shapes], generator) for _ in range(2))
    named = [(name, nn.Parameter(SimulatedTensor(x))) for (name, _), x in zip(shapes, values, strict=True)]
    with accelerator("cuda") as state:
        optimizer = eigengraft.Optimizer(named, declaration, lr=1e-3)
        for (_, parameter), gradient in zip(named, gradients, strict=True):
            parameter.grad = SimulatedTensor(gradient)
        optimizer.step()
        optimizer.zero_grad()
        saved = on_host(optimizer.state_dict())
        with accelerator("cuda") as load:
            optimizer.load_state_dict(saved)
        return state.live, load.peak
