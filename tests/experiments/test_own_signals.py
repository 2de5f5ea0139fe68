"""Signals of one's own in training runs: provided by a callback, or said to be missing before the first step."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from eigengraft import RecipeError, Request, Signal, Stage, State, StepContext, Traits, register_signal
from eigengraft.experiments import load_experiment, train
from eigengraft.experiments.doctor import diagnose
from eigengraft.experiments.training.callbacks import Callback, RunView
from eigengraft.experiments.training.outcome import Tick

from ..refusals import refused, warned

pytestmark = pytest.mark.slow
register_signal(Signal("brightness", "step", "the mean of the batch's inputs"))


class Needs(Stage):
    """d * brightness"""

    kind: Literal["needs_brightness"] = "needs_brightness"

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request("brightness"),))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction * context.signal("brightness").to(direction.dtype)


class Takes(Stage):
    """d * brightness, where it is provided"""

    kind: Literal["takes_brightness"] = "takes_brightness"

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request("brightness", when="if_given"),))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction * context.signal("brightness").to(direction) if "brightness" in context.signals else direction


class Brightness(Callback):
    """Provides the mean of the batch's inputs, and writes down what it was."""

    kind: Literal["brightness"] = "brightness"

    def started(self, run: RunView) -> None:
        path = run.directory / "brightness.txt"
        with refused(ValueError, "batch"):
            run.batch()

        def mean() -> float:
            value = float(run.batch().inputs.mean())
            with path.open("a") as stream:
                stream.write(f"{value!r}\n")
            return value

        assert run.optimizer.provide("brightness", mean)


def experiment(stage: str, *overrides: str) -> dict[str, object]:
    return {
        "task": {"kind": "digits", "width": 4, "layers": 1, "batch_size": 8},
        "recipe": {"update": [stage], "lr": 0.5},
        "steps": 4,
        "overrides": list(overrides),
    }


@pytest.mark.parametrize("stage", ["needs_brightness", "takes_brightness"])
def test_a_callback_provides_a_signal_of_the_batch_of_every_step(tmp_path: Path, stage: str) -> None:
    loaded = load_experiment({**experiment(stage), "callbacks": ["brightness"]})
    train(loaded, tmp_path)
    written = [float(line) for line in (tmp_path / "brightness.txt").read_text().splitlines()]
    data = loaded.task.load()
    assert written == pytest.approx([float(data.batch(0, step).inputs.mean()) for step in range(4)])
    model, plain = loaded.task.new_model(0), tmp_path / "checkpoint-4" / "run.pt"
    for step, factor in enumerate(written):
        model.zero_grad()
        inputs, targets = data.batch(0, step)
        loaded.task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * factor * parameter.grad
    trained = torch.load(plain, weights_only=True)["model"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-7)


def test_a_signal_that_nothing_provides_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with refused(RecipeError, "update.needs_brightness", "brightness"):
        train(load_experiment(experiment("needs_brightness")), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()
    diagnosis = diagnose(tmp_path)
    (found,) = diagnosis.findings
    assert (found.kind, found.step, diagnosis.unfinished) == ("error", 1, "") and "brightness" in found.text


class Fails(Callback):
    """A callback that raises an error after a row of metrics."""

    kind: Literal["fails_for_test"] = "fails_for_test"

    def stepped(self, run: RunView, tick: Tick) -> bool:
        raise ValueError("the log is full")


def test_the_doctor_names_the_error_of_a_callback(tmp_path: Path) -> None:
    with refused(ValueError, "the log is full"):
        train(load_experiment({**experiment("sign"), "callbacks": ["fails_for_test"]}), tmp_path)
    diagnosis = diagnose(tmp_path)
    (found,) = diagnosis.findings
    assert (found.kind, diagnosis.unfinished) == ("error", "") and "the log is full" in found.text


def test_a_signal_that_a_stage_may_lack_is_said_to_be_missing(tmp_path: Path) -> None:
    with warned(UserWarning, "update.takes_brightness", "brightness"):
        train(load_experiment(experiment("takes_brightness")), tmp_path)


def test_what_the_library_collects_needs_no_callback(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    train(load_experiment({**experiment("sign"), "recipe": "newton_muon"}), tmp_path)
    assert not [one for one in recwarn if "the signal" in str(one.message)]


def test_a_hessian_that_nobody_estimates_is_named(tmp_path: Path) -> None:
    with refused(RecipeError, "hessian_diagonal"):
        train(load_experiment({**experiment("sign"), "recipe": "sophia"}), tmp_path)
    with refused(RecipeError, "constraints.qk_clip", "'max_logit'", "MaxLogits"):
        train(load_experiment({**experiment("sign"), "recipe": "muonclip"}), tmp_path)
