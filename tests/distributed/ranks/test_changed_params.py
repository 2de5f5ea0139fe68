"""Parameters that a host converts, and frozen integer weights, on ranks. Real processes, gloo."""

from pathlib import Path

import pytest
import torch

from .launch import Outcome, Run, launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    runs = [Run(place, "converted:run", 2, place) for place in ("plain", "fsdp")]
    return launch(runs, Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("place", ["plain", "fsdp"])
@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted"])
@pytest.mark.parametrize("change", ["early", "late", "integers"])
def test_a_change_of_the_model_changes_no_step(
    outcomes: dict[str, list[Outcome]], place: str, recipe: str, change: str
) -> None:
    for outcome in outcomes[place]:
        expected, found = outcome.result[f"{recipe} nothing"], outcome.result[f"{recipe} {change}"]
        assert expected.keys() == found.keys() and all(torch.equal(value, expected[n]) for n, value in found.items())
