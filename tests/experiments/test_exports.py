"""Files for other programs: a command that an agent of W&B starts, and a submission that AlgoPerf calls."""

import importlib.util
import json
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from torch import nn

from eigengraft import RecipeError, load_recipe
from eigengraft.experiments import load_experiment
from eigengraft.experiments.exports import export_algoperf, export_benchopt, export_sweep

from ..cli import invoke
from ..processes import run_command
from ..refusals import refused

STUDY: dict[str, Any] = {
    "name": "rates",
    "base": {"task": {"kind": "digits", "width": 8, "batch_size": 16}, "recipe": "adamw", "steps": 3, "eval_every": 3},
    "axes": {"method": {"adamw": {}, "sgd": {"recipe": "sgd"}}, "lr": [1e-05, 0.01]},
    "seeds": [0, 1],
}
TUNED = {
    "kind": "tpe",
    "seeds": [7],
    "trials": 9,
    "space": {
        "weight_decay": {"low": 0.001, "high": 0.1, "log": True},
        "schedule.warmup_steps": [1, 2],
        "task.width": {"low": 4, "high": 8, "integer": True},
    },
    "halving": {"rate": 4, "least": 1},
}


def read(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text())


def test_axes_and_seeds_are_a_grid(tmp_path: Path) -> None:
    sweep = read(export_sweep(STUDY, tmp_path))
    assert sweep["method"] == "grid" and sweep["metric"] == {"name": "val_loss", "goal": "minimize"}
    values = {"recipe": ["adamw", "sgd"], "lr": [1e-05, 0.01], "seed": [0, 1]}
    assert sweep["parameters"] == {path: {"values": some} for path, some in values.items()}
    # readers of YAML 1.1 take 1e-05 for a text
    assert "1.0e-05" in (tmp_path / "sweep.yaml").read_text()


def test_the_space_of_a_search_has_distributions(tmp_path: Path) -> None:
    sweep = read(export_sweep({**STUDY, "tune": TUNED}, tmp_path))
    assert (sweep["method"], sweep["run_cap"]) == ("bayes", 9)
    assert sweep["early_terminate"] == {"type": "hyperband", "min_iter": 1, "eta": 4}
    assert sweep["parameters"] == {
        "recipe": {"values": ["adamw", "sgd"]},
        "lr": {"values": [1e-05, 0.01]},
        "weight_decay": {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1},
        "schedule.warmup_steps": {"values": [1, 2]},
        "task.width": {"distribution": "int_uniform", "min": 4, "max": 8},
        "seed": {"values": [7]},
    }


@pytest.mark.slow
def test_the_command_of_an_agent_trains_in_a_directory_of_its_own(tmp_path: Path) -> None:
    axes = {"recipe": {"plain": {"recipe": {"base": "adamw", "set": {"update.rms.beta": 0.9}}}}, "lr": [0.01]}
    sweep = read(export_sweep({**STUDY, "axes": axes}, tmp_path / "sweep"))
    chosen = [f"{path}={some['values'][0]}" for path, some in sweep["parameters"].items()]
    *command, macro = sweep["command"]
    assert macro == "${args_no_hyphens}"
    started = [*command, *chosen, "callbacks=[]"]
    done = run_command(started, tmp_path, WANDB_SWEEP_ID="s", WANDB_RUN_ID="r")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "runs" / "sweep-s" / "r" / "config.json").read_text())
    assert (config["lr"], config["seed"], config["recipe"]["update"][1]["beta"]) == (0.01, 0, 0.9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"axes": {"method": {"a": {"lr": 1, "steps": 5}, "b": {}}}}, ("axes.method", "lr, steps")),
        ({"axes": {"decay": {"a": {}, "b": {"weight_decay": 0.1}}}}, ("axes.decay.a", "weight_decay")),
        ({"exclude": [{"method": "sgd", "lr": "0.01"}]}, ("exclude",)),
        ({"settings": [{"when": {"method": "sgd"}, "set": {"steps": 4}}]}, ("settings",)),
        ({"equal": "seconds"}, ("equal",)),
        ({"tune": {"seeds": [7]}, "axes": {"steps": [3, 4]}}, ("tune", "coordinate_descent", "tpe")),
        (
            {"tune": {**TUNED, "space": {"task.width": {"low": 4, "high": 64, "log": True, "integer": True}}}},
            ("tune.space", 4, 64),
        ),
        ({"axes": {"recipe": ["adamw", "sgd"], "update.rms.beta": [0.9]}}, ("update.rms.beta", "sgd")),
    ],
    ids=["two paths", "no value", "exclude", "settings", "equal", "descent", "integers", "no experiment"],
)
def test_what_a_sweep_cannot_express_is_refused(tmp_path: Path, changes: dict[str, Any], says: tuple[Any, ...]) -> None:
    with refused(RecipeError, *map(str, says)):
        export_sweep({**STUDY, **changes}, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ([], [{"kind": "wandb", "mode": "online"}]),
        (["wandb"], [{"kind": "wandb", "mode": "online"}]),
        (
            [{"kind": "wandb", "project": "mine"}, "patience"],
            [{"kind": "wandb", "project": "mine", "mode": "online"}, {"kind": "patience"}],
        ),
    ],
)
def test_a_sweep_has_one_tracker_with_its_project(tmp_path: Path, callbacks: list[Any], expected: list[Any]) -> None:
    export_sweep({**STUDY, "base": {**STUDY["base"], "callbacks": callbacks}}, tmp_path)
    found = load_experiment(tmp_path / "experiment.yaml").callbacks
    assert found == load_experiment({**STUDY["base"], "callbacks": expected}).callbacks


