"""The doctor: ten prepared failures, each named by its cause, step and layer, and healthy runs with nothing found."""

import hashlib
import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eigengraft import RecipeError, Stage, State, StepContext, load_recipe
from eigengraft.experiments import Experiment, RunLog, Tick, doctor, load_experiment, train
from eigengraft.experiments.doctor import (
    EXPLANATIONS,
    Diagnosis,
    Record,
    diagnose,
    diagnose_all,
    diagnose_study,
    is_quick,
)
from eigengraft.experiments.files import read_object
from eigengraft.experiments.first_batch import _large_layer, gradient_end, uneven_inputs
from eigengraft.experiments.reports.records import Run, error_line
from eigengraft.experiments.studies import running
from eigengraft.experiments.tasks import Batch, Dataset, Examples, Fingerprint, Task, TaskError
from eigengraft.experiments.tasks.base import generator
from eigengraft.experiments.training.callbacks import Callback, RunView
from eigengraft.experiments.training.imports import import_component

from ..cli import invoke
from ..refusals import lacking, refused, warned

pytestmark = pytest.mark.slow

Sickness = Literal[
    "none",
    "row",
    "validation",
    "init",
    "nan init",
    "last",
    "dead",
    "dead middle",
    "overflow",
    "labels",
    "noise",
    "unequal noise",
    "strict",
    "scale",
    "zero",
    "small",
    "head",
    "huge",
    "overflowing inputs",
    "softmax",
    "column",
    "one layer",
    "gain",
    "saturated",
    "detached",
    "no inputs",
    "log",
]
REGRESSION = Path(__file__).resolve().parents[2] / "experiments" / "examples" / "regression.py"
CLASSES = 4


class Huge(nn.Module):
    """x <- x * c / c  through a product near the largest number of float32, which bfloat16 rounds to infinity."""

    def forward(self, x: Tensor) -> Tensor:
        last = torch.full((1, 1), 3.4e38)  # below the largest float32, above the largest bfloat16
        huge = nn.functional.linear(torch.ones(len(x), 1), last)
        return x * (huge.float() / 3.4e38)


class Gain(nn.Module):
    """x (1 + 1000 w), with a small weight w, so that any usual learning rate is too high for it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((16, 16), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ (1e3 * self.w)


class Detached(nn.Module):
    """x, without its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Log(nn.Module):
    """log max(x, 0)"""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp_min(0).log()


class Patient(Task):
    """Classify 96 points of 8 numbers into four classes by an MLP, with one thing that is wrong."""

    kind: Literal["test_patient"] = "test_patient"
    sickness: Sickness = "none"
    reports_accuracy: ClassVar[bool] = True

    def load(self) -> Dataset:
        x = torch.from_numpy(generator(0).standard_normal((96, 8))).float()
        y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        if self.sickness == "row":
            x[37, 5] = torch.nan
        if self.sickness == "validation":
            x[90, 2] = torch.nan
        if self.sickness == "labels":
            y += 1
        if self.sickness == "scale":
            x[:, 3] *= 1e5
        if self.sickness == "column":
            x[:, 3] = 100 * x[:, 3] + 100
        if self.sickness == "huge":
            x *= 1e5
        if self.sickness == "overflowing inputs":
            x *= 1e38
        if self.sickness == "no inputs":
            x.zero_()
        if self.sickness == "noise":
            y = torch.from_numpy(generator(1).integers(0, CLASSES, 96))
        if self.sickness == "unequal noise":
            y = torch.from_numpy(generator(1).choice(CLASSES, 96, p=[0.7, 0.2, 0.05, 0.05]))
        mark = Fingerprint("points", 96, hashlib.sha256(self.sickness.encode()).hexdigest())
        names = [f"feature{number}" for number in range(8)]
        return Examples(Batch(x[:64], y[:64]), Batch(x[64:], y[64:]), 16, mark, columns=names)

    def build(self) -> nn.Module:
        layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES)]
        last = {"overflow": [Huge()], "softmax": [nn.Softmax(-1)], "gain": [nn.Linear(CLASSES, 16), Gain()]}
        last["log"] = [Log()]
        layers[1] = {"saturated": nn.Tanh(), "detached": Detached()}.get(self.sickness, layers[1])
        model = nn.Sequential(*layers, *last.get(self.sickness, []))
        with torch.no_grad():
            if self.sickness == "init":
                for layer in (model[0], model[2], model[4]):
                    layer.weight.mul_(30)
            if self.sickness == "small":
                for parameter in model.parameters():
                    parameter.mul_(0.01)
            if self.sickness == "one layer":
                model[2].weight.mul_(200)
            if self.sickness == "last":
                model[4].weight.mul_(1e37)
            if self.sickness == "head":
                model[4].weight.mul_(1e-4)
            if self.sickness == "nan init":
                model[2].weight[3, 4] = torch.nan
            if self.sickness == "zero":
                for parameter in model.parameters():
                    parameter.zero_()
            if self.sickness in ("dead", "saturated"):
                model[0].bias.fill_(-100)
            if self.sickness == "dead middle":
                model[2].bias.fill_(-100)
        return model

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.sickness == "strict" and not outputs.isfinite().all():
            raise ValueError("not finite outputs")
        return super().loss(outputs, targets)


Task.members.pop("test_patient")  # other tests are about every member of the family


def patient(sickness: Sickness = "none", **fields: Any) -> Experiment:
    usual = {"recipe": "adamw", "lr": 0.01, "steps": 60, "eval_every": 20, "log_every": 5}
    return Experiment(task=Patient(sickness=sickness), **{**usual, **fields})


@pytest.fixture(autouse=True)
def known_task(registry: None) -> None:
    """The doctor loads the task of a run by its kind."""
    Task.members["test_patient"] = Patient


def treated(experiment: Experiment, directory: Path) -> Diagnosis:
    """Train, and return what the doctor finds. An error that ends the run is none of the test."""
    try:
        train(experiment, directory)
    except (ValueError, ArithmeticError, TaskError):
        assert not (directory / "result.json").exists()
    return diagnose(directory)


FAST = {"name": "fast", "match": {"name": "2.weight"}, "lr_multiplier": 3e4, "update": ["momentum", "rms"]}
EXPLODING = {"base": "adamw", "routes": [FAST]}
FASTER = {"base": "adamw", "routes": [{**FAST, "lr_multiplier": 300.0}]}  # the model learns all the same
REFRESH = {"kind": "every", "steps": 5, "stagger": "none"}
ROOTS = [{"kind": "eigenbasis", "inner": "rms", "solver": "eigh", "refresh": REFRESH}]


