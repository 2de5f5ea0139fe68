"""Every layout that people train on against one process, with every kind of recipe, on two or four ranks.

Real processes, gloo. Given gradients, matrices of realistic and odd sides, at least two refreshes after the first:
parameters at the end are equal bit for bit.
"""

import itertools

import pytest

from .launch import Outcome, Run, launch_once
from .workers.layouts import LAYOUTS, stack

pytestmark = pytest.mark.slow


def spread(stage: str) -> list[str]:
    """Refreshes of few blocks at every step, so that some rows of a stack are due and others are not."""
    return [f"update.{stage}.refresh.steps=2", f"update.{stage}.refresh.min_wave_work=1"]


SHAMPOO = "graft.direction.shampoo"
SMALL = ["statistic.inner", "root.inner.inner", "first_moment", "second_moment"]
VIEWS = ["view=modules"]
"""Sections, heads and groups that no shard of a rank coincides with."""
RECIPES = {
    "soap": ["update.eigenbasis.refresh.steps=2"],
    "soap_fitted": spread("eigenbasis"),
    "shampoo": spread(SHAMPOO),
    "soap_kl": [*VIEWS, *spread("eigenbasis")],
    "muon": VIEWS,
    "adamw": [],
    "psgd_kron": [],
    "shampoo_4bit": [
        *spread(f"transform.before.{SHAMPOO}"),
        f"update.transform.before.{SHAMPOO}.statistic.interval=2",
        *(f"storage.{slot}.min_elements=1" for slot in SMALL),
    ],
    "splus": spread("eigenbasis"),
}
RANKS = (2, 4)
OF_FOUR = ("hsdp", "tp_fsdp", "pp_fsdp")
"""Layouts with two axes, which four ranks have and two do not."""
CELLS = [
    (layout, 4 if ((row + column) % 3 == 0) != (layout in OF_FOUR) else 2, recipe)
    for (row, layout), (column, recipe) in itertools.product(enumerate(LAYOUTS), enumerate(RECIPES))
]
"""Each pair of layout, recipe and number of ranks, once. Layouts of one axis have two ranks with two thirds of the
recipes, layouts of two axes have four.

Pairs are enough because no code depends on all three: a layout decides how gradients and updates are cut, a recipe what
is computed of blocks, and both know the number of ranks only by the owners of blocks. `test_comm_plan.py` has cuts and
owners on up to twelve ranks, and `test_balance.py` has owners."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    path = str(tmp_path_factory.mktemp("alone") / "parameters.pt")
    recipes = {name: ["lr=0.05", *overrides] for name, overrides in RECIPES.items()}
    runs = [Run("one", "matrix:alone", 0, {"path": path, "recipes": recipes})]
    for ranks in RANKS:
        cells = [(layout, recipe) for layout, own, recipe in CELLS if own == ranks]
        runs.append(Run(f"{ranks} ranks", "matrix:run", ranks, {"path": path, "recipes": recipes, "cells": cells}))
    return launch_once(runs, tmp_path_factory, "matrix", limit=400)


def test_every_two_of_layout_recipe_and_ranks_are_together_once() -> None:
    assert {(layout, recipe) for layout, _, recipe in CELLS} == set(itertools.product(LAYOUTS, RECIPES))
    assert {(layout, ranks) for layout, ranks, _ in CELLS} == set(itertools.product(LAYOUTS, RANKS))
    assert {(recipe, ranks) for _, ranks, recipe in CELLS} == set(itertools.product(RECIPES, RANKS))


@pytest.mark.parametrize(("layout", "ranks", "recipe"), CELLS)
def test_every_layout_does_what_one_process_does(
    outcomes: dict[str, list[Outcome]], layout: str, ranks: int, recipe: str
) -> None:
    found = [outcome.result[f"{layout} {recipe}"] for outcome in outcomes[f"{ranks} ranks"]]
    assert not [said for said in found if isinstance(said, str)]
    apart = {name: error / largest for rank in found for name, (error, largest, _) in rank.items() if error}
    assert apart == {}
    for name, parameter in stack().named_parameters():
        held = sum(rank[name][2] for rank in found if name in rank)
        assert held and held % parameter.numel() == 0, name
