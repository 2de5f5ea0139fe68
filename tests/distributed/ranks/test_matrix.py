"""Every layout that people train on against one process, with every kind of recipe. Real processes, gloo.

Given gradients, matrices of realistic and odd sides, at least two refreshes after the first: parameters at the end are
equal bit for bit, or as far apart as `CLOSE` says and why.
"""

import pytest

from .launch import Outcome, Run, launch_once
from .workers.layouts import LAYOUTS, stack

pytestmark = pytest.mark.slow

SHAMPOO = "update.graft.direction.shampoo"
SMALL = ["statistic.inner", "root.inner.inner", "first_moment", "second_moment"]
EXPERTS = ["blocking.merge=1024"]
"""Each expert is a matrix; by default they would lie side by side in one of 3 x 1961."""
RECIPES = {
    "soap": ["update.eigenbasis.refresh.steps=3"],
    "shampoo": [f"{SHAMPOO}.refresh.steps=3"],
    "soap_kl": ["update.eigenbasis.refresh.steps=3"],
    "muon": EXPERTS,
    "adamw": [],
    "psgd_kron": [],
    "shampoo_4bit": [
        *EXPERTS,
        f"{SHAMPOO}.refresh.steps=2",
        f"{SHAMPOO}.statistic.interval=2",
        *(f"storage.{slot}.min_elements=1" for slot in SMALL),
    ],
    "splus": [*EXPERTS, "update.eigenbasis.refresh.steps=3"],
}
RANKS = (2, 4)
CELLS = [(layout, ranks, recipe) for layout in LAYOUTS for ranks in RANKS for recipe in RECIPES]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    path = str(tmp_path_factory.mktemp("alone") / "parameters.pt")
    recipes = {name: ["lr=0.05", *overrides] for name, overrides in RECIPES.items()}
    runs = [Run("one", "matrix:alone", 0, {"path": path, "recipes": recipes})]
    job = {"path": path, "recipes": recipes, "layouts": list(LAYOUTS)}
    runs += [Run(f"{ranks} ranks", "matrix:run", ranks, job) for ranks in RANKS]
    return launch_once(runs, tmp_path_factory, "matrix", limit=400)


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
