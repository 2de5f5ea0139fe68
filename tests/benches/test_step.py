"""The bench of steps: floors against counts by hand, what times become, and what a row says of a missing library."""

import math

import pytest
import torch

from eigengraft import Optimizer
from eigengraft.errors import RecipeError
from eigengraft.experiments.benches import load_bench, run_bench
from eigengraft.experiments.benches.step import slope
from eigengraft.experiments.benches.steps.floor import MachineRates, StepWork, step_work
from eigengraft.experiments.benches.steps.measure import held_bytes, step_times
from eigengraft.experiments.benches.steps.sets import SETS, TURNS, initial_values, shape_set, turns_of_gradients
from eigengraft.experiments.benches.view import lay_out

from ..peers.soap_loop import SoapLoop
from ..refusals import refused

M, N = 24, 16
BASIS = "update.eigenbasis"


def work(recipe: str, *overrides: str, shape: tuple[int, ...] = (M, N)) -> StepWork:
    changes = ["routes=[]", "blocking={}", *overrides]
    return step_work(Optimizer([torch.nn.Parameter(torch.zeros(shape))], recipe, overrides=changes))


def test_products_of_soap_are_five_for_each_entry_and_axis() -> None:
    """Statistics m n (m + n) as symmetric products, there and back 2 m n (m + n) each: 5 m n (m + n)."""
    found = work("soap_fitted", "update.eigenbasis.refresh.steps=10")
    assert found.flops == 5 * M * N * (M + N)
    # A Q and QR, R, m and v
    turned = sum((2 + 8 / 3) * d**3 + 2 * d**3 + 2 * 2 * d * M * N for d in (M, N))
    assert found.refresh == pytest.approx(turned / 10, rel=1e-12)
    permuted = work("soap_fitted", "update.eigenbasis.refresh.steps=1", "update.eigenbasis.transport=permute")
    assert permuted.refresh == pytest.approx(turned - 2 * (M + N) * M * N, rel=1e-12)
    # by another solver the sums of marginals take A Q with the new Q
    other = [
        work("soap_fitted", "update.eigenbasis.solver.kind=cholesky_qr", f"update.eigenbasis.transport={t}").refresh
        for t in ("marginals", "exact")
    ]
    assert other[0] - other[1] == pytest.approx(2 * (M**3 + N**3) / 10, rel=1e-12)


def test_products_of_shampoo_are_three_for_each_entry_and_axis() -> None:
    found = work("shampoo", "update.graft.direction.shampoo.refresh.steps=4")
    assert found.flops == 3 * M * N * (M + N)
    assert found.refresh == pytest.approx(10 * (M**3 + N**3) / 4, rel=1e-12)
    assert work("shampoo", shape=(5, 2, 3)).flops == 3 * 30 * (5 + 2 + 3)


def test_products_of_muon_are_those_of_newton_schulz() -> None:
    assert work("muon").flops == 5 * (N * N * M + N**3 + 2 * N * N * M)


def test_traffic_of_adamw_is_28_bytes_a_number() -> None:
    """Read gradient, two moments and the parameter, write the last three, 4 bytes each; the count is in no stack."""
    found = work("adamw")
    assert found == StepWork(0.0, 0.0, 28.0 * M * N)


def test_the_floor_is_the_longer_of_arithmetic_and_traffic() -> None:
    rates = MachineRates(flops=1e9, traffic=1e8)
    assert rates.milliseconds(StepWork(2e6, 1e6, 1e5)) == pytest.approx(3.0)
    assert rates.milliseconds(StepWork(1e6, 0.0, 1e6)) == pytest.approx(10.0)


def test_refreshes_are_what_places_of_an_interval_take_more() -> None:
    times = [9.0, 1.0, 1.0, 1.0, 1.0] * 3
    times[6] = 50.0  # one disturbed step, which a median over intervals leaves out
    found = step_times(times, 5)
    assert (found.steady, found.refresh, found.median, found.largest) == (1.0, 8.0, 1.0, 9.0)
    assert found.amortised == pytest.approx(13 / 5)


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


def test_slopes_are_exponents() -> None:
    assert slope([10, 100, 1000], [2, 2 * 10**1.5, 2 * 10**3]) == pytest.approx(1.5)


def test_sets_have_the_declared_sizes() -> None:
    layer = 3 * 256**2 + 256**2 + 8 * 256**2 + 4 * 256
    assert shape_set("gpt").numbers == 4096 * 256 + 4 * layer + 2 * 256
    assert shape_set("gpt:layers=2").numbers == 4096 * 256 + 2 * layer + 2 * 256
    assert 1.5e8 < shape_set("gpt2").numbers < 1.7e8
    assert all(shape_set(name).shapes for name in SETS)
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


def test_rows_of_a_recipe_a_peer_and_a_library_that_is_missing() -> None:
    peer = {"peer": "torch.optim:AdamW", "maths": "adam", "options": {"fused": True}}
    candidates = [{"recipe": "adamw", "maths": "adam"}, peer, {"peer": "no_such_library:Adam", "maths": "adam"}]
    rows = run_bench("step", candidates=candidates, sets=["squares:size=4"], warm=1)
    own, other, missing = rows
    assert own["numbers"] == 256 * 16 and len(own["steps_ms"]) == 10 and own["floor"] and own["times_floor"]
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
    assert missing["problem"] == "not installed: no_such_library" and "amortised" not in missing
    assert own["over_best_other"] == pytest.approx(own["amortised"] / other["amortised"])
    assert other["over_best_other"] is None and math.isfinite(own["amortised"])
    assert missing["problem"] in lay_out(load_bench("step", {}).table(), rows)[1][2]


def test_what_is_refused() -> None:
    for fields, data in (
        ({"candidates": [{"options": {}}]}, ("candidates", "recipe", "peer")),
        ({"candidates": [{"peer": "torch.optim"}]}, ("candidates", "torch.optim", "module:Class")),
        ({"clock": "cpu", "threads": 2}, ("clock", "cpu")),
        ({"sets": ["gpd"]}, ("sets", "gpd", "'gpt'")),
    ):
        with refused(RecipeError, *data):
            run_bench("step", **fields)
