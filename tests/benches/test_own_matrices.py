"""Benches on matrices of the user's own: factors of a saved optimizer, gradients of a run."""

import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eigengraft
from eigengraft.errors import RecipeError
from eigengraft.experiments.benches import BudgetBench, load_bench, run_bench
from eigengraft.experiments.benches.matrices import (
    gradients_of,
    matrix_power,
    saved_factors,
    trained_factors,
    with_unit_norm,
)
from eigengraft.experiments.training.rundir import RunDirectory

from ..cli import invoke
from ..refusals import refused

pytestmark = pytest.mark.slow

FAST: dict[str, Any] = {"seconds": 1e-4}
RUN = """
task: {kind: byte_lm, width: 8, heads: 2, layers: 1, context: 8, batch_size: 4, max_bytes: 65536}
recipe: adamw
lr: 0.003
steps: 4
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    Path("run.yaml").write_text(RUN, encoding="utf-8")


def save(recipe: str, path: str, *overrides: str, wrapped: bool = True) -> eigengraft.Optimizer:
    """Train a small model for some steps and save the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = eigengraft.compose(eigengraft.load_recipe(recipe, list(overrides)), model, lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(20, 6)).square().sum().backward()
        optimizer.step()
    state = optimizer.state_dict()
    torch.save({"optimizer": state, "model": model.state_dict()} if wrapped else state, path)
    return optimizer


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("recipe", ["shampoo", "soap"])
def test_saved_factors_are_those_of_the_optimizer(recipe: str, wrapped: bool) -> None:
    """The statistics of the optimizer's stacks, by parameter and axis; roots, bases and moments are no factors."""
    optimizer = save(recipe, "own.pt", wrapped=wrapped)
    found = saved_factors("own.pt")
    assert {name: a.shape for name, a in found.items()} == {
        "0.weight factor.0": (1, 10, 10), "0.weight factor.1": (1, 6, 6),
        "2.weight factor.0": (1, 4, 4), "2.weight factor.1": (1, 10, 10),
    }  # fmt: skip
    kept = [
        tensor
        for state in optimizer.stack_states()
        for key, slot in state.slots()
        if slot.role == "statistic"
        for tensor in state.stored(key)
    ]
    for a in found.values():
        assert any(stack.shape[1:] == a.shape[1:] and (stack == a).flatten(1).all(1).any() for stack in kept)


def test_each_layer_is_a_row_and_the_worst_is_named() -> None:
    save("shampoo", "own.pt")
    bench = load_bench("roots", {"checkpoint": "own.pt", "solvers": ["eigh", "newton_db"], "exponents": "1/2", **FAST})
    rows = bench.run()
    layers = list(saved_factors("own.pt"))
    assert [row["spectrum"] for row in rows] == [name for name in layers for _ in range(2)]
    assert all(row["size"] == saved_factors("own.pt")[row["spectrum"]].shape[-1] for row in rows)
    *lines, worst = bench.advice(rows)
    assert [line.partition(": ")[0] for line in lines] == layers
    errors = {name: min(row["error"] for row in rows if row["spectrum"] == name) for name in layers}
    assert max(errors, key=lambda name: errors[name]) in worst


def test_blocks_of_one_size_are_one_stack() -> None:
    """The first axis of a 10 x 6 matrix is split into two of 5."""
    save("shampoo", "own.pt", "blocking.size=5")
    found = {name: a for name, a in saved_factors("own.pt").items() if name.startswith("0.weight factor.0")}
    assert {a.shape[1:] for a in found.values()} == {(5, 5)} and sum(map(len, found.values())) >= 2
    assert all(a.shape[-1] <= 5 for a in saved_factors("own.pt").values())


def test_factors_in_codes_are_refused_by_name() -> None:
    storage = 'storage.statistic={"kind": "int8", "min_elements": 1}'
    save("shampoo", "coded.pt", storage)
    with refused(RecipeError, "coded.pt", "storage"):
        saved_factors("coded.pt")
    save("adamw", "adamw.pt")
    with refused(RecipeError, "adamw.pt", "shampoo"):
        saved_factors("adamw.pt")
    torch.save({"weight": torch.zeros(2)}, "weights.pt")
    with refused(RecipeError, "weights.pt", "optimizer"):
        saved_factors("weights.pt")