@pytest.mark.parametrize(
    ("path", "value", "own"),
    [
        ("task.width", 64, 8),
        ("update.rms.beta", 0.5, 0.999),
        ("recipe.update.rms.beta", 0.5, 0.999),
        ("accumulate", 2, 4),
    ],
)
def test_a_label_without_a_value_has_that_of_the_base(tmp_path: Path, path: str, value: Any, own: Any) -> None:
    base = {**STUDY["base"], "accumulate": 4}
    sweep = read(export_sweep({**STUDY, "base": base, "axes": {"a": {"plain": {}, "other": {path: value}}}}, tmp_path))
    assert sweep["parameters"][path] == {"values": [own, value]}


class Workload:
    """As much of a workload of AlgoPerf as a submission uses: regression with the sum of squared errors."""

    step_hint = 30

    def model_fn(self, params: Any, augmented_and_preprocessed_input_batch: Any, **given: Any) -> tuple[Any, Any]:
        assert given["mode"] == "train" and given["update_batch_norm"] and given.get("dropout_rate") in (None, 0.1)
        return params(augmented_and_preprocessed_input_batch["inputs"]), given["model_state"]

    def loss_fn(self, label_batch: Any, logits_batch: Any, mask_batch: Any, label_smoothing: float) -> dict[str, Any]:
        summed = (logits_batch - label_batch).square().sum()
        return {"summed": summed, "n_valid_examples": torch.tensor(len(label_batch))}


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"exported_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that exports a recipe and imports its submission, with a stand-in for AlgoPerf's module."""
    stub = ModuleType("algoperf")
    stub.spec = SimpleNamespace(ForwardPassMode=SimpleNamespace(TRAIN="train"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "algoperf", stub)

    def load(recipe: str, overrides: list[str]) -> tuple[Any, dict[str, Any]]:
        path = export_algoperf(recipe, tmp_path / "submission", overrides)
        return imported(path), json.loads((path.parent / "tuning_search_space.json").read_text())

    return load


def run(module: Any, steps: int, **chosen: Any) -> tuple[list[float], Any]:
    """The losses of steps with these hyperparameters, and the optimizer, as AlgoPerf's loop makes them."""
    torch.manual_seed(0)
    model, workload = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), Workload()
    inputs = torch.randn(32, 6)
    batch = {"inputs": inputs, "targets": inputs[:, :2] * 2}
    point = namedtuple("Hyperparameters", chosen)(**chosen)  # type: ignore[misc]
    state = module.init_optimizer_state(workload, model, None, point, None)
    losses = []
    for step in range(steps):
        given = module.data_selection(workload, iter([batch]), state, model, None, point, step, None)
        state, model, _ = module.update_params(workload, model, None, None, point, given, None, state, [], step, None)
        losses.append(float((model(inputs) - batch["targets"]).square().mean().detach()))
        state, model, _ = module.prepare_for_eval(workload, model, None, None, point, None, state, [], step, None)
    return losses, state["optimizer"]


