"""A training run: what it writes, what it refuses, and that no kill changes its trajectory."""

import hashlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eigengraft import RecipeError
from eigengraft.experiments import Experiment, Tick, load_experiment, train
from eigengraft.experiments.training import environment
from eigengraft.experiments.training.rundir import RunDirectory

from .. import processes
from ..refusals import refused

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TRAJECTORY = ("step", "loss", "val_loss", "val_accuracy", "lr", "tokens", "flops")
NORMS = ("weight_norm", "gradient_norm", "update_ratio", "weight_growth")
CONTRACT = {*TRAJECTORY, "seconds", "step_ms", "cpu_ms", "optimizer_ms", "skipped", "clipped", "failed_roots"}
CONTRACT |= {f"{norm}{end}" for norm in NORMS for end in ("", "_largest", "_smallest")}
CONTRACT |= {f"{norm}_{end}_layer" for norm in NORMS for end in ("largest", "smallest")}
DIGITS = {
    "task": {"kind": "digits", "width": 16, "batch_size": 32},
    "recipe": "soap_fitted",
    "schedule": {"kind": "cosine", "warmup_steps": 3},
    "steps": 14,
    "log_every": 2,
    "eval_every": 5,
    "checkpoint_every": 3,
}
TEXT = {
    **DIGITS,
    "task": {"kind": "byte_lm", "layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 4}
    | {"max_bytes": 65536, "eval_sequences": 16},
    "steps": 60,
    "log_every": 4,
    "eval_every": 15,
    "checkpoint_every": 7,
}


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def trajectory(directory: Path) -> list[list[Any]]:
    return [[row[key] for key in TRAJECTORY] for row in rows(directory)]


def read(directory: Path, name: str) -> dict[str, Any]:
    content = json.loads((directory / f"{name}.json").read_text())
    assert isinstance(content, dict)
    return content


def weights(directory: Path) -> Any:
    _, last = max(RunDirectory(directory).checkpoints().items())
    return torch.load(last / "run.pt", weights_only=True)["model"]


class Terminated(Exception):
    """Ends a run at a chosen step, as an interrupt would."""


def stop_at(step: int) -> Callable[[Tick], None]:
    def progress(tick: Tick) -> None:
        if tick.step == step:
            raise Terminated

    return progress


def test_a_path_in_place_of_an_experiment_is_refused(tmp_path: Path) -> None:
    source: Any = "experiment.yaml"
    with refused(TypeError, "Experiment", "str", "load_experiment"):
        train(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


class TestFiles:
    @pytest.fixture(scope="class")
    @staticmethod
    def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Experiment, list[Tick]]:
        directory = tmp_path_factory.mktemp("runs") / "deep" / "run"
        experiment = load_experiment(DIGITS)
        ticks: list[Tick] = []
        train(experiment, directory, ticks.append)
        return directory, experiment, ticks

    def test_rows_keep_the_contract(self, run: tuple[Path, Experiment, list[Tick]]) -> None:
        directory, _, _ = run
        found = rows(directory)
        assert all(set(row) == CONTRACT for row in found)
        assert [row["step"] for row in found] == [2, 4, 5, 6, 8, 10, 12, 14]
        assert [row["step"] for row in found if row["val_loss"] is not None] == [5, 10, 14]
        assert all((row["val_loss"] is None) == (row["val_accuracy"] is None) for row in found)
        assert [row["tokens"] for row in found] == [32 * row["step"] for row in found]  # the images of a batch
        assert all(row["flops"] == 6 * row["tokens"] * read(directory, "result")["parameters"] for row in found)
        seconds = [row["seconds"] for row in found]
        assert seconds == sorted(seconds) and seconds[0] > 0
        assert all(0 < row["optimizer_ms"] < row["step_ms"] and row["cpu_ms"] > 0 for row in found)

    def test_a_row_gives_the_mean_loss_since_the_row_before_and_the_rate_of_its_step(
        self, run: tuple[Path, Experiment, list[Tick]]
    ) -> None:
        directory, experiment, ticks = run
        assert [tick.step for tick in ticks] == list(range(1, 15))
        peak = experiment.recipe.lr
        before = 0
        for row in rows(directory):
            losses = [tick.loss for tick in ticks[before : row["step"]]]
            assert row["loss"] == pytest.approx(sum(losses) / len(losses))
            assert row["lr"] == pytest.approx(peak * experiment.schedule.factor(row["step"] - 1, 14))
            before = row["step"]

    def test_the_result_is_that_of_the_last_row(self, run: tuple[Path, Experiment, list[Tick]]) -> None:
        directory, experiment, _ = run
        result, last = read(directory, "result"), rows(directory)[-1]
        assert result["diverged"] is False
        assert result["steps"] == 14 and result["train_loss"] == last["loss"]
        assert [result[key] for key in ("val_loss", "val_accuracy", "seconds")] == [
            last[key] for key in ("val_loss", "val_accuracy", "seconds")
        ]
        assert result["parameters"] == sum(p.numel() for p in experiment.task.new_model(0).parameters())
        assert result["state_bytes_per_parameter"] == result["state_bytes"] / result["parameters"] > 0
        assert min(row["step_ms"] for row in rows(directory)) <= result["step_ms"]

    def test_the_configuration_is_whole_and_reads_back_equal(self, run: tuple[Path, Experiment, list[Tick]]) -> None:
        directory, experiment, _ = run
        config = read(directory, "config")
        assert set(config) == set(Experiment.model_fields) - {"overrides"}
        assert config["recipe"]["update"] and config["task"]["kind"] == "digits"
        assert load_experiment(config) == experiment
        assert load_experiment(directory / "config.json") == experiment

    def test_the_environment_names_versions_machine_and_data(self, run: tuple[Path, Experiment, list[Tick]]) -> None:
        directory, experiment, _ = run
        environment = read(directory, "env")
        assert environment["torch"] == torch.__version__
        assert environment["command"] == sys.argv
        assert environment["threads"] == 1
        assert environment["data"]["sha256"] == experiment.task.load().fingerprint.sha256

    def test_nothing_else_is_left_behind(self, run: tuple[Path, Experiment, list[Tick]]) -> None:
        names = {path.name for path in run[0].iterdir()}
        assert names == {
            "config.json",
            "env.json",
            "metrics.jsonl",
            "diagnostics.jsonl",
            "checkpoint-14",
            "result.json",
            "lock",
        }


def test_a_complete_run_keeps_no_checkpoint_if_none_is_wanted(tmp_path: Path) -> None:
    """It is not trained again, and a complete run loses its checkpoint when that is asked for later."""
    few = {**DIGITS, "steps": 5}
    first = train(load_experiment(few), tmp_path)
    assert [*RunDirectory(tmp_path).checkpoints()] == [5]
    assert train(load_experiment({**few, "keep_checkpoint": False}), tmp_path) == first
    assert not RunDirectory(tmp_path).checkpoints()
    train(load_experiment({**few, "keep_checkpoint": False}), tmp_path / "new")
    assert trajectory(tmp_path / "new") == trajectory(tmp_path) and not RunDirectory(tmp_path / "new").checkpoints()


def test_training_learns(tmp_path: Path) -> None:
    result = train(load_experiment(DIGITS, ["steps=60", "eval_every=60", "lr=0.02"]), tmp_path / "run")
    assert result.val_loss is not None and result.val_accuracy is not None
    assert result.val_loss < 0.6 * math.log(10)
    assert result.val_accuracy > 0.6


def test_a_complete_run_is_not_run_again(tmp_path: Path) -> None:
    experiment = load_experiment(DIGITS)
    first = train(experiment, tmp_path / "run")
    ticks: list[Tick] = []
    assert train(experiment, tmp_path / "run", ticks.append) == first
    assert ticks == []


@pytest.mark.parametrize("step", [1, 2, 3, 4, 6, 10, 13, 14])
def test_an_interrupt_at_any_step_leaves_the_trajectory_as_it_is(tmp_path: Path, step: int) -> None:
    experiment = load_experiment(DIGITS)
    whole = train(experiment, tmp_path / "whole")
    with pytest.raises(Terminated):
        train(experiment, tmp_path / "parts", stop_at(step))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 99, "lo')  # a row that a kill cut short
    result = train(experiment, tmp_path / "parts")
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")
    assert (result.val_loss, result.val_accuracy) == (whole.val_loss, whole.val_accuracy)
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0)