def test_factors_of_a_run_are_the_running_means_of_its_gradients() -> None:
    mean = torch.zeros(())
    for gradients in islice(gradients_of("run.yaml", 4), 4):
        g = gradients["blocks.0.down.weight"].double()
        mean = 0.9 * mean + 0.1 * (g @ g.mT)
    first, last = trained_factors("run.yaml", (2, 4), 0.9)["blocks.0.down.weight factor.0"]
    torch.testing.assert_close(last[0], mean / (1 - 0.9**4), rtol=1e-12, atol=0)
    assert not torch.equal(first, last)


def test_gradients_leave_random_state_and_threads_of_the_caller_alone() -> None:
    """Also where the caller takes some of them only, or fails between two."""
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = (next(iter(gradients_of("run.yaml", steps))) for steps in (0, 9))
    assert all(torch.equal(first[name], g) for name, g in second.items())
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in gradients_of("run.yaml", 9)]
    assert torch.equal(before, torch.get_rng_state()) and threads == torch.get_num_threads()
    _, same = islice(gradients_of("run.yaml", 0), 2)
    _, trained = islice(gradients_of("run.yaml", 1), 2)
    assert not torch.equal(same["blocks.0.down.weight"], trained["blocks.0.down.weight"])


def test_the_budget_is_the_cheapest_choice_within_the_bound() -> None:
    """Errors are sines of angles over gradients with the present factors as second moments, by their definition."""
    fields: dict[str, Any] = {"solvers": "eigh", "storages": ["float32", "int8"], "intervals": [1, 3], "steps": 6}
    bench = load_bench("budget", {"record": "run.yaml", "ridge": 1e-4, **fields, **FAST})
    assert isinstance(bench, BudgetBench)
    rows = bench.run()
    layer = "blocks.0.down.weight"
    own = {(row["interval"], row["storage"]): row for row in rows if row["layer"] == layer}
    assert set(own) == {(interval, storage) for interval in (1, 3) for storage in ("float32", "int8")}
    kept = 1.0
    for axis in range(2):
        now, before = trained_factors("run.yaml", (6, 4), 0.95)[f"{layer} factor.{axis}"]
        x, y = (
            matrix_power(unit + 1e-4 * torch.eye(len(unit[0])), -0.25)[0] for unit in map(with_unit_norm, (before, now))
        )
        a = with_unit_norm(now)[0]
        cosine = (x @ a @ y).trace() / ((x @ a @ x).trace() * (y @ a @ y).trace()).sqrt()
        kept *= float(cosine) ** 2
    assert own[3, "float32"]["error"] == pytest.approx(math.sqrt(1 - kept), rel=1e-2)
    assert own[1, "float32"]["error"] < 1e-2 < own[3, "float32"]["error"]
    assert own[1, "int8"]["error"] > own[1, "float32"]["error"]
    assert own[1, "int8"]["bytes"] < own[1, "float32"]["bytes"] / 2
    assert own[3, "int8"]["milliseconds"] < own[1, "int8"]["milliseconds"]
    for cost in ("milliseconds", "bytes"):
        chosen = bench.replace(bound=own[1, "int8"]["error"], cost=cost).choice(list(own.values()))
        good = [row for row in own.values() if row["error"] <= own[1, "int8"]["error"]]
        assert chosen is not None and chosen[cost] == min(row[cost] for row in good)
    assert bench.replace(bound=1e-9).choice(list(own.values())) is None
    *_, total, _ = bench.advice(rows)
    assert f"of {len({row['layer'] for row in rows})} layers" in total


def test_the_error_of_an_axis_is_the_largest_of_its_matrices() -> None:
    bench = load_bench("budget", FAST)
    assert isinstance(bench, BudgetBench)
    a = torch.diag_embed(torch.tensor([[1.0, 0.9, 0.8], [1.0, 1e-3, 1e-6]], dtype=torch.float64))
    x = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    mild, far = (bench.squared_sine(x[i : i + 1], a[i : i + 1]) for i in (0, 1))
    assert mild < far / 2 and bench.squared_sine(x, a) == pytest.approx(far, rel=1e-12)