def test_a_submission_trains_with_the_hyperparameters_of_its_space(submission: Any) -> None:
    module, space = submission("soap_fitted", ["lr=interval(1e-4,1e-1)", "update.eigenbasis.refresh.steps=1,2"])
    assert space["learning_rate"] == {"min": 1e-4, "max": 0.1, "scaling": "log"}
    assert space["update__eigenbasis__refresh__steps"] == {"feasible_points": [1, 2]}
    assert space["warmup_factor"] == {"feasible_points": [0.05]}
    chosen = {name: some.get("feasible_points", [0.03])[-1] for name, some in space.items()}
    losses, optimizer = run(module, 30, **chosen, dropout_rate=0.1, grad_clip=1.0)
    assert losses[-1] < losses[0] / 2
    (stage,) = [stage for path, stage in optimizer.recipe.stages() if path == "update.eigenbasis"]
    assert stage.every.steps == 2 and optimizer.recipe.total_steps == 30
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0, abs=1e-6)  # the end of the cosine


def test_a_submission_evaluates_averaged_iterates_and_trains_on(submission: Any) -> None:
    module, space = submission("schedule_free_adamw", [])
    assert space["learning_rate"]["max"] == pytest.approx(100 * space["learning_rate"]["min"])
    losses, optimizer = run(module, 20, learning_rate=0.03, weight_decay=0.0)
    assert optimizer.iterate == "eval" and losses[-1] < losses[0]


def test_a_submission_knows_the_batch_sizes_of_workloads_and_their_variants(submission: Any) -> None:
    module, _ = submission("adamw", [])
    assert [module.get_batch_size(name) for name in ("imagenet_resnet_gelu", "imagenet_vit_glu")] == [512, 1024]
    with refused(ValueError, "imagenet_x", "wmt"):
        module.get_batch_size("imagenet_x")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("lr=interval(1e-2,1e-4)", ("lr", "1e-2")),
        ("lr=interval(low,high)", ("lr", "low")),
        ("update.rms.beta=0.9,1.5", ("update.rms.beta", 1.5)),
        ("update.rsm.beta=0.9,0.95", ("update.rsm.beta", "rms")),
        ("lr=", ("lr=", "~lr", "lr=null")),
    ],
)
def test_hyperparameters_that_the_recipe_refuses_are_no_submission(
    tmp_path: Path, override: str, says: tuple[Any, ...]
) -> None:
    with refused(RecipeError, *map(str, says)):
        export_algoperf("adamw", tmp_path / "submission", [override])
    assert not (tmp_path / "submission").exists()


class Loss(nn.Module):
    """A model whose call returns the loss first, as those of benchmark_nanogpt do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (self.net(inputs) - 2 * inputs[:, :2]).square().mean(), None


class Loader:
    def get_distributed_data_generator(self, batch_size: int, world_size: int, rank: int) -> Iterator[Any]:
        while True:
            yield (torch.randn(batch_size, 6, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("recipe", ["soap_fitted", "schedule_free_adamw"])
def test_a_solver_of_benchopt_starts_every_run_from_the_first_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """benchopt repeats a run with one model. Its callback evaluates before each step, and ends the run."""
    stub = ModuleType("benchopt")
    stub.BaseSolver = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchopt", stub)
    monkeypatch.delenv("RANK", raising=False)
    module, model = imported(export_benchopt(tmp_path)), Loss()
    runs = []
    for _ in range(2):
        solver = module.Solver()
        vars(solver).update(recipe=recipe, learning_rate=0.03, weight_decay=0.0, num_steps=20, batch_size=32)
        solver.set_objective(Loader(), model)
        losses: list[float] = []

        def evaluated(losses: list[float] = losses) -> bool:
            losses.append(float(model(*next(Loader().get_distributed_data_generator(32, 1, 0)))[0].detach()))
            return len(losses) < 40

        solver.run(evaluated)
        assert solver.get_result() == {"model": model, "dist": None}
        runs.append(losses)
    assert runs[0] == runs[1] and len(runs[0]) == 21 and runs[0][-1] < runs[0][0] / 2


def test_the_commands_write_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(json.dumps(STUDY))
    for arguments, name in (
        (["sweep", "study.yaml", "weight_decay=0.1,0.2"], "sweep/sweep.yaml"),
        (["algoperf", "muon", "update.momentum.beta=0.9"], "submission/submission.py"),
        (["benchopt"], "solvers/eigengraft.py"),
    ):
        result = invoke(["export", *arguments])
        assert result.exit_code == 0 and name in result.output, result.output
    assert read(tmp_path / "sweep" / "sweep.yaml")["parameters"]["weight_decay"] == {"values": [0.1, 0.2]}
    declared = json.loads((tmp_path / "submission" / "recipe.json").read_text())
    assert load_recipe(declared) == load_recipe("muon", {"update.momentum.beta": 0.9})
    assert "class Solver(BaseSolver)" in export_benchopt(tmp_path / "own").read_text()
