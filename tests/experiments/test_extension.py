"""Runs that are made longer: they end as if they had had the length from the start, or are refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eigengraft import RecipeError
from eigengraft.experiments import Experiment, load_experiment, train
from eigengraft.experiments.training.rundir import RunDirectory
from eigengraft.experiments.training.schedule import Constant, Cosine, Linear, PowerDecay, WarmupStableDecay

from ..cli import invoke
from ..refusals import check_said, refused

pytestmark = pytest.mark.slow

TINY = {
    "task": {"kind": "digits", "layers": 1, "width": 8, "batch_size": 8},
    "recipe": "soap_fitted",
    "schedule": {"kind": "constant", "warmup_steps": 2},
    "log_every": 2,
    "eval_every": 4,
    "checkpoint_every": 3,
}
WSD = {"kind": "wsd", "warmup_steps": 2, "decay_fraction": 0.4}


def experiment(steps: int, **changes: Any) -> Experiment:
    return load_experiment({**TINY, "steps": steps, **changes})


def final(directory: Path) -> tuple[dict[str, torch.Tensor], float]:
    _, last = max(RunDirectory(directory).checkpoints().items())
    weights = torch.load(last / "run.pt", weights_only=True)["model"]
    return weights, json.loads((directory / "result.json").read_text())["val_loss"]


def same(one: Path, other: Path) -> bool:
    (weights, loss), (others, other_loss) = final(one), final(other)
    return loss == other_loss and all(torch.equal(weights[name], others[name]) for name in others)


@pytest.mark.parametrize("recipe", ["soap_fitted", "schedule_free_adamw", "muon"])
@pytest.mark.parametrize("schedule", [TINY["schedule"], WSD])
def test_an_extended_run_ends_as_a_run_of_its_length(tmp_path: Path, schedule: dict[str, Any], recipe: str) -> None:
    """wsd falls after step 7 of 10, so that the run goes on from the checkpoint of this step.

    With `constant` it goes on after the evaluation of the old last step, which the whole run does not have.
    """
    chosen = {"schedule": schedule, "recipe": recipe}
    train(experiment(10, **chosen), tmp_path / "run")
    result = train(experiment(16, **chosen), tmp_path / "run", extend=True)
    train(experiment(16, **chosen), tmp_path / "whole")
    assert result.steps == 16 and same(tmp_path / "run", tmp_path / "whole")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] == 16
    assert [row["lr"] for row in rows] == [
        row["lr"]
        for row in map(json.loads, (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines())
        if row["step"] in steps
    ]


def test_a_run_is_extended_twice_and_the_same_call_again_returns_its_result(tmp_path: Path) -> None:
    train(experiment(4, schedule=WSD), tmp_path / "run")
    for steps in (10, 16):
        train(experiment(steps, schedule=WSD), tmp_path / "run", extend=True)
    again = train(experiment(16, schedule=WSD), tmp_path / "run", extend=True)
    train(experiment(16, schedule=WSD), tmp_path / "whole")
    assert again.steps == 16 and same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("place", ["result", "checkpoint", "config"])
def test_a_kill_during_the_extension_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The extension removes the result, replaces the checkpoint, and then writes the configuration."""
    train(experiment(10, schedule=WSD), tmp_path / "run")
    with monkeypatch.context() as patch:

        def die(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        target = {"result": (Path, "unlink"), "checkpoint": (Path, "replace"), "config": (RunDirectory, "write")}
        patch.setattr(*target[place], die)
        with pytest.raises(KeyboardInterrupt):
            train(experiment(16, schedule=WSD), tmp_path / "run", extend=True)
    train(experiment(16, schedule=WSD), tmp_path / "run", extend=True)
    train(experiment(16, schedule=WSD), tmp_path / "whole")
    assert same(tmp_path / "run", tmp_path / "whole")


def test_a_run_killed_while_it_is_extended_continues(tmp_path: Path) -> None:
    train(experiment(6), tmp_path / "run")

    def stop(tick: Any) -> None:
        if tick.step == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(experiment(14), tmp_path / "run", stop, extend=True)
    train(experiment(14), tmp_path / "run")
    train(experiment(14), tmp_path / "whole")
    assert same(tmp_path / "run", tmp_path / "whole")


FALLING = {"recipe": {"base": "adamw", "set": {"update.rms.beta": {"from": 0.9, "to": 0.99, "fraction": 1.0}}}}


@pytest.mark.parametrize(
    ("first", "longer", "says"),
    [
        ({"schedule": "cosine"}, {"schedule": "cosine"}, ("schedule.cosine", 6, 12)),
        ({"schedule": {"kind": "power", "power": 0.5}}, {}, ("schedule.kind", "power", "constant")),
        (FALLING, FALLING, ("recipe.update.rms.beta",)),
        ({"recipe": "sgd", "lr": 1e30}, {"recipe": "sgd", "lr": 1e30}, ("diverged",)),
        ({"callbacks": [{"kind": "stop_after", "step": 4}]},) * 2 + ((4, 6),),
        ({"keep_checkpoint": False}, {}, ("checkpoint",)),
        ({}, {"seed": 1}, ("seed", 0, 1)),
        ({}, {"steps": 5}, (6, 5)),
    ],
    ids=["cosine", "another schedule", "fraction", "diverged", "stopped", "no checkpoint", "another run", "shorter"],
)
def test_a_run_without_a_common_beginning_is_refused_and_kept(
    tmp_path: Path, first: dict[str, Any], longer: dict[str, Any], says: tuple[Any, ...]
) -> None:
    result = train(experiment(6, **first), tmp_path / "run")
    with refused(RecipeError, *map(str, says)):
        train(experiment(**{"steps": 12, **longer}), tmp_path / "run", extend=True)
    assert train(experiment(6, **first), tmp_path / "run") == result


def test_the_command_advises_extension_and_continues_a_run_given_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = {"task": {"kind": "digits", "width": 4}, "recipe": "adamw", "steps": 4, "eval_every": 2}
    Path("exp.yaml").write_text(json.dumps(fields))

    def command(*arguments: str) -> str:
        return invoke(["train", *arguments]).output

    assert "continues" not in command("exp.yaml", "--out", "run")
    check_said(command("exp.yaml", "steps=6", "--out", "run"), "steps: 4 -> 6", "--extend 6")
    extended = command("run", "--extend", "6")
    assert "continues from step 4" in extended and "after 6 steps" in extended
    check_said(command("exp.yaml", "--out", "run"), "steps: 6 -> 4", "--extend 6")
    again = command("run")
    assert "after 6 steps" in again and "continues" not in again
    check_said(command("run", "--extend"), "--extend", "STEPS")


def test_an_empty_directory_has_no_run_to_extend(tmp_path: Path) -> None:
    with refused(RecipeError, "run", "--extend"):
        train(experiment(6), tmp_path / "run", extend=True)


def test_schedules_know_the_steps_that_longer_runs_share() -> None:
    assert Constant(warmup_steps=3).shared_steps(10) == 11
    assert WarmupStableDecay(decay_fraction=0.25).shared_steps(100) == 76
    for falling in (Cosine(), Linear(), PowerDecay(), WarmupStableDecay(decay_fraction=1)):
        assert falling.replace(warmup_steps=3).shared_steps(10) == 4
