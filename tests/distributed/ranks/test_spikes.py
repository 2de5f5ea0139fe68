"""Ranks decide alike about steps far above those before, and as one process does."""

from itertools import product

import pytest
import torch

from .launch import Outcome, Run, launch_once

pytestmark = pytest.mark.slow

CASES = {
    f"{recipe} {then} {measure}": {"recipe": recipe, "then": then, "measure": measure}
    for (then, measure), recipe in zip(
        product(("skip", "scale", "clip"), ("gradient_norm", "loss")), ("adamw", "muon") * 3, strict=True
    )
}
"""Every measure with every answer; of entry-wise updates and of matrices in turn, which no decision looks at."""
PLACES = ("plain", "fsdp")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    alone = {name: {**case, "place": "plain"} for name, case in CASES.items()}
    runs = [Run("alone", "spikes:run", 0, alone)]
    runs += [Run(place, "spikes:run", 2, {n: {**c, "place": place} for n, c in CASES.items()}) for place in PLACES]
    return launch_once(runs, tmp_path_factory, "spikes", limit=150)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_ranks_make_the_steps_of_one_process(outcomes: dict[str, list[Outcome]], name: str, place: str) -> None:
    (alone,), (first, second) = outcomes["alone"], outcomes[place]
    one, ranks = alone.result[name], [outcome.result[name] for outcome in (first, second)]
    assert ranks[0]["counts"] == ranks[1]["counts"] and ranks[0]["steps"] == ranks[1]["steps"] == one["steps"]
    assert ranks[0]["counts"] == pytest.approx(one["counts"], rel=1e-6) and one["counts"][0] == 2
    for key, value in one["parameters"].items():
        assert torch.equal(ranks[0]["parameters"][key], ranks[1]["parameters"][key])
        assert torch.allclose(ranks[0]["parameters"][key], value, rtol=1e-5, atol=1e-6)
