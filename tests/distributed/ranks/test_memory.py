"""Each of R ranks keeps about 1/R of the state, and no step of a sharded model makes a tensor of a parameter's size."""

from typing import Any

import pytest

from eigengraft.blocking.stacks import BYTES_ON_CPU

from .launch import Outcome, Run, launch_once
from .workers.memory import BUCKET, LAYERS

pytestmark = pytest.mark.slow

BLOCKS = ["blocking.size=16", "blocking.merge=16"]
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"recipe": "adamw", "overrides": []},
    "soap": {"recipe": "soap_fitted", "overrides": BLOCKS},
    "shampoo": {"recipe": "shampoo", "overrides": BLOCKS},
    "psgd": {"recipe": "psgd_kron", "overrides": BLOCKS},
    "quantized": {
        "recipe": "soap_int8",
        "overrides": [*BLOCKS, "storage.first_moment.min_elements=1", "storage.second_moment.min_elements=1"],
    },
    "averaged": {"recipe": "schedule_free_adamw", "overrides": []},
}
WATCHED = {
    "soap": {"recipe": "soap_fitted", "overrides": [*BLOCKS, "update.eigenbasis.refresh.steps=2"]},
    "shampoo": {"recipe": "shampoo", "overrides": [*BLOCKS, "update.graft.direction.shampoo.refresh.steps=2"]},
    "psgd": {"recipe": "psgd_kron", "overrides": BLOCKS},
    "adamw": CASES["adamw"],
    "after_decay": {"recipe": "splus", "overrides": [*BLOCKS, "after_decay.scale.rule=constant", "averaging=null"]},
}
# iterates lie with the parameters, which every rank has if they are replicated
PAIRS = [
    pytest.param(place, case, id=f"{place}-{case}")
    for place in ("fsdp2", "fsdp4", "plain2", "plain4")
    for case in CASES
    if (place[:-1], case) != ("plain", "averaged")
]
PAIRS.append(pytest.param("hsdp4", "adamw", id="hsdp4-adamw"))
HELD = {name: {"recipe": name} for name in ("muon", "soap_fitted", "shampoo", "adamw", "psgd_kron")}
PARAMETER = 4 * 128 * 96
"""Bytes of the watched parameter."""


def job(cases: dict[str, dict[str, Any]], place: str) -> dict[str, dict[str, Any]]:
    return {name: {**case, "place": place} for name, case in cases.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    runs = [
        Run("one", "memory:run", 0, job(CASES, "plain")),
        Run("watch1", "memory:allocate", 0, job(WATCHED, "plain")),
    ]
    runs += [Run(f"fsdp{ranks}", "memory:run", ranks, job(CASES, "fsdp")) for ranks in (2, 4)]
    runs += [Run(f"plain{ranks}", "memory:run", ranks, job(CASES, "plain")) for ranks in (2, 4)]
    runs += [Run("hsdp4", "memory:run", 4, job({"adamw": CASES["adamw"]}, "hsdp"))]
    runs += [Run("watch4", "memory:allocate", 4, job(WATCHED, "fsdp"))]
    runs += [Run(f"hold {place}", "memory:hold", 2, job(HELD, place)) for place in ("plain", "fsdp")]
    runs.sort(key=lambda run: run.world)
    return launch_once(runs, tmp_path_factory, "memory", limit=300)


@pytest.mark.parametrize(("place", "case"), PAIRS)
def test_state_is_divided_by_the_number_of_ranks(outcomes: dict[str, list[Outcome]], place: str, case: str) -> None:
    """Up to a quarter and the largest block; the blocks are all kept, and each parameter's step on every rank."""
    total, _ = outcomes["one"][0].result[case]
    ranks = [outcome.result[case] for outcome in outcomes[place]]
    largest = max(size for _, blocks in ranks for size in blocks)
    assert all(own <= 1.25 / len(ranks) * total + largest for own, _ in ranks)
    assert total <= sum(own for own, _ in ranks) <= 1.01 * total


@pytest.mark.parametrize("case", WATCHED)
def test_no_step_makes_a_tensor_of_the_size_of_a_parameter(outcomes: dict[str, list[Outcome]], case: str) -> None:
    """48 blocks on 4 ranks. One process makes tensors for all of them at once (PSGD in float64), so the watch sees."""
    (one,), ranks = outcomes["watch1"], outcomes["watch4"]
    if case == "adamw":  # a fused kernel makes no tensor for a block
        assert all(rank.result[case] < PARAMETER / 2 for rank in (one, *ranks))
        return
    assert one.result[case] >= PARAMETER
    assert all(0 < rank.result[case] < one.result[case] / 2 for rank in ranks)
    assert case == "psgd" or all(rank.result[case] < PARAMETER / 2 for rank in ranks)


@pytest.mark.parametrize("case", HELD)
@pytest.mark.parametrize("place", ["plain", "fsdp"])
def test_a_step_holds_at_most_two_buckets(outcomes: dict[str, list[Outcome]], place: str, case: str) -> None:
    """Sharded, a rank has 3 buckets of parameters, replicated 6; all that a step holds at once beside the state,
    messages, gradients in blocks and the products of the recipe, is at most two, refreshes among the steps. Small
    parameters that a fused kernel updates are copied, at most `BYTES_ON_CPU` at a time."""
    numbers = 4096  # rates, masks and steps of all blocks; the smallest message has 32 KiB
    most = numbers + (BYTES_ON_CPU if case == "adamw" else 2 * BUCKET)
    assert LAYERS * 4 * 64 * 64 // 2 == 3 * BUCKET
    assert all(0 < rank.result[case] <= most for rank in outcomes[f"hold {place}"])
