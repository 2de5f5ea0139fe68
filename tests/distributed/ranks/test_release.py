"""Shards of FSDP2 that are released during backward have the bits of an ordinary step on every rank."""

import pytest
import torch

from ...refusals import lacking
from .launch import Outcome, Run, launch_once

pytestmark = pytest.mark.slow

RECIPES = {
    **{name: name for name in ("adamw", "muon", "soap", "adafactor", "schedule_free_adamw", "adamw_8bit")},
    "clip": {"update": [{"kind": "clip_norm", "max_norm": 0.1, "per": "parameter"}, "momentum", "rms"]},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return launch_once([Run("fsdp", "release:run", 2, RECIPES)], tmp_path_factory, "release", 150)["fsdp"]


@pytest.mark.parametrize("recipe", [*RECIPES, *(f"stacks, {name}" for name in RECIPES)])
def test_shards_step_in_backward_with_the_same_bits(outcomes: list[Outcome], recipe: str) -> None:
    for outcome in outcomes:
        plain, released = outcome.result[recipe]["plain"], outcome.result[recipe]["released"]
        assert released["stepped"] and released["steps"] == plain["steps"] and max(plain["steps"]) == 5
        assert all(torch.equal(value, released["parameters"][name]) for name, value in plain["parameters"].items())


def test_ranks_with_different_numbers_of_parts_are_refused(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert lacking(outcome.result["parts"], "release", "parts", 2, 3) == []


def test_gradients_that_are_averaged_later_are_refused(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        plain, wrapped = outcome.result["refused"]
        assert lacking(plain, "release", "plain tensor") == []
        assert lacking(wrapped, "release", "DistributedDataParallel", "fully_shard") == []