def told(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "diagnostics.jsonl").read_text().splitlines()]


def test_diagnostics_are_written_beside_the_metrics_and_change_no_number(tmp_path: Path) -> None:
    train(load_experiment(DIGITS), tmp_path / "plain")
    train(load_experiment(DIGITS, ['diagnostics="every 4"']), tmp_path / "run")
    assert trajectory(tmp_path / "run") == trajectory(tmp_path / "plain")
    assert {line["step"] for line in told(tmp_path / "plain")} == {14}, "of the end alone, about layers alone"
    assert {(line["stage"], line["slot"]) for line in told(tmp_path / "plain")} == {("", "")}
    lines = told(tmp_path / "run")
    assert sorted({line["step"] for line in lines if line["stage"]}) == [4, 8, 12, 14]  # each fourth step, and the last
    assert {tuple(line) for line in lines} == {("step", "parameter", "stage", "slot", "measure", "value")}
    asked = {"update_rms", "cosine", "condition", "off_diagonal", "angle", "staleness", "failures", "skipped"}
    assert asked <= {line["measure"] for line in lines}
    assert len(lines) == len({tuple(line.values())[:5] for line in lines})


@pytest.mark.parametrize("step", [3, 5, 9])
def test_an_interrupt_leaves_the_diagnostics_as_they_are(tmp_path: Path, step: int) -> None:
    experiment = load_experiment(DIGITS, ['diagnostics="every 4"'])
    train(experiment, tmp_path / "whole")
    with pytest.raises(Terminated):
        train(experiment, tmp_path / "parts", stop_at(step))
    with (tmp_path / "parts" / "diagnostics.jsonl").open("a") as stream:
        stream.write('{"step": 1, "par')  # a row that a kill cut short
    train(experiment, tmp_path / "parts")
    assert told(tmp_path / "parts") == told(tmp_path / "whole")


