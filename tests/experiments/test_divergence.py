"""Runs that go wrong: which value was not finite first, in words, and runs that only got worse."""

import hashlib
import json
import re
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eigengraft.experiments import Experiment, train
from eigengraft.experiments.cli.console import describe_result
from eigengraft.experiments.reports.report import Report
from eigengraft.experiments.tasks import Batch, Dataset, Examples, Fingerprint, Task
from eigengraft.experiments.tasks.base import generator
from eigengraft.experiments.training.divergence import worse_than_at_first
from eigengraft.experiments.training.parallel import Ranks
from eigengraft.experiments.training.rundir import RunDirectory
from eigengraft.experiments.training.train import Trainer
from eigengraft.testing import check_task
from eigengraft.testing.laws import LawError

from ..refusals import lacking, refused

pytestmark = pytest.mark.slow

Fault = Literal["none", "inputs", "targets", "validation", "initial weight", "gradient", "range", "deep", "log"]


class Root(nn.Linear):
    """A model with the root of 0 in its output, which no parameter changes: every derivative is 0 times infinity."""

    def forward(self, x: Tensor) -> Tensor:
        zero = sum((parameter * 0).sum() for parameter in self.parameters())
        assert isinstance(zero, Tensor)
        return super().forward(x) + zero.sqrt()


class Log(nn.Module):
    """log |x|, which is not finite at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().log()


class Faulty(Task):
    """Linear regression on 40 rows, 8 of which validate, with a fault."""

    kind: Literal["faulty"] = "faulty"
    fault: Fault = "none"

    def load(self) -> Dataset:
        x = torch.from_numpy(generator(0).standard_normal((40, 3))).float()
        y = x.sum(1, keepdim=True)
        if self.fault == "inputs":
            x[7, 1] = torch.nan
        if self.fault == "targets":
            y[11] = torch.inf
        if self.fault == "validation":
            x[35, 2] = torch.nan
        if self.fault == "log":
            x[28] = 0  # in the batch of step 4
        if self.fault == "range":
            x[32:] = 1e30
        mark = Fingerprint("rows", 40, hashlib.sha256(self.fault.encode()).hexdigest())
        return Examples(Batch(x[:32], y[:32]), Batch(x[32:], y[32:]), 8, mark)

    def build(self) -> nn.Module:
        if self.fault in ("gradient", "range"):
            return Root(3, 1) if self.fault == "gradient" else nn.Linear(3, 1)
        if self.fault == "log":
            return nn.Sequential(Log(), nn.Linear(3, 1))
        if self.fault == "deep":
            return nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)), nn.Linear(3, 1))
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        if self.fault == "initial weight":
            with torch.no_grad():
                model[2].weight[0, 3] = torch.nan
        return model

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)


def experiment(fault: Fault = "none", **fields: object) -> Experiment:
    fields = {"recipe": "sgd", "lr": 0.01, "steps": 60, "eval_every": 20, **fields}
    return Experiment(task=Faulty(fault=fault), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "inputs",
            r"the batch of step [1-4], `batch\(seed, [0-3]\)`, has 1 number in its inputs .* row 7, .* are at fault",
        ),
        (
            "targets",
            r"the batch of step [1-4], `batch\(seed, [0-3]\)`, has 1 number in its targets .* training data row 11",
        ),
        ("validation", r"validation batch 0 with 1 number in its inputs .*row 3 of 8, "),
        ("initial weight", r"the weight 2\.weight is not finite before the first update"),
        ("gradient", r"the gradient of weight is not;"),
        ("range", r"the validation loss is inf .* outputs overflow on validation data, which are finite"),
    ],
)
def test_what_went_wrong_first_is_said_and_the_learning_rate_is_not_blamed(
    tmp_path: Path, fault: Fault, said: str
) -> None:
    result = train(experiment(fault, steps=400), tmp_path / "run")
    assert result.diverged
    assert re.search(said, result.diagnosis), result.diagnosis
    assert "smaller lr" not in describe_result(result)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["diagnosis"] == result.diagnosis
    assert result.diagnosis.split(";")[0] in Report(tmp_path).write().read_text(encoding="utf-8")


@pytest.mark.parametrize("lr", [1e4, 1e30])
def test_a_learning_rate_that_is_too_high_is_named(tmp_path: Path, lr: float) -> None:
    result = train(experiment(recipe={"base": "sgd", "routes": []}, lr=lr), tmp_path)
    assert result.diverged and "lr" in result.diagnosis


def test_outputs_that_overflow_in_the_evaluation_after_an_update_are_the_learning_rate(tmp_path: Path) -> None:
    """Weights of 1e4 in 13 layers give outputs of 1e52, although each weight is of a size that float32 holds."""
    train(experiment("deep", recipe="signum", lr=1e4, eval_every=1), tmp_path)
    fault = json.loads((tmp_path / "fault.json").read_text())
    assert (fault["place"], fault["cause"], fault["step"]) == ("evaluation", "learning rate", 1)


def test_an_operation_without_a_finite_value_is_named_after_the_first_step_too(tmp_path: Path) -> None:
    train(experiment("log"), tmp_path)
    fault = json.loads((tmp_path / "fault.json").read_text())
    assert (fault["place"], fault["cause"], fault["step"], fault["layer"]) == ("loss", "model", 4, "0")


def test_a_run_that_got_worse_says_so_also_after_a_stop(tmp_path: Path) -> None:
    """Signs of gradients with lr 30: every weight moves by 30 at each step, and the loss stays finite."""
    worse = experiment(recipe="signum", lr=30.0, checkpoint_every=10)
    result = train(worse, tmp_path / "whole")
    assert not result.diverged and result.train_loss is not None and result.train_loss > 100
    assert "training loss" in result.diagnosis
    assert "training loss" in describe_result(result)

    class Stop(Exception):
        pass

    def stop(tick: object) -> None:
        if getattr(tick, "step") == 25:  # noqa: B009  a tick of another type would be a fault of the test
            raise Stop

    with pytest.raises(Stop):
        train(worse, tmp_path / "parts", stop)
    assert train(worse, tmp_path / "parts").diagnosis == result.diagnosis


def test_a_spike_that_a_run_recovered_from_is_no_fault() -> None:
    for losses in ((2.3, 2.4, 9.0), (2.3, 9.0, 2.4), (None, 9.0, 9.0), (-1.0, 9.0, 9.0)):
        assert worse_than_at_first(*losses) == ""
    assert lacking(worse_than_at_first(2.3, 4.0, 5.0), "training loss", 2.3, 4) == []
    directory = RunDirectory("unused")
    trainer = Trainer(experiment(), directory)
    trainer.window.losses[:] = [2.0, 1e9, 2.1]
    trainer.window.step_ms[:] = trainer.window.cpu_ms[:] = trainer.window.optimizer_ms[:] = [1.0]
    trainer.ranks = Ranks(rank=1)  # writes nothing
    trainer._write_row(0.1, None)
    assert trainer.last_loss == 2.1


def test_a_healthy_run_says_nothing(tmp_path: Path) -> None:
    result = train(experiment(), tmp_path)
    assert (result.diverged, result.diagnosis) == (False, "")
    assert len(describe_result(result).splitlines()) == 2


@pytest.mark.parametrize("fault", ["inputs", "targets", "validation"])
def test_check_task_finds_numbers_that_are_not_finite(fault: Fault) -> None:
    with refused(LawError, 1):
        check_task(Faulty(fault=fault))
    check_task(Faulty())
