"""The bench of steps: counted times, what times become, and what a row says of a missing library."""

import math
from pathlib import Path

import pytest
import torch

from eigengraft import Optimizer
from eigengraft.errors import RecipeError
from eigengraft.experiments.benches import StepBench, load_bench, read_bench, run_bench
from eigengraft.experiments.benches.step import (
    SETS,
    TURNS,
    counted_ms,
    initial_values,
    shape_set,
    turns_of_gradients,
)
from eigengraft.experiments.benches.step_times import held_bytes, step_times
from eigengraft.experiments.benches.view import lay_out
from eigengraft.experiments.track.cost import Card
from eigengraft.optimizers.plan.plan import plan

from ..peers.soap_loop import SoapLoop
from ..refusals import refused

BASIS = "update.eigenbasis"


def test_the_counted_time_is_that_of_the_plan() -> None:
    """AdamW reads the gradient, two moments and the parameter, and writes the last three: 28 bytes a number. SOAP at
    slow products takes the operations that `plan` counts."""
    parameter = torch.nn.Parameter(torch.zeros(24, 16))
    adamw, soap = (Optimizer([parameter], recipe, overrides=["routes=[]"]) for recipe in ("adamw", "soap_fitted"))
    slow_memory, slow_products = Card("", 1e30, 1e30, 1e6), Card("", 1e6, 1e6, 1e30)
    assert counted_ms(adamw, slow_memory) == pytest.approx(1e3 * 28 * 24 * 16 / 1e6, rel=0.01)
    work = float(plan(soap.recipe, [("0", (24, 16))], (1,), "ddp").work[0])
    assert counted_ms(soap, slow_products) == pytest.approx(1e3 * work / 1e6) and work > 0


def test_refreshes_are_what_places_of_an_interval_take_more() -> None:
    times = [9.0, 1.0, 1.0, 1.0, 1.0] * 3
    times[6] = 50.0  # one disturbed step, which a median over intervals leaves out
    found = step_times(times, 5)
    assert found.pop("amortized") == pytest.approx(13 / 5)
    assert found == {"steady": 1.0, "refresh": 8.0, "median": 1.0, "largest": 9.0}


