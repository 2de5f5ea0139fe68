"""Parameter sets that are made anew use process groups of those before, and leave no hooks. Real processes, gloo."""

import pytest
import torch

from .launch import Outcome, Run, launch_once

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    job = {"early": ["distribution.overlap_backward=true"], "late": []}
    return launch_once([Run("groups", "groups:run", 2, job)], tmp_path_factory, "groups", 150)["groups"]


def test_process_groups_and_hooks_do_not_accumulate(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        early = outcome.result["early"]
        assert early["groups"][0] > 0 and early["groups"][-1] <= early["groups"][1], early["groups"]
        assert set(early["hooks"]) == set(early["hooks"][:1]), early["hooks"]


def test_parameter_sets_made_anew_have_the_bits_of_those_without_early_messages(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        early, late = (outcome.result[name]["parameters"] for name in ("early", "late"))
        assert all(torch.equal(value, late[name]) for name, value in early.items())
