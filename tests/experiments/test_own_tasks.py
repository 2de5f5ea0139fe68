"""Tasks of one's own, batches in parts, mixed precision and callbacks."""

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from eigengraft import RecipeError, load_recipe
from eigengraft.errors import with_notes
from eigengraft.experiments import Experiment, Report, RunLog, complete_study, load_experiment, load_study
from eigengraft.experiments.doctor import diagnose
from eigengraft.experiments.studies.plan import plan_runs
from eigengraft.experiments.tasks import Batch, Dataset, Digits, Examples, Fingerprint, LabelError, Task, TaskError
from eigengraft.experiments.tasks.base import GradientPass, generator
from eigengraft.experiments.training.callbacks import Limits, Patience, RunView
from eigengraft.experiments.training.imports import import_component, imported_sources
from eigengraft.experiments.training.outcome import Tick
from eigengraft.experiments.training.train import train
from eigengraft.testing import LawError, check_task
from eigengraft.testing.laws import Case
from eigengraft.testing.task_laws import the_loss_fits_the_outputs

from ..processes import fork_what_is_spawned
from ..refusals import lacking, refused

EXAMPLE = Path(__file__).resolve().parents[2] / "experiments" / "examples" / "regression.yaml"
QUICK = ["task.width=4", "task.batch_size=8", "steps=12", "eval_every=2", "log_every=4"]


def test_the_example_of_a_task_keeps_the_laws() -> None:
    module = import_component(str(EXAMPLE.with_suffix(".py")))
    assert "the loss is a mean over targets" in str(check_task(module.Curve(width=4)))


OWN_FIELDS = {
    "tasks": ("task", "owntask", "width"),
    "training.schedule": ("schedule", "ownschedule", "cycles"),
    "training.callbacks": ("callbacks", "owncallback", "rows"),
}
"""Package -> (field of an experiment, kind, field of the kind) for components that the next test defines in a file."""

OWN_FILE = """
from typing import Any, Literal
from eigengraft.experiments.tasks import Task
from eigengraft.experiments.training.callbacks import Callback
from eigengraft.experiments.training.schedule import LearningRateSchedule

class OwnTask(Task):
    kind: Literal["owntask"] = "owntask"
    width: int = 1
    def load(self): ...
    def build(self): ...

class OwnSchedule(LearningRateSchedule):
    kind: Literal["ownschedule"] = "ownschedule"
    cycles: int = 1
    def decay(self, t): return 1.0

class OwnCallback(Callback):
    kind: Literal["owncallback"] = "owncallback"
    rows: int = 1
"""


@pytest.mark.parametrize(("field", "kind", "inner"), OWN_FIELDS.values(), ids=OWN_FIELDS)
def test_fields_of_a_bare_imported_kind_can_be_overridden(
    registry: None, tmp_path: Path, field: str, kind: str, inner: str
) -> None:
    """The kind is known only after the import of the file that the experiment names."""
    (tmp_path / "own.py").write_text(OWN_FILE)
    written: object = [kind] if field == "callbacks" else kind
    path = f"{field}.{kind}.{inner}" if field == "callbacks" else f"{field}.{inner}"
    (tmp_path / "mine.yaml").write_text(
        json.dumps({"imports": ["own.py"], "task": "digits", "recipe": "adamw", field: written})
    )
    study = {"base": {"imports": "own.py", "task": "digits", "recipe": "adamw", field: written}, "axes": {path: [2, 3]}}
    (tmp_path / "study.yaml").write_text(json.dumps(study))

    def read(experiment: Experiment) -> object:
        found = getattr(experiment, field)
        return getattr(found[0] if field == "callbacks" else found, inner)

    planned = plan_runs(load_study(tmp_path / "study.yaml", [f"base.{path}=4"]))
    assert [read(run.experiment) for run in planned] == [2, 3]
    assert read(load_experiment(tmp_path / "mine.yaml", [f"{path}=4"])) == 4
    raw = {"task": "digits", "recipe": "adamw", field: written}
    assert read(load_experiment(raw, [f"{path}=4", f"imports=[{tmp_path / 'own.py'}]"])) == 4


