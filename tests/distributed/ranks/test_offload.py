"""State in files on several ranks: the trajectory of one process, and checkpoints that any run reads."""

from typing import Any

import pytest
import torch

from .launch import Outcome, Run, launch
from .test_trajectories import CASES as TRAJECTORIES

pytestmark = pytest.mark.slow

ROLES = ("statistic", "basis", "first_moment", "second_moment")
FILE = {"kind": "offload", "to": "disk", "min_elements": 1}
CODED = {**FILE, "inner": {"kind": "int8", "min_elements": 1}}
OVERRIDES = [*TRAJECTORIES["soap"]["overrides"], "blocking.size=16", "blocking.merge=16"]
"""With a third of the blocks, because every state tensor of a checkpoint is a file."""
RECIPES: dict[str, Any] = {
    "adamw": {"base": "adamw", "storage": dict.fromkeys(ROLES[2:], FILE)},
    "soap": {"base": "soap_fitted", "storage": dict.fromkeys(ROLES, FILE)},
    "coded": {"base": "soap_fitted", "storage": dict.fromkeys(ROLES[2:], CODED)},
}
PLAIN: dict[str, Any] = {
    "adamw": "adamw",
    "soap": "soap_fitted",
    "coded": {"base": "soap_fitted", "storage": dict.fromkeys(ROLES[2:], CODED["inner"])},
}
PLACES = ("plain2", "fsdp2")
TARGETS = ("plain1", *PLACES)
LOADED = {
    target: [
        (source, name, ("tree", "flat")[(i + j + k) % 2])
        for j, source in enumerate(PLACES)
        for k, name in enumerate(RECIPES)
    ]
    for i, target in enumerate(TARGETS)
}
"""(source, recipe, kind) by target: what every source has saved of every recipe, into files ("tree") in one half of the
pairs, and into memory ("flat") in the other."""


def case(recipe: Any, name: str, place: str, **more: Any) -> dict[str, Any]:
    overrides = [] if name == "adamw" else OVERRIDES
    return {"place": place.rstrip("0123456789"), "recipe": recipe, "overrides": overrides, **more}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    root = tmp_path_factory.mktemp("offloaded")

    def folder(source: str, name: str) -> str:
        path = root / source / name
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    saves = [Run("one", "trajectories:run", 0, {name: case(PLAIN[name], name, "plain") for name in PLAIN})]
    for place in PLACES:
        kinds = ["flat", "tree"]
        job = {name: case(RECIPES[name], name, place, folder=folder(place, name), kinds=kinds) for name in RECIPES}
        saves.append(Run(f"save {place}", "offload:save", 2, job))
    found = launch(saves, tmp_path_factory.mktemp("saves"), limit=300)
    loads = []
    for place in TARGETS:
        job = {}
        for source, name, kind in LOADED[place]:
            recipe = {"tree": RECIPES, "flat": PLAIN}[kind][name]
            more = {"folder": folder(source, name), "kind": kind}
            job[f"{source} {name} {kind}"] = case(recipe, name, place, **more)
        loads.append(Run(f"load {place}", "offload:load", int(place[-1]), job))
    return found | launch(loads, tmp_path_factory.mktemp("loads"), limit=300)


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_goes_on_with_and_without_files(outcomes: dict[str, list[Outcome]], target: str) -> None:
    """Saved with files; loaded into files, and into memory."""
    expected = outcomes["one"][0].result
    for rank in outcomes[f"load {target}"]:
        assert len(rank.result) == len(RECIPES) * len(PLACES)
        for name, iterates in rank.result.items():
            for iterate, parameters in iterates.items():
                wanted = expected[name.split()[1]][iterate]
                assert all(torch.equal(value, wanted[key]) for key, value in parameters.items()), name


@pytest.mark.parametrize("place", PLACES)
def test_reading_state_moves_nothing(outcomes: dict[str, list[Outcome]], place: str) -> None:
    for rank in outcomes[f"save {place}"]:
        assert all(found["moved"] == [] for found in rank.result.values())
        assert rank.result["soap"]["consolidated"].startswith(("whole: True", "0: state_dict: "))