def test_a_run_goes_on_with_other_diagnostics(tmp_path: Path) -> None:
    with pytest.raises(Terminated):
        train(load_experiment(DIGITS), tmp_path / "run", stop_at(9))
    train(load_experiment(DIGITS, ['diagnostics="every 6"']), tmp_path / "run")
    assert {line["step"] for line in told(tmp_path / "run")} == {12, 14}


@pytest.mark.parametrize("text", ['"50"', "50", '"every 0"', '"every 5 steps"'])
def test_diagnostics_that_say_nothing_are_refused(text: str) -> None:
    with refused(RecipeError, "diagnostics"):
        load_experiment(DIGITS, [f"diagnostics={text}"])


def test_the_digest_of_the_library_has_files_in_inner_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(environment, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path]))
    found = []
    for text in ("", "# a remark"):
        (tmp_path / "inner" / "part.py").write_text(text)
        found.append(environment.library_digest.__wrapped__())
    assert found[0] != found[1]


@pytest.mark.parametrize("file", ["config.json", "checkpoint-6", "result.json"])
def test_a_kill_while_a_file_is_written_loses_nothing(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment(DIGITS)
    train(experiment, tmp_path / "whole")
    real = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == file:
            damaged = self / "run.pt" if self.is_dir() else self
            damaged.write_bytes(damaged.read_bytes()[:10])
            raise Terminated
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Terminated):
            train(experiment, tmp_path / "parts")
    train(experiment, tmp_path / "parts")
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")


def test_what_a_killed_process_left_unfinished_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".config.json.1.partial").write_text("{")
    (tmp_path / ".checkpoint-7.partial").mkdir()
    (tmp_path / ".checkpoint-7.partial" / "run.pt").write_bytes(b"?")
    train(load_experiment(DIGITS), tmp_path)
    assert not list(tmp_path.glob(".*"))


CHILD = """
import sys, time
from eigengraft.experiments import load_experiment, train
train(load_experiment(sys.argv[1]), sys.argv[2], lambda tick: time.sleep(0.02))
"""


NET = """
from torch import nn
class Net(nn.Linear):
    pass
"""
MINE = """
from typing import Literal
from net import Net
from torch import nn
from eigengraft.experiments.tasks import Digits, Task
class Mine(Task):
    kind: Literal["mine"] = "mine"
    def load(self): return Digits(batch_size=8).load()
    def build(self): return nn.Sequential(nn.Flatten(), Net(64, 10))
"""
IMPORTED = """
import os, sys
sys.path.insert(0, os.getcwd())
from eigengraft.experiments import load_experiment, train
source, directory, steps, stop = sys.argv[1:]
experiment = load_experiment(source, [steps, "eval_every=4", "log_every=1", "checkpoint_every=2"])
train(experiment, directory, lambda tick: os._exit(9) if str(tick.step) == stop else None)
"""


def kill_after(step: int, experiment: Path, directory: Path) -> None:
    """Train in another process and kill it once metrics of `step` are there."""
    child = processes.start("-c", CHILD, experiment, directory, folder=experiment.parent)
    metrics = directory / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        assert child.poll() is None, child.communicate()
        time.sleep(0.005)
    child.kill()
    assert child.communicate() == ("", "")
    assert child.returncode == -signal.SIGKILL