@pytest.mark.parametrize(
    ("inner", "said"),
    [(4, ("layer 0.1, Linear(in_features=4", "[32, 1]", "torch.float32")), (3, ("the loss", "[32, 1]"))],
)
def test_shapes_that_do_not_fit_are_an_error_with_task_layer_and_batch(
    registry: None, tmp_path: Path, inner: int, said: tuple[str, ...]
) -> None:
    class Unfit(Task):
        """A layer that does not fit the layer before it, or a loss that does not fit the outputs."""

        kind: Literal["test_unfit"] = "test_unfit"

        def load(self) -> Dataset:
            x = torch.linspace(-1, 1, 64)[:, None]
            return Examples(Batch(x, x), Batch(x, x), 32, Fingerprint.of("line", b"line"))

        def build(self) -> nn.Module:
            return nn.Sequential(nn.Sequential(nn.Linear(1, 3), nn.Linear(inner, 5)))

        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs @ targets.reshape(4, -1)).mean()

    experiment = Experiment(task=Unfit(), recipe="adamw", steps=2)
    with refused(TaskError, "task.test_unfit", *said):
        train(experiment, tmp_path)
    with refused(TaskError, "task.test_unfit", "[64, 1]"):
        experiment.task.evaluate(experiment.task.new_model(0), experiment.task.load(), torch.device("cpu"))


@pytest.mark.parametrize("part", ["inputs", "targets"])
def test_data_of_another_dtype_than_the_model_say_how_to_convert(registry: None, tmp_path: Path, part: str) -> None:
    class Double(Task):
        """Inputs or targets in float64."""

        kind: Literal["test_double"] = "test_double"

        def load(self) -> Dataset:
            x = torch.linspace(-1, 1, 64)[:, None]
            batch = Batch(x, x)._replace(**{part: x.double()})
            return Examples(batch, batch, 32, Fingerprint.of("line", b"line"))

        def build(self) -> nn.Module:
            return nn.Linear(1, 1)

        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.flatten() @ targets.flatten() / len(outputs)

    for error, run in (
        (TaskError, lambda: train(Experiment(task=Double(), recipe="adamw", steps=2), tmp_path)),
        (LawError, lambda: check_task(Double())),
    ):
        with refused(error, "task.test_double", "torch.float64", f"{part}.float()", "load()"):
            run()


def test_examples_refuse_data_of_other_types() -> None:
    x, mark = torch.zeros(4, 1), Fingerprint.of("zeros", b"")
    for arguments, said in (
        (((x, x), Batch(x, x), 2, mark), ("train", "Batch", "tuple")),
        ((Batch(x, x), x, 2, mark), ("validation", "Batch", "Tensor")),
        ((Batch(x, x), Batch(x, x), 2, "abc"), ("fingerprint", "Fingerprint.of", "str")),
    ):
        with refused(TypeError, *said):
            Examples(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, 5])