@pytest.mark.slow
def test_the_loop_makes_the_steps_of_the_recipe() -> None:
    """25 steps with refreshes at 2, 5, 10, ...: a stack of three, a tensor of three axes, a long axis, a vector."""
    shapes = [(12, 8), (12, 8), (6, 3, 4), (12, 8), (40, 5), (7,)]
    changes = ["routes=[]", "blocking={}", f"{BASIS}.transport=permute", f"{BASIS}.refresh.steps=5"]
    changes += [f"{BASIS}.refresh.stagger=none", f'{BASIS}.statistic.axes={{"max_size": 20, "vectors": false}}']
    ours, loop = ([torch.nn.Parameter(x) for x in initial_values(shapes, 0)] for _ in range(2))
    optimizers = [
        Optimizer(ours, "soap_fitted", lr=0.01, overrides=changes),
        SoapLoop(loop, lr=0.01, interval=5, max_size=20),
    ]
    for turn in range(25):
        for parameters, optimizer in zip((ours, loop), optimizers, strict=True):
            for parameter, gradient in zip(parameters, turns_of_gradients(shapes, 0)[turn % TURNS], strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    for x, y in zip(ours, loop, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)  # 25 steps of 0.01, each up to rounding in float32


def test_sets_have_the_declared_sizes() -> None:
    def numbers(name: str) -> int:
        return sum(map(math.prod, shape_set(name)))

    layer = 3 * 256**2 + 256**2 + 8 * 256**2 + 4 * 256
    assert numbers("gpt") == 4096 * 256 + 4 * layer + 2 * 256
    assert numbers("gpt:layers=2") == 4096 * 256 + 2 * layer + 2 * 256
    assert 1.5e8 < numbers("gpt2") < 1.7e8
    assert all(shape_set(name) for name in SETS)
    (first, *_), *others = turns_of_gradients([(4, 9)], 0)
    scale = (torch.arange(1, 5).rsqrt()[:, None] * torch.arange(1, 10).rsqrt()) * 1e-2
    assert len(others) == 7 and (first / scale).std() == pytest.approx(1, abs=0.4)
    for wrong in ("gtp", "gpt:depth=2", "gpt:layers=no"):
        with refused(RecipeError, wrong):
            shape_set(wrong)


def test_state_is_counted_by_storages() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    assert held_bytes(optimizer) == 2 * 4 * 64 + 4


@pytest.mark.slow
def test_rows_of_a_recipe_a_peer_and_a_library_that_is_missing() -> None:
    peer = {"peer": "torch.optim:AdamW", "maths": "adam", "options": {"fused": True}}
    faulty = [{"peer": name, "maths": "adam"} for name in ("no_such_library:Adam", "builtins:list")]
    candidates = [{"recipe": "adamw", "maths": "adam"}, peer, *faulty]
    rows = run_bench("step", candidates=candidates, sets=["squares:size=4"], warm=1)
    own, other, missing, wrong = rows
    assert own["numbers"] == 256 * 16 and len(own["steps_ms"]) == 10 and own["counted"] and own["times_counted"]
    assert own["state"] == pytest.approx(8, abs=2.1) and other["state"] == pytest.approx(
        8 + 4 / 16, abs=0.01
    )  # 8 of steps
    assert (
        own["operators"] is not None
        and 0 < own["operators"] < 60
        and own["kernels"] is None
        and own["peak"] is not None
    )
    assert 0 < own["host"] <= own["largest"]
    assert missing["problem"] == "not installed: no_such_library" and "amortized" not in missing
    assert "param_groups" in wrong["problem"] and "amortized" not in wrong
    assert own["over_best_other"] == pytest.approx(own["amortized"] / other["amortized"])
    assert other["over_best_other"] is None and math.isfinite(own["amortized"])
    assert missing["problem"] in lay_out(load_bench("step", {}).table(), rows)[1][2]


@pytest.mark.slow
def test_storage_is_measured_beside_the_same_recipe_without_it() -> None:
    declared = read_bench("storage")
    assert declared.pop("kind") == "step"
    bench = load_bench("step", declared)
    assert isinstance(bench, StepBench)
    pairs = {case.kind_of_maths(): [] for case in bench.candidates}
    for case in bench.candidates:
        optimizer = case.build([torch.nn.Parameter(torch.zeros(8, 8))], 10)
        pairs[case.kind_of_maths()].append((case.is_reference, optimizer.recipe.declaration()))
    for (first, stored), (second, plain) in pairs.values():
        assert (first, second) == (False, True) and stored["storage"] and plain == {**stored, "storage": {}}
    rows = run_bench("storage", candidates=declared["candidates"][:2], sets=["squares:size=64"], intervals=10, warm=1)
    assert rows[0]["state"] < rows[1]["state"] and rows[1]["over_best_other"] is None
    assert rows[0]["over_best_other"] == pytest.approx(rows[0]["amortized"] / rows[1]["amortized"])


def test_refreshes_and_delays_are_measured_without_turns() -> None:
    """In turns, the worker thread of one candidate would run in steps of the others."""
    declared = read_bench(str(Path(__file__).parents[2] / "papers/late_refreshes/steps.yaml"))
    bench = load_bench(declared.pop("kind"), declared)
    assert isinstance(bench, StepBench) and {*bench.sets} < {*SETS}
    cadences = {}
    for case in bench.candidates:
        optimizer = case.build([torch.nn.Parameter(torch.zeros(8, 8))], 10)
        refresh = optimizer.recipe.declaration()["update"][0]["refresh"]
        cadences[case.kind_of_maths()] = (refresh["steps"], refresh["stagger"], refresh["delay"])
    assert cadences == {
        "no refreshes": (1000000, "none", 0),
        "spread": (10, "cost", 0),
        "delay 2": (10, "cost", 2),
        "delay 10": (10, "cost", 10),
    }


def test_what_is_refused() -> None:
    for fields, data in (
        ({"candidates": [{"options": {}}]}, ("candidates", "recipe", "peer")),
        ({"candidates": [{"peer": "torch.optim"}]}, ("candidates", "torch.optim", "module:Class")),
        ({"clock": "cpu", "threads": 2}, ("clock", "cpu")),
        ({"sets": ["gpd"]}, ("sets", "gpd", "'gpt'")),
    ):
        with refused(RecipeError, *data):
            run_bench("step", **fields)