def test_a_run_killed_twice_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    file = tmp_path / "text.yaml"
    file.write_text(json.dumps(TEXT))  # JSON is YAML
    experiment = load_experiment(file)
    whole = train(experiment, tmp_path / "whole")
    kill_after(4, file, tmp_path / "parts")  # before the first checkpoint
    kill_after(32, file, tmp_path / "parts")
    assert not (tmp_path / "parts" / "result.json").exists()
    last = max(RunDirectory(tmp_path / "parts").checkpoints())
    assert last >= 28
    seen: list[int] = []
    result = train(experiment, tmp_path / "parts", lambda tick: seen.append(tick.step))
    assert seen[0] == last + 1
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")
    assert result.val_loss == whole.val_loss
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0)


def test_a_diverging_run_ends_with_a_result(tmp_path: Path) -> None:
    experiment = load_experiment(DIGITS, ["recipe=sgd", "lr=1e30", "steps=40", "schedule=constant"])
    result = train(experiment, tmp_path / "run")
    assert result.diverged and result.val_loss is None and result.val_accuracy is None
    assert 1 < result.steps < 40
    assert read(tmp_path / "run", "result")["diverged"] is True
    assert rows(tmp_path / "run")[-1]["loss"] is None
    assert train(experiment, tmp_path / "run") == result