def test_examples_refuse_a_batch_size_that_the_data_do_not_allow(size: int) -> None:
    x = torch.zeros(4, 1)
    with refused(ValueError, "batch_size", 4, size):
        Examples(Batch(x, x), Batch(x, x), size, Fingerprint.of("zeros", b""))
    Examples(Batch(x, x), Batch(x, x), 4, Fingerprint.of("zeros", b""))


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        (lambda x: (x, x[:3]), ValueError, ("[4, 1]", "[3, 1]")),
        (lambda x: (x, x[0, 0]), ValueError, ("[4, 1]", "[]")),
        (lambda x: (x.numpy(), x), TypeError, ("Batch.inputs", "ndarray", "torch.from_numpy")),
        (lambda x: (x, [0, 1, 0, 1]), TypeError, ("Batch.targets", "list", "torch.as_tensor")),
    ],
)
def test_a_batch_refuses_other_types_and_unequal_rows(
    parts: Callable[[Tensor], Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    with refused(kind, *words):
        Batch(*parts(torch.zeros(4, 1)))


@pytest.mark.parametrize(
    ("method", "function", "words"),
    [
        ("load", lambda self: (1, 2), ("load() must return", "Dataset", "tuple", "Examples")),
        ("load", lambda self: type("Unmarked", (Examples,), {"__init__": lambda self: None})(), ("Fingerprint.of",)),
        ("load", lambda self: Batch(np.zeros(3), torch.zeros(3)), ("TypeError", "torch.from_numpy", "load()")),  # type: ignore[arg-type]
        ("load", lambda self: Batch(torch.zeros(3), torch.zeros(2)), ("[3]", "[2]")),
        ("build", lambda self: nn.Linear(5, 10), ("Linear(in_features=5",)),
    ],
)
def test_a_structural_fault_breaks_one_law(
    method: str, function: Callable[[Task], Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Digits, method, function)
    with refused(LawError, "task.digits", *words) as caught:
        check_task(Digits(width=4))
    assert str(caught.value).count("[broken law") == 1


def test_an_error_of_the_library_gets_the_line_of_the_task(registry: None) -> None:
    class Uneven(Task):
        kind: Literal["test_uneven"] = "test_uneven"

        def load(self) -> Dataset:
            uneven = Batch(torch.zeros(4, 1), torch.zeros(3))
            return Examples(uneven, uneven, 2, Fingerprint.of("", b""))

        def build(self) -> nn.Module:
            return nn.Linear(1, 1)

    with refused(ValueError, "[4, 1]", "[3]") as caught:
        Uneven().new_data()
    assert lacking(with_notes(caught.value), "load() of task.test_uneven", "test_own_tasks.py:") == []


def test_a_batch_that_is_a_tuple_breaks_one_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Examples, "batch", lambda self, seed, step: (self.train.inputs, self.train.targets))
    with refused(LawError, "a training batch", "Batch(inputs, targets)", "tuple"):
        check_task(Digits(width=4))


@pytest.mark.parametrize(
    ("method", "found", "name", "got"),
    [
        ("batch", lambda self, *_: (self.train.inputs, self.train.targets), "training", "tuple"),
        ("batch", lambda self, *_: None, "training", "nothing"),
        ("evaluation", lambda self: iter([(self.train.inputs, self.train.targets)]), "validation", "tuple"),
    ],
)
def test_a_run_refuses_values_that_are_no_batches(
    method: str, found: Any, name: str, got: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Examples, method, found)
    with refused(TaskError, "task.digits", f"a {name} batch", "Batch(inputs, targets)", got) as caught:
        train(Experiment(task=Digits(width=4), recipe="adamw", steps=1), tmp_path)
    (finding,) = diagnose(tmp_path).findings
    assert (finding.kind, finding.text) == ("error", f"TaskError: {caught.value}")


@pytest.mark.parametrize("method", ["batch", "evaluation"])
def test_a_run_names_the_method_that_gives_no_targets(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_targets(self: Examples, *_: int) -> Any:
        batch = Batch(self.train.inputs[:4], None)  # type: ignore[arg-type]
        return batch if method == "batch" else iter([batch])

    monkeypatch.setattr(Examples, method, without_targets)
    with refused(TaskError, "task.digits", f"Examples.{method}()", "Batch.targets", "NoneType", "test_own_tasks.py:"):
        train(Experiment(task=Digits(width=4), recipe="adamw", steps=1), tmp_path)


class Net(Task):
    """A task whose data or model have one fault."""

    kind: Literal["net"] = "net"
    fault: Literal[
        "none", "nan", "unused", "columns", "detached", "a number", "nan loss", "nan in evaluation", "same rows"
    ] = "none"

    def load(self) -> Dataset:
        x = torch.from_numpy(generator(0).normal(size=(48, 6))).float()
        whole, mark = Batch(x, (x[:, 0] > 0).long()), Fingerprint.of("net", x.numpy().tobytes())
        train, rest = (Batch(*(part[rows] for part in whole)) for rows in (slice(40), slice(40, None)))
        data = Examples(train, Batch(*(part[:8] for part in whole)) if self.fault == "same rows" else rest, 8, mark)
        batch = data.batch

        def changed(seed: int, step: int) -> Batch:
            inputs, targets = batch(seed, step)
            if self.fault == "nan" and step == 7:
                inputs[1, 2] = math.nan
            return Batch(inputs[:, : 5 if self.fault == "columns" else 6], targets)

        data.batch = changed  # type: ignore[method-assign]
        return data

    def build(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        if self.fault == "unused":
            model.register_parameter("scale", nn.Parameter(torch.ones(3)))
        return model

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().loss(outputs, targets)
        if self.fault == "nan loss" or (self.fault == "nan in evaluation" and outputs.dtype == torch.float64):
            return loss * math.nan
        return loss.detach() if self.fault == "detached" else loss.item() if self.fault == "a number" else loss  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("detached", ("gradients", "detach()", "torch.no_grad()")),
        ("a number", ("loss()", "a tensor", "float", "item()")),
        ("nan loss", ("the loss of batch(0, 0)", "a finite number", "nan", "batch 0 of the data for validation")),
        ("same rows", ("the validation rows", "rows that are not trained on", "training rows alone")),
        ("nan in evaluation", ("the loss of batch 0 of the data for validation", "a finite number", "nan")),
    ],
)
def test_a_fault_of_loss_or_data_breaks_a_law(fault: Any, says: tuple[str, ...]) -> None:
    with refused(LawError, "task.net", *says) as caught:
        check_task(Net(fault=fault))
    assert "expected nan" not in str(caught.value) and "Metrics(" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.zero_(), ("entries", "0", "load()")),
        (lambda x: x.copy_(torch.arange(6.0).expand_as(x)), ("rows", "load()")),
    ],
)
def test_inputs_that_are_all_equal_are_the_cause_of_equal_batches(
    change: Callable[[Tensor], Tensor], says: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Net.load

    def changed(task: Net) -> Dataset:
        data = load(task)
        change(data.train.inputs)  # type: ignore[attr-defined]
        return data

    monkeypatch.setattr(Net, "load", changed)
    with refused(LawError, "task.net", "inputs", "seed", *says):
        check_task(Net())


@pytest.mark.parametrize(
    ("factor", "column"), [(1.0, ""), (65_000.0, "column 1 (income)"), (100.0, "column 1 (income)")]
)
def test_check_task_notes_columns_that_are_not_normalized(
    factor: float, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Net.load

    def scaled(task: Net) -> Dataset:
        data = load(task)
        data.train.inputs[:, 1] *= factor  # type: ignore[attr-defined]
        data.columns = ("age", "income", "a", "b", "c", "d")
        return data

    monkeypatch.setattr(Net, "load", scaled)
    report = check_task(Net())
    assert [column in note for note in report.notes] == [True] * bool(column)
    assert ("note: " in str(report)) == bool(column)


def test_a_number_that_is_not_finite_breaks_no_law_of_equal_batches() -> None:
    with refused(LawError, "batch(0, 7)", "step 8", "row 1 of 8", "[broken law: the data are finite]") as caught:
        check_task(Net(fault="nan"))
    assert str(caught.value).count("[broken law") == 1


def test_a_parameter_that_the_loss_does_not_use_breaks_a_law() -> None:
    with refused(LawError, "task.net", "scale"):
        check_task(Net(fault="unused"))


def test_inputs_of_another_width_are_an_error_with_both_widths(tmp_path: Path) -> None:
    with refused(TaskError, "layer 0", "5 columns", "6 features"):
        train(Experiment(task=Net(fault="columns"), recipe="adamw", steps=1), tmp_path)


def test_batch_norm_breaks_no_law() -> None:
    assert "metrics are means over all validation targets" in str(check_task(Net()))


class Rows(Task):
    kind: Literal["rows_of_a_file"] = "rows_of_a_file"
    path: str

    def load(self) -> Dataset:
        raise AssertionError(np.loadtxt(self.path))

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)


def test_a_missing_file_is_named_with_its_field_and_a_similar_file(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("1")
    with refused(TaskError, "task.path", "tabel.csv", "table.csv"):
        Rows(path=str(tmp_path / "tabel.csv")).new_data()
    with refused(TaskError, "task.path", "nothing.rows"):
        Rows(path=str(tmp_path / "nothing.rows")).new_data()


@pytest.fixture
def fresh_modules() -> Iterator[None]:
    """Forget the modules and folders that a test imports from."""
    modules, folders = dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = folders
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


@pytest.mark.parametrize("order", [("first_helper", "second_helper"), ("second_helper", "first_helper")])
def test_files_import_the_files_beside_them_as_the_same_modules(
    tmp_path: Path, fresh_modules: None, order: tuple[str, str]
) -> None:
    (tmp_path / "first_helper.py").write_text("class Net: pass\n")
    (tmp_path / "second_helper.py").write_text(
        "from first_helper import Net\ndef late():\n    import third_helper\n    return third_helper.FOUND\n"
    )
    (tmp_path / "third_helper.py").write_text("FOUND = 3\n")
    modules = {name: import_component(str(tmp_path / f"{name}.py")) for name in order}
    assert modules["second_helper"].Net is modules["first_helper"].Net
    assert modules["second_helper"].late() == 3


def test_a_file_that_gets_the_helper_of_another_folder_is_refused(tmp_path: Path, fresh_modules: None) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared_helper.py").write_text(f"NAME = {folder!r}\nclass Net: pass\n")
        (tmp_path / folder / "uses_helper.py").write_text("from shared_helper import Net\n")
    import_component(str(tmp_path / "one" / "uses_helper.py"))
    with refused(RecipeError, "imports", "one/shared_helper.py", "two/shared_helper.py"):
        import_component(str(tmp_path / "two" / "uses_helper.py"))


def test_a_file_that_raised_is_read_again(tmp_path: Path, fresh_modules: None) -> None:
    file = tmp_path / "broken_helper.py"
    file.write_text("PART = 1\nraise ValueError(PART)\n")
    for _ in range(2):
        with refused(RecipeError, "imports", file, "line 2"):
            import_component(str(file))
    file.write_text("PART, LATER = 1, 2\n")
    assert import_component(str(file)).LATER == 2 and sys.modules["broken_helper"].LATER == 2


def test_a_study_says_that_imports_belong_to_its_base(tmp_path: Path) -> None:
    study = {"base": {"task": "digits", "recipe": "adamw"}, "axes": {"lr": [1, 2]}}
    with refused(RecipeError, "imports", "base"):
        load_study({**study, "imports": ["own.py"]})


def test_a_regression_trains_in_parts_in_mixed_precision_and_with_callbacks(tmp_path: Path) -> None:
    experiment = load_experiment(EXAMPLE, QUICK)
    result = train(experiment, tmp_path / "run")
    assert not result.diverged and result.val_accuracy is None and result.val_loss is not None
    weights = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (recorded["accumulate"], recorded["precision"]) == (2, "bfloat16")


@pytest.mark.slow
def test_further_metrics_reach_rows_results_and_tables_under_names_of_their_own(tmp_path: Path) -> None:
    """An axis called `mean_error` and the metric of this name are different columns."""
    for seed in (0, 1):
        result = train(load_experiment(EXAMPLE, [*QUICK, f"seed={seed}"]), tmp_path / "soap" / f"seed-{seed}")
    rows = [json.loads(line) for line in (tmp_path / "soap" / "seed-1" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row["val.mean_error"] for row in rows if row["val_loss"] is not None]
    assert len(evaluated) > 3 and result.metrics == {"val.mean_error": evaluated[-1]}
    assert all("val.mean_error" not in row for row in rows if row["val_loss"] is None)
    report = Report(tmp_path, labels={"soap": "mean_error"})
    report.write()
    header, *lines = csv.reader((tmp_path / "runs.csv").open())
    assert header.count("val.mean_error") == 1
    assert [float(line[header.index("val.mean_error")]) for line in lines][1] == pytest.approx(evaluated[-1], rel=1e-5)
    assert any("val.mean_error against steps" in name for name in report.figures())
    assert "val.mean" in (tmp_path / "tables.md").read_text() and "<th>val.mean_error</th>" in report.page()


@pytest.mark.slow
def test_a_study_compares_and_searches_by_a_further_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_what_is_spawned(monkeypatch)
    base = load_experiment(EXAMPLE, [*QUICK, "callbacks=[]"]).model_dump(mode="json")
    halving = {"rate": 2, "least": 2}
    search = {"kind": "random", "seeds": [7], "trials": 2, "space": {"lr": {"low": 0.001, "high": 0.1}}}
    study = {"base": base, "axes": {"task.width": [2]}, "metric": "val.mean_error", "seeds": [0, 1]}
    declared = load_study({**study, "tune": {**search, "halving": halving}})
    assert complete_study(declared, tmp_path, 1) == {}
    records = Report(tmp_path).records
    assert records.metric.key == "val.mean_error" and records.metric.sign == 1
    finals = [run.final(records.metric) for run in records.runs]
    assert finals == [run.result["metrics"]["val.mean_error"] for run in records.runs]
    (cell,) = records.tuned
    assert cell.best.mean == min(one.mean for one in cell.tried if one.stopped is None and one.mean is not None)
    with refused(RecipeError, "curve", "val.f1", "val.mean_error"):
        complete_study(load_study({**study, "metric": "val.f1"}), tmp_path / "other", 1)
    with refused(RecipeError, "larger", "val_loss"):
        load_study({**study, "metric": "val_loss", "larger": True})
    assert load_study({**study, "larger": True}).measured.sign == -1
    limits = Limits(metric="val.f1", larger=True, limits=((4, 0.5),))
    assert limits.exceeded(4, 0.4) and not limits.exceeded(4, 0.6)


def test_a_log_of_another_loop_keeps_the_metrics_of_its_last_evaluation(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", "mine", 3) as log:
        log.row(1, 3.0, val_loss=3.0, **{"val.f1": 0.1})
        log.row(2, 2.0, val_loss=2.0, **{"val.f1": 0.2})
        log.row(3, 1.0)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["metrics"] == {"val.f1": 0.2}


def test_an_error_that_breaks_many_laws_is_told_once_with_a_line_of_the_task() -> None:
    class Absent(Task):
        kind: Literal["absent_for_test"] = "absent_for_test"

        def load(self) -> Dataset:
            return Digits().load()

        def build(self) -> nn.Module:
            return Digits(width=4).build()

        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.mean() * int(Path("/no/such/file").read_text())

    try:
        with refused(LawError, "4 laws", "FileNotFoundError", "test_own_tasks.py", "the loss is a mean") as caught:
            check_task(Absent())
    finally:
        Task.members.pop("absent_for_test")
    assert len(str(caught.value).splitlines()) == 2


def test_a_build_that_returns_no_module_is_told_so(registry: None, tmp_path: Path) -> None:
    class Paired(Task):
        kind: Literal["test_paired"] = "test_paired"

        def load(self) -> Dataset:
            return Digits().load()

        def build(self) -> nn.Module:
            return nn.Linear(1, 1), "a name"  # type: ignore[return-value]

    with refused(TaskError, "task.test_paired", "build()", "nn.Module", "tuple"):
        train(Experiment(task=Paired(), recipe="adamw", steps=2), tmp_path)
    with refused(LawError, "task.test_paired", "build()", "nn.Module", "tuple"):
        check_task(Paired())


def test_outputs_and_targets_that_were_broadcast_are_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_component(str(EXAMPLE.with_suffix(".py")))
    monkeypatch.setattr(module.Curve, "loss", lambda self, outputs, targets: (outputs - targets).square().sum() / 7)
    with refused(LawError, "task.curve", "[broken law: the loss is a mean over targets]") as caught:
        check_task(module.Curve(width=4))
    assert lacking(str(caught.value), "[32, 1]") == ["[32, 1]"]  # the shapes are equal, and not the cause
    monkeypatch.setattr(module.Curve, "loss", lambda self, outputs, targets: (outputs - targets).square().mean())
    batch = module.Points.batch
    monkeypatch.setattr(
        module.Points,
        "batch",
        lambda self, seed, step: Batch((given := batch(self, seed, step)).inputs, given.targets.flatten()),
    )
    with refused(LawError, "task.curve", "outputs [32, 1]", "targets [32]", "[32, 32]"):
        check_task(module.Curve(width=4))


def test_a_broadcast_loss_breaks_a_law_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_component(str(EXAMPLE.with_suffix(".py")))
    task, batch = module.Curve(width=4), module.Points.batch

    def squared(_: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    monkeypatch.setattr(module.Curve, "loss", squared)
    for seed in range(40):

        def flat(self: Dataset, _: int, step: int, seed: int = seed) -> Batch:
            given: Batch = batch(self, seed, step)
            return Batch(given.inputs, given.targets.flatten())

        monkeypatch.setattr(module.Points, "batch", flat)
        with refused(LawError, "outputs [32, 1]", "targets [32]", "[32, 32]"):
            the_loss_fits_the_outputs(Case(task))
    monkeypatch.setattr(module.Curve, "loss", lambda self, x, y: squared(self, x.flatten(), y.flatten()))
    the_loss_fits_the_outputs(Case(task))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda y: y + 1, ("training labels", "from 0 to 9", "from 1 to 10")),
        (lambda y: y - 1, ("training labels", "from 0 to 9", "from -1 to 8", -100)),
        (lambda y: one_hot(y, 10), ("[64, 10]", "one-hot", "targets.argmax(-1)")),
        (lambda y: y.int(), ("training labels", "torch.int64", "torch.int32")),
        (lambda y: y.float(), ("training labels", "torch.int64", "torch.float32")),
        (lambda y: torch.full_like(y, 3), ("training labels", "class 3")),
        (lambda y: y if len(y) > 1000 else torch.full_like(y, 3), ("validation labels", "class 3")),
    ],
)
def test_labels_break_a_law(
    changed: Callable[[torch.Tensor], torch.Tensor], words: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_labels(monkeypatch, changed)
    with refused(LawError, *words):
        check_task(Digits(width=4))


def change_labels(monkeypatch: pytest.MonkeyPatch, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let digits have other labels."""
    load = Digits.load

    def other(self: Digits) -> Dataset:
        data = load(self)
        assert isinstance(data, Examples)
        parts = [Batch(x, changed(y)) for x, y in (data.train, data.validation)]
        return Examples(parts[0], parts[1], data.batch_size, data.fingerprint, data.scale)

    monkeypatch.setattr(Digits, "load", other)


def test_probabilities_under_a_cross_entropy_break_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform probabilities have the same loss with and without the second softmax, so the outputs do not tell."""
    build = Digits.build
    monkeypatch.setattr(Digits, "build", lambda self: nn.Sequential(build(self), nn.Softmax(-1)))
    with refused(LawError, "probabilities", "second softmax"):
        check_task(Digits(width=4))
    monkeypatch.setattr(Digits, "loss", lambda self, outputs, targets: nn.functional.nll_loss(outputs.log(), targets))
    assert "the loss fits the outputs" in check_task(Digits(width=4)).held


def test_names_of_columns_are_as_many_as_columns() -> None:
    part = Batch(torch.zeros(4, 3), torch.zeros(4))
    mark = Fingerprint.of("zeros", b"")
    assert Examples(part, part, 2, mark, columns=("a", "b", "c")).columns == ("a", "b", "c")
    with refused(ValueError, "columns", "2 names", "3 columns"):
        Examples(part, part, 2, mark, columns=("a", "b"))


def test_metrics_that_are_not_finite_break_a_law() -> None:
    module = import_component(str(EXAMPLE.with_suffix(".py")))
    task = module.Curve(width=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Curve, "metrics", lambda self, outputs, targets: {"mean": math.nan})
        with refused(LawError, "mean"):
            check_task(task)


def test_a_module_that_names_a_missing_file_is_no_part_of_an_imported_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.ops names `_ops.py`, which is no path from any folder."""
    made = ModuleType("made_at_run_time")
    made.__file__ = "_made.py"
    monkeypatch.setitem(sys.modules, made.__name__, made)
    (tmp_path / "uses.py").write_text("import made_at_run_time\n")
    assert list(imported_sources([str(tmp_path / "uses.py")])) == ["uses.py"]


def gradients(task: Digits, parts: int, precision: str | None, rows: int = 7) -> tuple[float, list[torch.Tensor]]:
    model, batch = task.new_model(0), task.load().batch(0, 0)
    inputs = batch.inputs[:rows]
    if precision is None:
        model, inputs = model.double(), inputs.double()
    loss = GradientPass(task, parts, precision).backward(model, Batch(inputs, batch.targets[:rows]), 0.5)
    return float(loss), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_batch_in_parts_has_the_gradient_of_the_whole() -> None:
    """3 parts of 7 rows are unequal. float64: rounding alone differs."""
    task = Digits(width=8)
    (whole, all_at_once), (sums, added) = gradients(task, 1, None), gradients(task, 3, None)
    assert sums == pytest.approx(whole, rel=1e-6)  # the sum is kept in float32
    for one, other in zip(all_at_once, added, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    with refused(ValueError, "accumulate", 2, 3):
        gradients(task, 3, None, rows=2)


def test_mixed_precision_rounds_products_and_keeps_gradients_in_float32() -> None:
    """bfloat16 has 8 bits: a relative error of 2^-8 a product, of which a few follow each other."""
    task = Digits(width=8)
    (_, exact), (_, mixed) = gradients(task, 1, None), gradients(task, 1, "bfloat16")
    for one, other in zip(exact, mixed, strict=True):
        assert other.dtype == torch.float32
        error = float((one - other).norm() / one.norm())
        assert 1e-5 < error < 0.05


@pytest.mark.parametrize(
    ("columns", "targets", "remedy"),
    [
        (1, torch.zeros(5, 1), "`targets.squeeze(-1).long()`"),
        (3, torch.zeros(5, 1).long(), "`targets.squeeze(-1)`"),
        (3, torch.zeros(5, 3).long(), "`targets.argmax(-1)`"),
        (3, torch.zeros(5, 3), "`targets.argmax(-1)`"),
        (3, torch.zeros(5), "`targets.long()`"),
        (3, torch.zeros(4).long(), "one class"),
    ],
)
def test_targets_that_are_no_classes_are_refused_with_the_remedy(columns: int, targets: Tensor, remedy: str) -> None:
    with refused(ValueError, "task.digits", f"{targets.dtype}", f"{list(targets.shape)}", remedy):
        Digits().loss(torch.zeros(5, columns), targets)


def test_labels_that_are_ignored_are_no_lowest_class() -> None:
    for lowest, ignored in ((-1, True), (-100, False)):
        found = lowest if ignored else 1  # the lowest label that is not ignored
        with refused(LabelError, "task.digits", f"from {found} to 3") as refusal:
            Digits().loss(torch.zeros(3, 3), torch.tensor([lowest, 1, 3]))
        assert lacking(str(refusal.value), -100) == ([] if ignored else ["-100"])


@pytest.mark.parametrize(("row", "place"), [(3, "the batch"), (90, "validation batch 0")])
def test_an_error_about_labels_names_the_row(row: int, place: str, tmp_path: Path) -> None:
    class Mislabeled(Task):
        kind: Literal["test_mislabeled"] = "test_mislabeled"

        def load(self) -> Dataset:
            x, y = torch.from_numpy(generator(0).standard_normal((96, 4))).float(), torch.zeros(96, dtype=torch.int64)
            y[row] = 2
            train, validation = Batch(x[:80], y[:80]), Batch(x[80:], y[80:])
            return Examples(train, validation, 40, Fingerprint("test", 96, "00" * 32))

        def build(self) -> nn.Module:
            return nn.Linear(4, 2)

    experiment = Experiment(task=Mislabeled(), recipe=load_recipe("adamw"), steps=2, eval_every=2)
    with pytest.raises(LabelError) as refusal:
        train(experiment, tmp_path / "run")
    text = with_notes(refusal.value)
    assert lacking(text, "from 0 to 2", "2 scores", place, f"row {row % 80}") == [], text


def test_patience_stops_after_so_many_evaluations_without_a_better_one() -> None:
    losses = [3.0, 2.0, 2.5, 1.9, 1.95, 1.89, 2.0]
    model = nn.Linear(1, 1)

    def stops(patience: Patience) -> list[int]:
        views = [RunView(model, None, Path(), [{"val_loss": x} for x in losses[: k + 1]]) for k in range(len(losses))]  # type: ignore[arg-type]
        ticks = [Tick(k, 9, 0.0, loss, 0.0, 0.0) for k, loss in enumerate(losses)]
        return [k for k, (view, tick) in enumerate(zip(views, ticks, strict=True)) if patience.stepped(view, tick)]

    assert stops(Patience(evaluations=1)) == [2, 4, 6]
    assert stops(Patience(evaluations=2)) == []  # 1.89 is better than 1.9
    assert stops(Patience(evaluations=2, least=0.05)) == [5, 6]  # by less than that
    assert not Patience().stepped(RunView(model, None, Path(), []), Tick(1, 9, 0.0, None, 0.0, 0.0))  # type: ignore[arg-type]


def test_a_run_that_a_callback_stops_ends_like_a_complete_one(tmp_path: Path) -> None:
    fields = ["lr=0", "callbacks=[{kind: patience, evaluations: 2}]"]
    result = train(load_experiment(EXAMPLE, [*QUICK, *fields]), tmp_path / "run")
    assert (result.steps, result.diverged) == (6, False)  # evaluated at 2, 4 and 6, each time the same
    assert train(load_experiment(EXAMPLE, [*QUICK, *fields]), tmp_path / "run") == result


def test_no_overrides_may_be_written_as_none() -> None:
    fields = {"task": "digits", "recipe": "adamw"}
    assert load_experiment({**fields, "overrides": None, "imports": None}, None, None) == load_experiment(fields)
    study = {"base": fields, "axes": {"lr": [1.0, 2.0]}}
    assert load_study(study, None) == load_study(study)


TABLE = """
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from eigengraft.experiments.tasks import Batch, Examples, Fingerprint, Task


class Table(Task):
    kind: Literal["table_for_test"] = "table_for_test"
    path: str | None = None

    def load(self):
        rows = Batch(torch.linspace(-1, 1, 16)[:, None], (torch.arange(16) > 8).long())
        return Examples(rows, rows, 4, Fingerprint.of(self.path, Path(self.path).read_bytes()))

    def build(self):
        return nn.Linear(1, 2)
"""


@pytest.mark.parametrize("path", ["", "https://host/rows.csv", "package:pack/rows.csv", None])
def test_a_path_that_names_no_file_of_this_machine_is_stored_as_it_is(
    path: str | None, registry: None, tmp_path: Path
) -> None:
    (tmp_path / "table.py").write_text(TABLE)
    fields = {"imports": [str(tmp_path / "table.py")], "task": {"kind": "table_for_test", "path": path}}
    assert getattr(load_experiment({**fields, "recipe": "adamw"}).task, "path", "") == path


@pytest.mark.slow
def test_machines_with_the_same_data_in_different_folders_share_a_study(
    registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_what_is_spawned(monkeypatch)
    (tmp_path / "table.py").write_text(TABLE)
    base = {"imports": [str(tmp_path / "table.py")], "task": {"kind": "table_for_test"}, "recipe": "adamw", "steps": 3}
    data = {"name": "shared", "base": base, "axes": {"lr": [0.1]}}

    def complete(place: str, content: str, seeds: str) -> dict[str, str]:
        (tmp_path / place).mkdir()
        (tmp_path / place / "rows.csv").write_text(content)
        monkeypatch.chdir(tmp_path / place)
        study = load_study(data, ["base.task.path=rows.csv", f"seeds={seeds}"])
        return complete_study(study, tmp_path / "study", workers=1)

    assert complete("one", "a", "[0]") == {}
    (tmp_path / "one").rename(tmp_path / "gone")
    assert complete("two", "a", "[0,1]") == {}
    runs = Report(tmp_path / "study").records.runs
    assert [run.variant for run in runs] == ["", ""]
    with refused(RecipeError, "data"):
        complete("three", "b", "[0,1]")


def test_a_fingerprint_joins_the_parts_of_the_data() -> None:
    assert Fingerprint.of("both", b"inputs", b"labels") == Fingerprint.of("both", b"inputslabels")