@pytest.mark.parametrize(
    ("experiment", "kind", "step", "layer", "words"),
    [
        (patient("row"), "data", range(1, 5), "", ("batch", "in the training data row 37")),
        (patient("validation"), "validation data", [20], "", ("validation batch 0", "row 26 of 32")),
        (patient(recipe="sgd", lr=1e6), "learning rate", range(1, 9), None, ("times the norm",)),
        (patient(recipe="sgd", lr=1e38, eval_every=1), "learning rate", [1], None, ("e+37", "times the norm")),
        (patient(recipe="adamw", lr=1e20, eval_every=1), "learning rate", [1], None, ("e+20", "times the norm")),
        (patient("strict", recipe="sgd", lr=1e38, eval_every=1), "learning rate", [1], None, ("not finite outputs",)),
        (patient(recipe="signum", lr=10.0), "learning rate", [None], "", ("rose from", "times the norm")),
        (patient(recipe=EXPLODING, lr=1e-3), "exploding layer", [5], "2.weight", ("grew to",)),
        (patient(recipe=FASTER, lr=1e-3, steps=100), "exploding layer", [20], "2.weight", ("grew to", "by 300")),
        (patient("dead"), "dead layer", [None], "0.weight", ("all parameters of 0, and 2.weight", "12 rows")),
        (patient("dead"), "dead layer", [None], "0.weight", ("1 (ReLU)", "from -10")),
        (patient("saturated"), "dead layer", [None], "0.weight", ("1 (Tanh)", "from -10")),
        (patient("detached"), "dead layer", [None], "0.weight", ("outputs of 0",)),
        (patient("no inputs"), "dead layer", [None], "0.weight", ("inputs of the first batch are 0",)),
        (patient("log"), "model", [1], "5", ("5 (Log)",)),
        (patient("dead middle"), "dead layer", [None], "2.weight", ("all parameters of 0, 2, and 4.weight",)),
        (patient("zero"), "dead layer", [None], "2.weight", ("all parameters of 0, 2", "5 of 5 parameters")),
        (patient("scale"), "inputs", [1], "", ("column 3 (feature3)", "e+05", "quarter of the columns")),
        (patient("huge"), "inputs", [1], "", ("(feature", "e+05", "numbers near 1")),
        (patient("overflowing inputs"), "inputs", [1], "", ("(feature", "e+38", "numbers near 1")),
        (patient("column", steps=20, lr=1e-3), "inputs", [1], "", ("column 3 (feature3)",)),
        (patient("softmax"), "loss", [1], "", ("probabilities", "second softmax")),
        (patient("init"), "initialization", [1], "", ("uniform guess among 4",)),
        (patient("one layer"), "initialization", [1], "2.weight", ()),
        (patient("last"), "initialization", [1], "4.weight", ()),
        (patient("gain", recipe="sgd", lr=0.05), "learning rate", range(2, 20), "6.w", ()),
        (patient("nan init"), "initialization", [1], "2.weight", ("2.weight",)),
        (patient("overflow", precision="bfloat16"), "precision", [1], "", ("float32",)),
        (patient(lr=1e-12), "stalled", [None], "", ("does not fall", "too low")),
        (patient("labels"), "labels", [1, 2], "", ("1 to 4", "4 scores", "in the training data rows")),
        (patient("noise", steps=200), "worse than guessing", [None], "", ("(step 20)", "frequencies", "loss fell")),
        (patient("noise", lr=1e-3), "worse than guessing", [None], "", ("frequencies", "loss fell")),  # by 6 %
        (patient("unequal noise", steps=300, lr=3e-3), "worse than guessing", [None], "", (" 0.8408 of",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failure_is_named(
    experiment: Experiment, kind: str, step: Any, layer: str | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    diagnosis = treated(experiment, tmp_path / "run")
    first = diagnosis.findings[0]
    assert first.kind == kind, first
    assert first.step in step and layer in (None, first.layer), first
    assert all(word in first.text for word in words), first.text
    assert first.remedy in str(diagnosis) and not diagnosis.notes


@pytest.mark.parametrize(
    ("experiment", "kind"),
    [(patient("init"), "initialization"), (patient("noise", steps=200), "worse than guessing")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cross_entropy_is_compared_with_a_uniform_guess_without_an_accuracy_too(
    experiment: Experiment, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patient, "reports_accuracy", False)
    assert treated(experiment, tmp_path).findings[0].kind == kind


@pytest.mark.parametrize(
    ("experiment", "kinds"),
    [
        (patient("init"), ["initialization"]),
        (patient("noise", steps=200), ["worse than guessing"]),
        (patient(), []),
    ],
    ids=lambda value: "",
)
@pytest.mark.parametrize("factor", [1, 9])
def test_a_loss_of_the_task_is_compared_with_that_of_a_uniform_guess(
    experiment: Experiment, kinds: list[str], factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Patient, "loss", lambda _, outputs, targets: factor * functional.cross_entropy(outputs, targets)
    )
    diagnosis = treated(experiment, tmp_path)
    assert [one.kind for one in diagnosis.findings][:1] == kinds and diagnosis.notes == ()


@pytest.mark.parametrize("factor", [-1, 48], ids=["negative", "sum"])
def test_a_loss_that_cannot_be_compared_with_a_guess_is_noted(
    factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(_: Patient, outputs: Tensor, targets: Tensor) -> Tensor:
        found = functional.cross_entropy(outputs, targets, reduction="sum" if factor > 0 else "mean")
        return found if factor > 0 else -found

    monkeypatch.setattr(Patient, "loss", loss)
    diagnosis = treated(patient(lr=1e-3), tmp_path)
    assert diagnosis.findings == () and len(diagnosis.notes) == 1


@pytest.mark.parametrize(
    ("lr", "factor"), [(10.0, "2000, to 0.005"), (16.0, "3000, to 0.0053"), (1e6, "2e+08, to 0.005")]
)
def test_the_advice_and_the_loss_at_the_end_follow_from_the_measures(lr: float, factor: str, tmp_path: Path) -> None:
    result = train(patient(recipe="signum", lr=lr, log_every=20), tmp_path)
    (found,) = diagnose(tmp_path).findings
    assert found.kind == "learning rate" and f"divide lr by {factor} (the recipe has lr 0.0001), " in found.remedy
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    end = f"to {rows[-1]['loss']:.4g} at the end"
    assert end in found.text and end in result.diagnosis


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        (
            [5.5, 15.0, 89.0, 20.0, 6.9, 5.0, 4.2, 4.0],
            "rose from 5.5 to 89 (step 3), 16.2 times its first value, and was 4 at",
        ),
        ([2.0, 3.5, 3.2, 1.5, 1.4, 1.3, 1.2, 1.1], "rose from 2 to 3.5 (step 2)"),
        ([2.0, 1.8, 3.2, 1.5, 1.4, 1.3, 1.2, 1.1], ""),  # one batch of unusual examples
        ([2.0, 1.0, 3.2, 0.2, 3.3, 0.2, 2.5, 0.5], ""),  # noise of small batches
    ],
)
def test_a_loss_that_rose_far_and_came_back_is_the_learning_rate(
    losses: list[float], text: str, tmp_path: Path
) -> None:
    with RunLog(tmp_path, "text", len(losses)) as log:
        for step, loss in enumerate(losses, start=1):
            log.row(step, loss)
    found = diagnose(tmp_path).findings
    assert [one.kind for one in found] == (["learning rate"] if text else [])
    assert all(text in one.text for one in found)


@pytest.mark.parametrize(("recipe", "lr"), [("adamw", 100.0), ("soap_fitted", 10.0), ("shampoo", 30.0)])
def test_weight_decay_at_a_far_too_high_rate_is_no_exploding_layer(recipe: str, lr: float, tmp_path: Path) -> None:
    """Updates of all layers are too large, and then weight decay shrinks the matrices."""
    found = treated(patient(recipe=recipe, lr=lr, steps=100), tmp_path).findings
    assert [one.kind for one in found] == ["learning rate"]


def test_a_learning_rate_is_found_once(tmp_path: Path) -> None:
    """Gradients overflow and are skipped, and the loss ends far above its first value."""
    train(load_experiment({"task": "digits", "recipe": "muon", "lr": 1e3, "steps": 20, "eval_every": 20}), tmp_path)
    assert (tmp_path / "fault.json").exists()
    assert [one.kind for one in diagnose(tmp_path).findings] == ["learning rate"]


def test_weights_that_grew_tenfold_are_the_learning_rate(tmp_path: Path) -> None:
    found = treated(patient(lr=1.0, log_every=60), tmp_path).findings[-1]
    assert found.kind == "learning rate" and " of 3 matrices grew tenfold or more; " in found.text


@pytest.mark.parametrize("lr", [0.032, 0.064])
def test_weights_that_grew_tenfold_in_a_run_that_learned_are_no_fault(lr: float, tmp_path: Path) -> None:
    fields = {"task": {"kind": "digits", "model": "cnn"}, "steps": 200, "eval_every": 50, "recipe": "muon", "lr": lr}
    train(load_experiment({**fields, "schedule": {"kind": "cosine", "warmup_steps": 20}}), tmp_path)
    assert max(Record.read(tmp_path).run.layers["weight_growth"].values()) > 10
    assert diagnose(tmp_path) == Diagnosis(tmp_path, ())


@pytest.mark.parametrize("lr", [10.0, 30.0, 100.0])
def test_a_gradient_that_overflows_at_a_far_too_high_rate_is_the_learning_rate(lr: float, tmp_path: Path) -> None:
    task = {"kind": "byte_lm", "layers": 1, "width": 32}
    train(load_experiment({"task": task, "steps": 40, "eval_every": 20, "recipe": "sgd", "lr": lr}), tmp_path)
    assert [one.kind for one in diagnose(tmp_path).findings][:1] == ["learning rate"]


@pytest.mark.parametrize(("step", "lr", "kind"), [(1, 0.1, "model"), (2, 0.1, "learning rate"), (2, 1e-6, "model")])
def test_a_fault_of_the_model_is_the_learning_rate_if_it_is_far_above_that_of_the_recipe(
    step: int, lr: float, kind: str, tmp_path: Path
) -> None:
    train(patient(lr=1e-6, steps=20), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**read_object(tmp_path / "config.json"), "lr": lr}))
    fault = {"place": "gradient", "cause": "model", "step": step, "layer": "2.weight", "text": "seen"}
    (tmp_path / "fault.json").write_text(json.dumps(fault))
    assert diagnose(tmp_path).findings[0].kind == kind


def test_a_gradient_that_ends_in_a_function_of_the_forward_pass_is_found() -> None:
    class Functional(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](torch.relu(self[0](x)))  # type: ignore[no-any-return]

    model = Functional(nn.Linear(8, 16), nn.Linear(16, CLASSES))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    assert "after 0," in gradient_end(patient(), model, "0.weight").text
    assert gradient_end(patient(), model, "1.weight").remedy and not gradient_end(patient(), model, "no.weight").text


def test_the_factor_is_not_that_of_steps_after_the_loss_exploded(tmp_path: Path) -> None:
    with RunLog(tmp_path, "text", 8) as log:
        for step, ratio in enumerate([0.008, 0.2, 40.0, 900.0, 0.1, 0.1, 0.1, 0.1], start=1):
            log.row(step, 2.0 * step, update_ratio=ratio)
    (found,) = diagnose(tmp_path).findings
    assert found.kind == "learning rate" and "divide lr by 3 until the loss falls, " in found.remedy


def test_inputs_of_different_scale_explain_a_large_first_loss_although_the_model_learns(tmp_path: Path) -> None:
    train(patient("scale"), tmp_path)
    file = tmp_path / "metrics.jsonl"
    rows = [{**json.loads(line), "val_accuracy": 0.95} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [one.kind for one in diagnose(tmp_path).findings][:1] == ["inputs"]


def test_inputs_of_different_scale_are_found_in_a_regression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls far below its first value, but not below that of a constant guess."""
    load = Patient.load

    def as_numbers(self: Patient) -> Dataset:
        data = load(self)
        assert isinstance(data, Examples)
        parts = [Batch(x, y.float().unsqueeze(1)) for x, y in (data.train, data.validation)]
        return Examples(parts[0], parts[1], 16, data.fingerprint)

    monkeypatch.setattr(Patient, "reports_accuracy", False)
    monkeypatch.setattr(Patient, "load", as_numbers)
    monkeypatch.setattr(Patient, "build", lambda _: nn.Linear(8, 1))
    monkeypatch.setattr(Patient, "loss", lambda _, outputs, targets: (outputs - targets).square().mean())
    found = treated(patient("scale", steps=20), tmp_path).findings
    assert [one.kind for one in found][:1] == ["inputs"]


@pytest.mark.parametrize(
    ("scale", "unit", "mean", "gain", "kind", "where"),
    [
        (1.0, 1e3, 5e4, 1.0, "targets", "e+04"),
        (1e-5, 1.0, 0.0, 1.0, "inputs", "(feature"),
        (1.0, 1.0, 0.0, 1e4, "initialization", "0.weight"),
        (1.0, 1.0, 3.0, 1.0, "", ""),
        (1.0, 0.01, 0.0, 1.0, "", ""),
    ],
)
def test_large_targets_tiny_inputs_and_a_large_layer_are_found_in_a_regression(  # noqa: PLR0913  its cases
    scale: float,
    unit: float,
    mean: float,
    gain: float,
    kind: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Patient.load

    def as_numbers(self: Patient) -> Dataset:
        data = load(self)
        assert isinstance(data, Examples)
        parts = [Batch(x * scale, unit * x[:, :1].sin() + mean) for x, _ in (data.train, data.validation)]
        return Examples(parts[0], parts[1], 16, data.fingerprint, columns=data.columns)

    def build(_: Patient) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        with torch.no_grad():
            model[0].weight.mul_(gain)
        return model

    monkeypatch.setattr(Patient, "reports_accuracy", False)
    monkeypatch.setattr(Patient, "load", as_numbers)
    monkeypatch.setattr(Patient, "build", build)
    monkeypatch.setattr(Patient, "loss", lambda _, outputs, targets: functional.mse_loss(outputs, targets))
    found = treated(patient(steps=300, lr=0.003), tmp_path).findings
    assert [one.kind for one in found] == ([kind] if kind else [])
    assert not kind or where in found[0].text


@pytest.mark.parametrize(
    ("sickness", "fields", "kinds"),
    [
        ("huge", {"recipe": "sgd", "lr": 0.1}, "inputs, learning rate"),
        ("scale", {"recipe": "soap_fitted", "lr": 0.003}, "inputs"),
        ("softmax", {}, "loss"),
        ("last", {"lr": 0.003, "steps": 100}, "initialization"),
    ],
)
def test_train_ends_with_the_causes_that_the_doctor_finds(
    sickness: Sickness, fields: dict[str, Any], kinds: str, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    file = json.dumps(patient(sickness, **fields).model_dump(mode="json"))
    (tmp_path / "exp.yaml").write_text(file)
    output = invoke(["train", str(tmp_path / "exp.yaml"), "--out", str(directory)]).output
    assert lacking(output, f"{kinds};", f"doctor {directory}") == []
    assert ", ".join(one.kind for one in diagnose(directory).findings) == kinds


@pytest.mark.parametrize(
    ("fields", "size", "loaded"), [({}, 1, True), ({}, 2**40, False), ({"accumulate": 2}, 1, False)]
)
def test_the_end_of_a_run_loads_its_task_only_if_this_is_quick(
    fields: dict[str, Any], size: int, loaded: bool, tmp_path: Path
) -> None:
    experiment = patient("softmax", **fields)
    train(experiment, tmp_path)
    env = read_object(tmp_path / "env.json")
    (tmp_path / "env.json").write_text(json.dumps({**env, "data": {**env["data"], "size": size}}))
    assert bool(diagnose(tmp_path, is_quick(Run({}, 0, tmp_path)))) == loaded


@pytest.mark.parametrize(("task", "named"), [({"kind": "text"}, False), ({"kind": "text", "init": "standard"}, True)])
def test_advice_names_a_setting_of_the_task_only_if_the_task_has_it(
    task: dict[str, str], named: bool, tmp_path: Path
) -> None:
    fault = {"place": "loss", "cause": "initialization", "step": 1, "layer": "", "text": "the loss is not finite"}
    (tmp_path / "config.json").write_text(json.dumps({"task": task, "recipe": {}, "steps": 5}))
    (tmp_path / "fault.json").write_text(json.dumps(fault))
    (found,) = diagnose(tmp_path).findings
    assert ("task.init" in found.remedy) == named


def advised(diagnosis: Diagnosis) -> float:
    """The learning rate that the first finding advises."""
    found = diagnosis.findings[0]
    rate = re.search(r"lr by \S+, to ([0-9.e+-]+)", found.remedy)
    assert rate is not None, found.remedy
    return float(rate[1])


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", "muon", "shampoo", "sgd"])
@pytest.mark.parametrize("lr", [1e-9, 1e-5, 30.0, 3e3])
def test_a_learning_rate_that_is_advised_is_healthy(recipe: str, lr: float, tmp_path: Path) -> None:
    rate = advised(treated(patient(recipe=recipe, lr=lr), tmp_path / "sick"))
    assert not treated(patient(recipe=recipe, lr=rate), tmp_path / "again")


@pytest.mark.parametrize(
    ("recipe", "fields", "named"),
    [
        ("sgd", {}, ["warmup_steps", "grad_clip"]),
        ("sgd", {"grad_clip": 1e9}, ["warmup_steps"]),
        ("signum", {"schedule": {"kind": "linear", "warmup_steps": 5}}, []),
        ("adamw", {}, ["warmup_steps"]),
        ("soap_fitted", {}, ["warmup_steps"]),
        ("muon", {}, ["warmup_steps"]),
    ],
)
def test_advice_names_no_setting_that_the_run_has_or_that_cannot_help(
    recipe: str, fields: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    found = treated(patient(recipe=recipe, lr=1e3, **fields), tmp_path).findings[0]
    assert found.kind == "learning rate"
    assert [name for name in ("warmup_steps", "grad_clip") if name in found.remedy] == named
    assert "; `tune` in a study finds lr" in found.remedy


def test_the_first_step_of_a_warm_up_counts_at_the_peak_of_the_learning_rate(tmp_path: Path) -> None:
    warm = patient(recipe="signum", lr=100.0, schedule={"kind": "constant", "warmup_steps": 20})
    rates = [advised(treated(run, tmp_path / name)) for name, run in (("warm", warm), ("cold", cold(warm)))]
    assert rates[0] == rates[1] < 0.03


def cold(experiment: Experiment) -> Experiment:
    """The experiment without a warm-up."""
    return experiment.model_copy(update={"schedule": type(experiment.schedule)()})


def test_a_learning_rate_of_0_is_named(tmp_path: Path) -> None:
    for name, fields in (("whole", {}), ("few rows", {"steps": 2})):
        with warned(UserWarning, "lr-zero"):
            (found,) = treated(patient(lr=0.0, **fields), tmp_path / name).findings
        assert found.kind == "stalled" and lacking(found.text, "lr", 0) == []
        assert lacking(found.remedy, "lr", 0.001) == []


def test_advice_raises_a_rate_to_at_most_ten_times_that_of_the_recipe(tmp_path: Path) -> None:
    with RunLog(tmp_path, "text", 8, lr=1e-4, recipe=load_recipe("adamw").model_dump(mode="json")) as log:
        for step in range(1, 9):
            log.row(step, 2.0, update_ratio=1e-7)
    (found,) = diagnose(tmp_path).findings
    assert found.kind == "stalled" and found.remedy.startswith("multiply lr by 100, to 0.01")


def test_a_dead_layer_is_not_a_matter_of_the_learning_rate(tmp_path: Path) -> None:
    """A network whose units never fire has a loss that stalls, at any rate."""
    kinds = [one.kind for one in treated(patient("dead", lr=1e-3), tmp_path).findings]
    assert kinds == ["dead layer"]


def test_updates_that_are_rounded_to_0_are_a_learning_rate_that_is_too_low(tmp_path: Path) -> None:
    (found,) = treated(patient(lr=1e-30), tmp_path).findings
    assert found.kind == "stalled" and "at most 0 times" in found.text and "too low" in found.text
    assert found.remedy == "set lr to that of the recipe, 0.001"


def test_a_stall_of_a_run_with_large_updates_is_not_the_learning_rate(tmp_path: Path) -> None:
    """Updates of 0.002 times the weights in 1000 steps are enough to replace them."""
    with RunLog(tmp_path, "text", 1000) as log:
        for row in range(1, 9):
            log.row(row * 125, 2.0, update_ratio=0.002)
    (found,) = diagnose(tmp_path).findings
    assert found.kind == "stalled" and found.remedy.startswith("train on one batch")


@pytest.mark.parametrize(("recipe", "named"), [("adamw", "more weight decay"), ("sgd", ", weight decay")])
def test_advice_for_weight_decay_says_more_if_the_run_has_some(recipe: str, named: str, tmp_path: Path) -> None:
    with RunLog(tmp_path, "text", 4, recipe=load_recipe(recipe).model_dump(mode="json")) as log:
        for step, (loss, val_loss) in enumerate([(2.0, 0.55), (0.4, 0.9), (0.01, 1.4), (1e-4, 1.8)], start=1):
            log.row(step, loss, val_loss=val_loss)
    (found,) = diagnose(tmp_path).findings
    assert found.kind == "overfitting" and named in found.remedy


@pytest.mark.parametrize(("ratio", "advised"), [(0.9, ["divide lr by 30"]), (0.2, [])])
def test_overfitting_after_far_too_large_updates_is_first_a_matter_of_the_learning_rate(
    ratio: float, advised: list[str], tmp_path: Path
) -> None:
    with RunLog(tmp_path, "text", 4) as log:
        for step, (loss, val_loss) in enumerate([(2.0, 0.55), (0.4, 0.9), (0.01, 1.4), (1e-4, 1.8)], start=1):
            log.row(step, loss, val_loss=val_loss, update_ratio=ratio / step)
    *first, found = diagnose(tmp_path).findings
    assert found.kind == "overfitting" and found.remedy.startswith("train for fewer steps")
    assert [(one.kind, one.remedy.partition(",")[0]) for one in first] == [("learning rate", text) for text in advised]


@pytest.mark.parametrize(("lr", "first"), [(0.003, []), (0.1, ["learning rate"])])
def test_a_validation_loss_worse_than_a_guess_is_first_a_matter_of_a_far_too_high_rate(
    lr: float, first: list[str], tmp_path: Path
) -> None:
    """Rows and labels are noise. At lr 0.1 the first update is about as large as the weights."""
    found = treated(patient("noise", lr=lr, steps=200), tmp_path).findings
    assert [one.kind for one in found] == [*first, "worse than guessing"]


def test_updates_are_compared_with_weights_of_usual_size(tmp_path: Path) -> None:
    """Weights that begin a hundred times too small do not make an update too large."""
    sizes = []
    for sickness in ("none", "small"):
        train(patient(sickness, steps=5), tmp_path / sickness)
        sizes.append(Record.read(tmp_path / sickness).first_step)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.5)


def test_weights_that_begin_with_0_are_no_matter_of_the_activation(tmp_path: Path) -> None:
    assert "random initial weights" in treated(patient("zero"), tmp_path / "zero").findings[0].remedy
    assert "activation" in treated(patient("dead"), tmp_path / "dead").findings[0].remedy


def test_labels_of_one_class_are_found_although_the_model_learns_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Patient.load

    def constant(self: Patient) -> Dataset:
        data = load(self)
        assert isinstance(data, Examples)
        data.train.targets.fill_(2)
        return data

    monkeypatch.setattr(Patient, "load", constant)
    (found,) = treated(patient(), tmp_path).findings
    assert (found.kind, found.text) == ("one class", "all 64 training labels are of class 2")


def test_advice_about_a_run_of_another_loop_names_no_setting_of_experiments(tmp_path: Path) -> None:
    with RunLog(tmp_path, "text", 8) as log:
        for step in range(1, 9):
            log.row(step, 2.0 * step)
    (found,) = diagnose(tmp_path).findings
    assert found.kind == "learning rate" and "schedule." not in found.remedy and "grad_clip" not in found.remedy


def test_a_route_that_multiplies_the_learning_rate_is_named_with_its_layer(tmp_path: Path) -> None:
    fast = {**FAST, "lr_multiplier": 100.0, "update": ["momentum", "sign"]}
    found = treated(patient(recipe={"base": "signum", "routes": [fast]}, lr=0.03), tmp_path).findings
    assert [(one.kind, one.layer) for one in found] == [("exploding layer", "2.weight"), ("learning rate", "2.weight")]
    assert all("recipe.routes.fast multiplies its learning rate by 100" in one.text for one in found)
    assert "`lr_multiplier` of its route" in found[0].remedy
    assert found[1].remedy.startswith("first do what is advised for 2.weight above; ")


def test_a_layer_that_grew_with_a_loss_that_exploded_comes_after_the_learning_rate(tmp_path: Path) -> None:
    treated(patient(recipe=EXPLODING, lr=1e-3), tmp_path)
    config = read_object(tmp_path / "config.json")
    config["recipe"]["routes"] = []  # no route explains the growth
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = diagnose(tmp_path).findings
    assert [one.kind for one in found] == ["learning rate", "exploding layer"]
    assert "route" not in found[1].remedy and "lower lr, " in found[1].remedy


def test_a_recipe_that_does_not_fit_the_model_is_an_error(tmp_path: Path) -> None:
    missing = {**FAST, "match": {"name": "nothing"}}
    (found,) = treated(patient(recipe={"base": "adamw", "routes": [missing]}), tmp_path).findings
    assert (found.kind, found.step, lacking(found.text, "ValueError", "routes.fast")) == ("error", 1, [])


def test_a_model_without_trainable_parameters_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patient, "build", lambda _: nn.Flatten())
    with refused(ValueError, "compose", "parameters") as refusal:
        train(patient(), tmp_path)
    (found,) = diagnose(tmp_path).findings
    assert (found.kind, found.text) == ("error", f"ValueError: {refusal.value}")


@pytest.mark.parametrize(("step", "row", "saved"), [(3, 1, "start"), (31, 30, "step 20"), (46, 45, "step 40")])
def test_a_killed_run_says_how_far_it_came_and_how_to_continue(step: int, row: int, saved: str, tmp_path: Path) -> None:
    experiment = patient(checkpoint_every=20)
    with pytest.raises(Stopped):
        train(experiment, tmp_path, stop_at(step))
    diagnosis = diagnose(tmp_path)
    rows = [f"step {row}", "60 steps"] if step > 3 else ["no row", "60 steps"]
    assert lacking(diagnosis.unfinished, *rows, f"train {tmp_path}", saved) == []
    assert diagnosis.unfinished in str(diagnosis) and diagnosis.records()["unfinished"] == diagnosis.unfinished
    assert diagnosis.notes[:1] == () if step > 3 else "row" in diagnosis.notes[0]
    assert treated(experiment, tmp_path) == Diagnosis(tmp_path, ())


@pytest.mark.parametrize(
    "experiment",
    [
        patient(),
        patient(recipe="soap_fitted", steps=40),
        patient(recipe="sgd", lr=0.3, grad_clip=1.0),
        patient("small", steps=200),
        patient("head"),
        patient(lr=2e-4),  # too slow to be below a guess, but the validation loss falls
    ],
)
def test_nothing_is_found_in_a_healthy_run(experiment: Experiment, tmp_path: Path) -> None:
    assert treated(experiment, tmp_path) == Diagnosis(tmp_path, ())
    assert invoke(["doctor", str(tmp_path)]).exit_code == 0
    assert not (tmp_path / "fault.json").exists()


@pytest.mark.parametrize(
    ("losses", "evaluations", "text"),
    [
        ([2.0, 0.4, 0.01, 3e-7], [0.55, 0.9, 1.4, 1.82], "rose from 0.55 (step 1) to 1.82 at the end, while the"),
        ([2.0, 0.4, 0.01, 3e-7], [2.0, 0.55, 0.56, 0.6], ""),  # a tenth of its fall is 0.145
        ([2.0, 1.0, 1.1, 1.7], [1.8, 0.6, 1.0, 1.5], ""),  # the training loss rose, too
        ([2.0, 0.4, 0.01, 1e-4], [2.0, 1e-3, 2e-3, 9e-3], ""),  # nine times a loss of nearly 0
    ],
)
def test_a_validation_loss_that_rose_while_the_training_loss_fell_is_overfitting(
    losses: list[float], evaluations: list[float], text: str, tmp_path: Path
) -> None:
    with RunLog(tmp_path, "text", 4) as log:
        for step, (loss, val_loss) in enumerate(zip(losses, evaluations, strict=True), start=1):
            log.row(step, loss, val_loss=val_loss)
    found = diagnose(tmp_path).findings
    assert [one.kind for one in found] == (["overfitting"] if text else [])
    assert all(text in one.text and "fell from 2 to 3e-07" in one.text for one in found)


def test_a_validation_loss_that_was_below_a_guess_before_it_rose_is_overfitting(tmp_path: Path) -> None:
    train(patient("noise", steps=200), tmp_path)
    file = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    next(row for row in rows if row["val_loss"] is not None)["val_loss"] = 0.7
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = diagnose(tmp_path).findings
    assert found.kind == "overfitting" and "above the 1.386 of a" in found.text


def test_updates_that_are_far_too_small_are_a_stall_although_batches_differ(tmp_path: Path) -> None:
    train(patient(lr=1e-9), tmp_path)
    result = read_object(tmp_path / "result.json")
    (tmp_path / "result.json").write_text(json.dumps({**result, "first_loss": 1.6}))  # an unusual first batch
    (found,) = diagnose(tmp_path).findings
    assert found.kind == "stalled" and "e-09 times" in found.text and "multiply lr by " in found.remedy


@pytest.mark.parametrize(("steps", "kinds"), [(1000, ["stalled"]), (10_000, [])])
def test_updates_are_far_too_small_only_if_all_of_them_together_are(
    steps: int, kinds: list[str], tmp_path: Path
) -> None:
    """Updates of 5e-7 times the weights change them by 0.05 % in 1000 steps, and the loss by 7 % here."""
    with RunLog(tmp_path, "text", steps) as log:
        for row in range(1, 9):
            log.row(row * steps // 8, 2.0 - 0.02 * row, update_ratio=5e-7)
    assert [one.kind for one in diagnose(tmp_path).findings] == kinds


def broken(*_: Any, **__: Any) -> Any:
    raise torch.linalg.LinAlgError("did not converge")


def test_a_root_that_fails_is_named_with_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", broken)
    ended = treated(patient(recipe={"update": ROOTS, "failure": {"roots": 1}}, lr=1e-2), tmp_path / "ended")
    root = ended.findings[0]
    assert (root.kind, root.step) == ("failed root", 5)
    assert root.layer.startswith("0.weight: ") and "failures" in root.layer
    assert "solver: eigh" not in root.remedy and "raise `eps` of the root solver, lower lr" in root.remedy
    kept = treated(patient(recipe={"update": ROOTS, "failure": {"roots": 99}}, lr=1e-2), tmp_path / "tolerated")
    root = kept.findings[-1]
    assert root.kind == "failed root" and root.step == 5 and "12 of 12 rows" in root.text


class Spike(Callback):
    """Spoil two gradients before the steps that use them."""

    kind: Literal["test_spike"] = "test_spike"

    def started(self, run: RunView) -> None:
        weight, count = run.model.get_parameter("2.weight"), iter(range(1, 99))
        weight.register_hook(lambda g: torch.full_like(g, torch.inf) if next(count) in (7, 9) else None)


@pytest.mark.parametrize(
    "kind", ["learning rate", "loss not finite", "model", "failed root", "exploding layer", "initialization"]
)
def test_no_two_findings_advise_opposite_changes_of_the_learning_rate(kind: str, tmp_path: Path) -> None:
    """A run whose loss does not fall, with small updates, in which something else was found too."""
    train(patient(lr=1e-6, steps=20, log_every=1), tmp_path)
    (found,) = diagnose(tmp_path).findings
    assert found.kind == "stalled" and "multiply lr" in found.remedy
    columns = {
        "failed root": {"failed_roots": 1},
        "exploding layer": {"weight_growth_largest": 1e9, "weight_growth_largest_layer": "2.weight"},
    }
    if kind in columns:
        file = tmp_path / "metrics.jsonl"
        rows = [{**json.loads(line), **columns[kind]} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        fault = {"place": "gradient", "cause": kind, "step": 2, "layer": "2.weight", "text": "seen"}
        (tmp_path / "fault.json").write_text(json.dumps(fault))
    remedies = {one.kind: one.remedy for one in diagnose(tmp_path).findings}
    assert kind in remedies
    up = any(word in text for text in remedies.values() for word in ("multiply lr", "set lr"))
    down = any(word in text for text in remedies.values() for word in ("divide lr", "lower lr"))
    assert not (up and down) and not (kind == "initialization" and (up or down)), remedies
    assert up == (kind in (*columns, "model"))


def test_a_gradient_that_overflows_after_large_steps_is_the_learning_rate(tmp_path: Path) -> None:
    first = treated(patient(lr=1.0, callbacks=[Spike()]), tmp_path).findings[0]
    assert first.kind == "learning rate" and "derivative" not in first.text and "gradient of 2.weight" in first.text


def test_a_skipped_gradient_is_recorded_once_and_the_run_goes_on(tmp_path: Path) -> None:
    found = treated(patient(callbacks=[Spike()]), tmp_path).findings
    assert [(one.kind, one.step, one.layer) for one in found] == [("model", 7, "2.weight")]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["skipped"]] == [10] and sum(row["skipped"] for row in rows) == 2
    assert read_object(tmp_path / "result.json")["diverged"] is False


def test_state_that_is_not_finite_is_named_before_the_weights_that_it_spoils(tmp_path: Path) -> None:
    class Corrupt(Callback):
        """Spoil a second moment after step 10, as a faulty device or file would."""

        kind: Literal["test_corrupt"] = "test_corrupt"

        def stepped(self, run: RunView, tick: Tick) -> bool:
            if tick.step == 10:
                state = run.optimizer.state[run.model.get_parameter("2.weight")]
                (key,) = (key for key in state if str(key).endswith("rms/v"))
                state[key][0] = torch.nan
            return False

    first = treated(patient(callbacks=[Corrupt()]), tmp_path).findings[0]
    assert first.step == 12 and first.layer.startswith("2.weight: ") and "the state" in first.text


def stop_at(step: int) -> Callable[[Tick], None]:
    """An interrupt, as far as files go."""

    def progress(tick: Tick) -> None:
        if tick.step == step:
            raise Stopped

    return progress


class Stopped(Exception):
    pass


def test_a_continued_run_has_the_diagnosis_of_an_uninterrupted_one(tmp_path: Path) -> None:
    sick = patient(recipe=EXPLODING, lr=1e-3, checkpoint_every=3)
    with pytest.raises(Stopped):
        train(sick, tmp_path / "parts", stop_at(4))
    assert treated(sick, tmp_path / "parts").findings == treated(sick, tmp_path / "whole").findings


def test_the_record_of_an_error_goes_when_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = patient(recipe={"update": ROOTS, "failure": {"roots": 0}}, lr=1e-2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", broken)
        assert treated(experiment, tmp_path)
    assert (tmp_path / "fault.json").exists()
    assert not treated(experiment, tmp_path)


@pytest.mark.parametrize(("where", "name"), [(Patient, "loss"), (Examples, "batch")])
def test_an_error_of_the_task_is_said(where: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("the scanner is off")

    monkeypatch.setattr(where, name, fails)
    (found,) = treated(patient(), tmp_path).findings
    assert (found.kind, found.step) == ("error", 1)
    assert "ValueError: the scanner is off" in found.text


def test_an_error_of_a_stage_is_said_with_its_path_and_its_line(tmp_path: Path) -> None:
    class Odd(Stage):
        kind: Literal["odd_for_test"] = "odd_for_test"

        def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
            raise KeyError("beta")

    with pytest.raises(KeyError):
        train(patient(recipe={"update": [{"kind": "odd_for_test"}]}), tmp_path)
    (found,) = diagnose(tmp_path).findings
    line = Odd.apply.__code__.co_firstlineno + 1
    assert (found.kind, found.step) == ("error", 1)
    assert lacking(found.text, "KeyError: 'beta'", "update.odd_for_test", "Odd", f"{__file__}:{line}") == []


def test_the_line_of_a_traceback_is_the_error_with_its_notes() -> None:
    error = KeyError("beta")
    error.add_note("raised in a stage")
    try:
        raise error
    except KeyError:
        assert error_line(traceback.format_exc()) == "KeyError: 'beta'; raised in a stage"
    assert error_line("its process\nended\n") == "ended"


@pytest.mark.parametrize("method", ["load", "build"])
def test_an_error_before_the_first_step_is_found_until_the_run_continues(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        (tmp_path / "nope.csv").read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(Patient, method, fails)
        with refused(TaskError, "task.test_patient", f"{method}()", "FileNotFoundError", "nope.csv", "test_doctor.py:"):
            train(patient(), tmp_path)
        (found,) = diagnose(tmp_path).findings
    assert (found.kind, found.step) == ("error", 1)
    assert f"task.test_patient: {method}() raised FileNotFoundError" in found.text
    assert not treated(patient(), tmp_path)


def test_the_command_prints_findings_and_what_it_could_not_check(tmp_path: Path) -> None:
    treated(patient(lr=1e-12), tmp_path / "run")
    said = invoke(["doctor", str(tmp_path / "run")])
    assert said.exit_code == 1 and "stalled" in said.output and EXPLANATIONS["stalled"].usual in said.output
    Task.members.pop("test_patient")  # as on a machine without the file that defines it
    printed = json.loads(invoke(["doctor", str(tmp_path / "run"), "--json"]).output)
    assert [one["kind"] for one in printed["findings"]] == ["stalled"]
    assert "test_patient" in printed["notes"][0]


def test_the_command_imports_a_task_that_the_run_does_not_name(tmp_path: Path) -> None:
    """A script defines a task and trains it. Another process, such as the command, does not know the task."""
    source = tmp_path / "own_curve.py"
    source.write_text(re.sub('"(curve|save_weights)"', r'"own_\1"', REGRESSION.read_text()))
    module = import_component(str(source))
    train(load_experiment({"task": {"kind": "own_curve"}, "recipe": "adamw", "steps": 2}), tmp_path / "run")
    Task.members.pop("own_curve")  # as in another process
    for name in [name for name, own in sys.modules.items() if own is module]:
        sys.modules.pop(name)
    without = invoke(["doctor", str(tmp_path / "run")])
    assert without.exit_code == 0 and "own_curve" in without.output and "--import" in without.output
    assert "not checked" in invoke(["doctor", str(tmp_path)]).output
    assert "not checked" not in invoke(["doctor", str(tmp_path / "run"), "--import", str(source)]).output


def test_a_column_is_no_cause_of_large_initial_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column 30 times as large as the others does not explain weights that are too large by 1e10."""
    load = Patient.load

    def with_column(self: Patient) -> Dataset:
        data = load(self)
        assert isinstance(data, Examples)
        for inputs in (data.train.inputs, data.validation.inputs):
            inputs[:, 3] *= 50
        return data

    monkeypatch.setattr(Patient, "load", with_column)
    assert [one.kind for one in treated(patient("init"), tmp_path / "init").findings][:1] == ["initialization"]
    assert [one.kind for one in treated(patient(lr=1e-9), tmp_path / "low").findings] == ["stalled"]


@pytest.mark.parametrize("sickness", ["none", "head", "small"])
def test_no_layer_is_named_where_the_rate_is_too_high_for_all(sickness: Sickness, tmp_path: Path) -> None:
    """The ratio of the first update of small weights is large without a fault of their layer."""
    train(patient(sickness, lr=1.0), tmp_path)
    assert Record.read(tmp_path).began == ("", "")


@pytest.mark.parametrize("kind", ["byte_lm", "differential_equation", "digits", "modular_addition"])
def test_shipped_tasks_have_no_large_columns_and_layers(kind: str) -> None:
    task = load_experiment({"task": {"kind": kind}, "recipe": "adamw", "steps": 1}).task
    inputs, targets = task.load().batch(0, 0)
    assert uneven_inputs(inputs, ())[0] == "" and uneven_inputs(inputs.flatten(1), ())[0] == ""
    model = task.new_model(0)
    if not inputs.is_floating_point() or kind == "digits":  # the loss of the others is no cross-entropy
        layer, _ = _large_layer(model, lambda outputs: task.loss(outputs, targets).item(), inputs, 1e9)
        assert layer == ""


def test_a_study_is_diagnosed_with_the_data_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/seed-0", "a/seed-1", "b/seed-0"):
        train(patient("softmax"), tmp_path / name)
    assert [bool(one) for one in diagnose_study(tmp_path)] == [True] * 3
    ticks = iter(range(99))
    monkeypatch.setattr(doctor, "perf_counter", lambda: next(ticks) * 0.6)  # two runs in a second
    found = diagnose_study(tmp_path)
    assert [one.directory for one in found] == [tmp_path / name for name in ("a/seed-0", "a/seed-1", "b/seed-0")]
    assert [bool(one) for one in found] == [True, False, True] and found[1].notes


def test_the_trials_of_a_search_are_diagnosed_while_no_run_has_started(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps({"runs": [{"directory": "a/seed-0", "labels": {}, "seed": 0}]}))
    train(patient(lr=1e-12), tmp_path / "tuning" / "a" / "lr=1e-12")
    (found,) = diagnose_all(tmp_path)
    assert [one.kind for one in found.findings] == ["stalled"]
    said = invoke(["doctor", str(tmp_path)])
    assert said.exit_code == 1 and lacking(said.output, "1 of 1 trial", "tuning/a/lr=1e-12") == []


def test_a_directory_without_a_run_is_refused_with_the_runs_inside(tmp_path: Path) -> None:
    train(patient(steps=1), tmp_path / "study" / "seed-0")
    with refused(RecipeError, tmp_path / "study", tmp_path / "study" / "seed-0"):
        diagnose(tmp_path / "study")
    (tmp_path / "empty").mkdir()
    assert invoke(["doctor", str(tmp_path / "empty")]).exit_code == 2


def test_the_command_lists_the_runs_of_a_study_in_which_something_was_found(tmp_path: Path) -> None:
    train(patient(), tmp_path / "a" / "seed-0")
    train(patient(lr=1e-12), tmp_path / "b" / "seed-0")
    treated(patient("row"), tmp_path / "b" / "seed-1")
    said = invoke(["doctor", str(tmp_path)])
    assert said.exit_code == 1
    assert lacking(said.output, "2 of 3 runs", f"doctor {tmp_path / 'b' / 'seed-0'}") == []
    table = [line.split() for line in said.output.splitlines()[4:6]]  # below the heads and a line
    step = next(one.step for one in diagnose(tmp_path / "b" / "seed-1").findings)
    assert table == [["b/seed-0", "stalled"], ["b/seed-1", "data", str(step)]]
    records = json.loads(invoke(["doctor", str(tmp_path), "--json"]).output)
    assert [[one["kind"] for one in record["findings"]] for record in records] == [[], ["stalled"], ["data"]]
    assert [bool(one) for one in diagnose_all(tmp_path)] == [False, True, True]
    assert invoke(["doctor", str(tmp_path / "a")]).exit_code == 0


def test_train_ends_with_the_findings_that_need_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, lr in (("sick", 1e-12), ("healthy", 0.01)):
        train(patient(lr=lr), tmp_path / name)
    with monkeypatch.context() as patch:
        patch.setattr(Patient, "build", broken)
        assert [one.kind for one in diagnose(tmp_path / "sick", with_task=False).findings] == ["stalled"]
    said = invoke(["train", str(tmp_path / "sick")])
    assert lacking(said.output, "stalled", f"eigengraft doctor {tmp_path / 'sick'}") == []
    assert "doctor" not in invoke(["train", str(tmp_path / "healthy")]).output


def test_ablate_ends_with_the_number_of_runs_and_the_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    train(patient(), out / "a" / "seed-0")
    train(patient("scale", recipe="soap_fitted", lr=0.003), out / "b" / "seed-0")
    train(patient(lr=1e-12), out / "b" / "seed-1")
    monkeypatch.setattr(running, "complete_study", lambda *_: {})
    (tmp_path / "study.yaml").write_text("base: {task: digits, steps: 5}\naxes: {recipe: [adamw, muon]}\n")
    said = invoke(["ablate", str(tmp_path / "study.yaml"), "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert lacking(said.output, "2 of 3 runs: inputs, stalled;", f"eigengraft doctor {out}") == []


def test_ablate_says_one_reason_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traceback_of = 'Traceback (most recent call last):\n  File "a.py", line 3, in load\n    work()\n{}\n'.format
    reasons = {f"a/seed-{seed}": traceback_of("some.module.LabelError: 5 is no class") for seed in (0, 1, 2)}
    reasons["b/seed-0"] = traceback_of("OSError: data.csv: gone")
    monkeypatch.setattr(running, "complete_study", lambda *_: reasons)
    (tmp_path / "study.yaml").write_text("base: {task: digits, steps: 5}\naxes: {recipe: [adamw, muon]}\n")
    said = invoke(["ablate", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")])
    assert said.exit_code == 1
    failed = [line for line in said.stderr.splitlines() if line.startswith("failed")]
    assert len(failed) == 2 and failed[1] == "failed b/seed-0: OSError: data.csv: gone"
    assert lacking(failed[0], "a/seed-0", "2 other", ": LabelError: 5 is no class") == [] and "module" not in failed[0]


def test_an_unusual_first_batch_is_no_rise_of_the_loss(tmp_path: Path) -> None:
    with RunLog(tmp_path, "text", 8) as log:
        for step, loss in enumerate([2.9, 4.5, 4.4, 2.0, 0.3, 0.02, 0.01, 0.01], start=1):
            log.row(step, loss)
    result = read_object(tmp_path / "result.json")
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()[1:]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "result.json").write_text(json.dumps({**result, "first_loss": 2.9}))
    assert not diagnose(tmp_path)


@pytest.mark.parametrize(("sickness", "kinds"), [("dead", ["dead layer"]), ("none", [])])
def test_a_stopped_run_is_diagnosed_from_its_rows(sickness: Sickness, kinds: list[str], tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(patient(sickness), tmp_path, stop_at(31))
    assert [one.kind for one in diagnose(tmp_path).findings][:1] == kinds