def test_the_largest_gradient_norm_is_kept(tmp_path: Path) -> None:
    # with plain gradient descent of rate 1 a step moves the weights by the clipped gradient
    overrides = ["recipe=sgd", "recipe.update=[identity]", "recipe.weight_decay.rate=0", "lr=1", "grad_clip=1e-3"]
    experiment = load_experiment(DIGITS, [*overrides, "schedule=constant", "steps=1"])
    train(experiment, tmp_path / "run")
    start = experiment.task.new_model(0).state_dict()
    moved = math.sqrt(sum(float((weights(tmp_path / "run")[k] - start[k]).square().sum()) for k in start))
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_the_library_prints_nothing_and_leaves_the_callers_state(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    train(load_experiment(DIGITS), tmp_path / "run")
    assert torch.get_num_threads() == 2
    torch.testing.assert_close(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")


def test_seeds_differ_in_weights_and_data(tmp_path: Path) -> None:
    for seed in (0, 1):
        train(load_experiment(DIGITS, [f"seed={seed}"]), tmp_path / str(seed))
    assert trajectory(tmp_path / "0") != trajectory(tmp_path / "1")


class TestRefusals:
    def test_the_directory_of_another_experiment(self, tmp_path: Path) -> None:
        train(load_experiment(DIGITS), tmp_path / "run")
        other = load_experiment(DIGITS, ["steps=15", "task.width=17", "update.eigenbasis.refresh.steps=7"])
        with refused(RecipeError, "run") as caught:
            train(other, tmp_path / "run")
        lines = str(caught.value).splitlines()
        assert "steps: 14 -> 15" in lines
        assert "task.width: 16 -> 17" in lines
        assert "recipe.update.eigenbasis.refresh.steps: 10 -> 7" in lines

    def test_a_run_that_failed_before_its_first_step_leaves_its_directory_to_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(load_experiment(DIGITS).task), "build", lambda self: 1 / 0)
        with refused(RuntimeError, "build()"):
            train(load_experiment(DIGITS), tmp_path)
        monkeypatch.undo()
        other = load_experiment(DIGITS, ["task.width=17"])
        train(other, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["task"]["width"] == 17
        assert not (tmp_path / "fault.json").exists()

    def test_the_description_of_a_recipe_may_change(self, tmp_path: Path) -> None:
        train(load_experiment(DIGITS), tmp_path)
        before = (tmp_path / "result.json").read_bytes()
        train(load_experiment(DIGITS, ["recipe.about=in other words"]), tmp_path)
        assert (tmp_path / "result.json").read_bytes() == before

    def test_differences_begin_with_those_of_whole_fields(self, tmp_path: Path) -> None:
        configs = (
            load_experiment({"task": "digits", "recipe": name}).model_dump(mode="json") for name in ("adamw", "soap")
        )
        with refused(RecipeError, "recipe.name", "recipe.update") as caught:
            RunDirectory(tmp_path).require_config(*configs)
        assert "recipe.update.momentum" not in str(caught.value) and "absent" not in str(caught.value)

    def test_a_directory_with_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        with refused(RecipeError, "directory"):
            train(load_experiment(DIGITS), tmp_path)

    def test_other_data_than_the_run_began_with(self, tmp_path: Path) -> None:
        text = tmp_path / "text"
        text.write_bytes(b"one thing " * 1000)
        experiment = load_experiment(TEXT, [f"task.path={text}"])
        with pytest.raises(Terminated):
            train(experiment, tmp_path / "run", stop_at(9))
        text.write_bytes(b"no things " * 1000)
        sha256 = hashlib.sha256(b"no things " * 1000).hexdigest()
        with refused(RecipeError, sha256[:16]):
            train(experiment, tmp_path / "run")

    @pytest.mark.parametrize("ended", [False, True])
    def test_other_code_than_the_run_began_with(self, tmp_path: Path, ended: bool) -> None:
        """The task of an imported file has its model from a file beside it, which is edited."""
        (tmp_path / "net.py").write_text(NET)
        (tmp_path / "mine.py").write_text(MINE)
        steps, stop = ("steps=8", "") if ended else ("steps=100000", "8")
        (tmp_path / "mine.yaml").write_text("{imports: [mine.py], task: mine, recipe: adamw}")
        child = ("-c", IMPORTED, "mine.yaml", "run", steps, stop)
        assert processes.run(*child, folder=tmp_path).returncode == (0 if ended else 9)
        recorded = read(tmp_path / "run", "env")["imports"]
        assert recorded == {
            name: hashlib.sha256((tmp_path / file).read_bytes()).hexdigest()
            for name, file in (("mine.py", "mine.py"), ("net", "net.py"))
        }
        before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
        (tmp_path / "net.py").write_text(NET + "\n# a remark changes the file\n")
        done = processes.run(*child, folder=tmp_path)
        assert done.returncode == 1
        assert f"imports net: {recorded['net'][:16]} -> " in done.stderr
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before

    @pytest.mark.parametrize("entry", ["eigengraft", "sources", "torch", "numpy"])
    def test_another_version_than_the_run_began_with(self, tmp_path: Path, entry: str) -> None:
        experiment = load_experiment(DIGITS, ["steps=4"])
        train(experiment, tmp_path)
        (tmp_path / "env.json").write_text(json.dumps({**read(tmp_path, "env"), entry: "0.0.9"}))
        with refused(RecipeError, f"{entry}: 0.0.9"):
            train(experiment, tmp_path)

    def test_a_directory_in_which_another_process_trains(self, tmp_path: Path) -> None:
        experiment = load_experiment(DIGITS)

        def intrude(tick: Tick) -> None:
            train(experiment, tmp_path / "run")

        with refused(RecipeError, "process"):
            train(experiment, tmp_path / "run", intrude)

    def test_a_broken_checkpoint(self, tmp_path: Path) -> None:
        experiment = load_experiment(DIGITS)
        with pytest.raises(Terminated):
            train(experiment, tmp_path / "run", stop_at(5))
        (tmp_path / "run" / "checkpoint-3" / "run.pt").write_bytes(b"not a checkpoint")
        with refused(RecipeError, "checkpoint-3", f"remove {tmp_path / 'run'}"):
            train(experiment, tmp_path / "run")

    def test_metrics_that_lack_rows_before_the_checkpoint(self, tmp_path: Path) -> None:
        experiment = load_experiment(DIGITS)
        with pytest.raises(Terminated):
            train(experiment, tmp_path / "run", stop_at(10))
        metrics = tmp_path / "run" / "metrics.jsonl"
        metrics.write_text(metrics.read_text().partition("\n")[0] + "\n")
        with refused(RecipeError, metrics, "rows"):
            train(experiment, tmp_path / "run")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
    def test_a_device_that_is_not_there(self, tmp_path: Path) -> None:
        with refused(RecipeError, "cuda"):
            train(load_experiment(DIGITS, ["device=cuda"]), tmp_path / "run")


@pytest.mark.gpu
def test_a_run_on_a_cuda_device_continues_as_well(tmp_path: Path) -> None:
    experiment = load_experiment(DIGITS, ["device=cuda"])
    train(experiment, tmp_path / "whole")
    with pytest.raises(Terminated):
        train(experiment, tmp_path / "parts", stop_at(10))
    train(experiment, tmp_path / "parts")
    assert trajectory(tmp_path / "parts") == trajectory(tmp_path / "whole")