def test_a_checkpoint_has_no_earlier_factors_and_says_so() -> None:
    save("shampoo", "own.pt")
    fields: dict[str, Any] = {"solvers": ["eigh", "cholesky"], "storages": "float32", "intervals": [1, 10]}
    rows = run_bench("budget", checkpoint="own.pt", **fields, **FAST)
    assert [row["layer"] for row in rows if row["candidate"] == "cholesky"] == ["0.weight", "2.weight"]
    assert all(row["problem"] for row in rows if row["candidate"] == "cholesky" or row["interval"] == 10)
    assert {row["layer"] for row in rows if not row["problem"]} == {"0.weight", "2.weight"}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("budget", {"solvers": "eigh", "storages": "float32", "intervals": [1, 2], "steps": 3}),
        ("roots", {"solvers": "eigh", "steps": 3}),
        ("bases", {"solvers": ["eigh", "power_qr"], "refreshes": [1, 2], "every": 2}),
        ("quantizers", {"quantizers": "int8", "steps": 3, "writings": 1}),
        ("statistics", {"statistics": "gram", "width": 4, "samples": 6, "held_out": 6, "steps": 1, "start": 2}),
        ("polar", {"solvers": "svd", "steps": 1}),
    ],
)
def test_every_bench_of_matrices_takes_a_run(kind: str, fields: dict[str, Any]) -> None:
    bench = load_bench(kind, {"record": "run.yaml", **fields, **FAST}, quick=True)
    rows = bench.run()
    layers = {str(row.get("spectrum", row.get("layer"))) for row in rows}
    assert any(name.startswith("blocks.0.attention") for name in layers) and len(layers) > 3
    good = [row for row in rows if not row["problem"] and row["declaration"] is not None]
    assert good and all(
        math.isfinite(row["milliseconds"] if "milliseconds" in row else row["encode_ms"]) for row in good
    )
    assert bench.advice(rows)[-1].startswith("worst layer: ")


def test_a_layer_without_gradients_says_so() -> None:
    """The leading rows of the embedding belong to bytes that the text does not have."""
    fields = {"statistics": "gram", "width": 4, "samples": 6, "held_out": 6, "steps": 1, "start": 2}
    rows = run_bench("statistics", record="run.yaml", **fields, **FAST)
    silent = [row for row in rows if row["problem"]]
    assert [row["layer"] for row in silent] == ["embedding.weight"] and "embedding.weight" in silent[0]["problem"]


def test_a_folder_of_a_checkpoint_is_read() -> None:
    trained = invoke(["train", "run.yaml", "recipe=shampoo", "checkpoint_every=2", "--out", "run"])
    assert trained.exit_code == 0, trained.output
    (folder,) = RunDirectory("run").checkpoints().values()  # a finished run keeps its last one
    result = invoke(
        ["bench", "roots", "--from", str(folder), "--only", "eigh", "--quick", "seconds=1e-4", "--out", "o"]
    )
    assert result.exit_code == 0, result.output
    last = saved_factors("run")
    rows = [json.loads(line) for line in Path("o/rows.jsonl").read_text().splitlines()]
    assert {row["spectrum"] for row in rows} == set(last)
    assert all(torch.equal(a, last[name]) for name, a in saved_factors(str(folder)).items())
    Path("run/empty").mkdir()
    with refused(RecipeError, "checkpoint", "run/empty"):
        saved_factors("run/empty")


def test_the_command_takes_a_run_directory_and_adds_candidates() -> None:
    trained = invoke(["train", "run.yaml", "recipe=shampoo", "checkpoint_every=2", "--out", "run"])
    assert trained.exit_code == 0, trained.output
    candidate = "{kind: eigh, eps: 1.0e-3, relative: true}"
    result = invoke(
        ["bench", "roots", "--from", "run", "--candidate", candidate, "--quick", "seconds=1e-4", "--out", "out"]
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in Path("out/rows.jsonl").read_text().splitlines()]
    assert {row["spectrum"] for row in rows} == set(saved_factors("run"))
    names = {row["candidate"] for row in rows}
    assert "eigh eps=0.001 relative=True" in names and {"eigh", "coupled_newton"} < names
    assert "worst layer: " in result.stdout
    written = json.loads(Path("out/bench.json").read_text())
    assert set(written["columns"]) <= {*rows[0], "milliseconds"} and written["bench"]["checkpoint"] == "run"
    result = invoke(["bench", "roots", "--record", "run", "--only", "eigh", "steps=2", "seconds=1e-4"])
    assert result.exit_code == 0, result.output
