"""Tasks: what is read, which batch belongs to which step, and what the metrics mean."""

import bz2
import gzip
import hashlib
import lzma
import math
import pydoc_data
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eigengraft import RecipeError
from eigengraft.component import validated
from eigengraft.experiments.tasks import Batch, ByteLM, Digits, Task
from eigengraft.experiments.tasks.byte_lm import standard_library_files
from eigengraft.experiments.tasks.images import read_digits
from eigengraft.experiments.training.imports import resolve_paths
from eigengraft.experiments.training.schedule import (
    Constant,
    Cosine,
    LearningRateSchedule,
    Linear,
    PowerDecay,
    WarmupStableDecay,
)
from eigengraft.testing.laws import Case, Law
from eigengraft.testing.task_laws import TASK_LAWS

from ..processes import run
from ..refusals import refused

pytestmark = pytest.mark.slow

SMALL = ByteLM(layers=1, width=16, heads=2, context=16, batch_size=4, eval_sequences=8, max_bytes=65536)
TASKS = [SMALL, Digits(), Digits(model="cnn", width=4)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("law", TASK_LAWS, ids=str)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.kind}-{getattr(task, 'model', 'gpt')}")
def test_a_law_of_tasks(law: Law[Case[Task]], task: Task) -> None:
    case = Case(task)
    if law.skip(case) is None:
        law.require(case)


def test_targets_are_the_bytes_that_follow_the_inputs(tmp_path: Path) -> None:
    text = bytes(range(256)) * 40
    (tmp_path / "text").write_bytes(text)
    data = ByteLM(path=str(tmp_path / "text"), context=32).load()
    for inputs, targets in [data.batch(0, 0), *data.evaluation()]:
        assert inputs.shape[1] == 32
        torch.testing.assert_close(targets, (inputs + 1) % 256)
        torch.testing.assert_close(inputs[:, 1:], targets[:, :-1])


def test_a_file_of_the_standard_library_has_the_same_path_everywhere() -> None:
    task = ByteLM(path="python:pydoc_data/topics.py", context=32)
    assert task.path == "python:pydoc_data/topics.py"
    text = Path(pydoc_data.__file__).with_name("topics.py").read_bytes()
    assert task.load().fingerprint.sha256 == hashlib.sha256(text).hexdigest()
    with refused(ValueError, "python:nowhere"):
        ByteLM(path="python:nowhere").load()


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz"])
def test_a_text_in_a_package_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    text = bytes(range(256)) * 20
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix]
    (tmp_path / "texts_for_test" / "data").mkdir(parents=True)
    (tmp_path / "texts_for_test" / "__init__.py").write_text("raise ImportError\n")
    (tmp_path / "texts_for_test" / "data" / f"text{suffix}").write_bytes(pack(text))
    monkeypatch.syspath_prepend(tmp_path)
    path = f"package:texts_for_test/data/text{suffix}"
    assert resolve_paths({"task": {"kind": "byte_lm", "path": path}}, tmp_path)["task"]["path"] == path
    found = ByteLM(path=path, context=8).load().fingerprint
    assert (found.sha256, found.source) == (hashlib.sha256(text).hexdigest(), path)
    assert ByteLM(path=path, context=8, max_bytes=4096).load().fingerprint.size == 4096  # of the text
    for wrong, asked in (("package:nowhere_for_test/text", "package:"), (f"{path}x", "no file")):
        with refused(ValueError, "task.path", asked):
            ByteLM(path=wrong).load()


def test_training_never_sees_the_last_part_of_the_text_and_validation_sees_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"t" * 9500 + b"v" * 500)
    data = ByteLM(path=str(tmp_path / "text"), context=8).load()
    trained = {value for step in range(50) for part in data.batch(0, step) for value in part.flatten().tolist()}
    validated = {value for batch in data.evaluation() for part in batch for value in part.flatten().tolist()}
    assert (trained, validated) == ({ord("t")}, {ord("v")})


def test_the_fingerprint_is_the_hash_of_the_bytes_read(tmp_path: Path) -> None:
    text = np.random.default_rng(0).bytes(9000)
    (tmp_path / "text").write_bytes(text)
    whole = ByteLM(path=str(tmp_path / "text")).load().fingerprint
    assert (whole.size, whole.sha256) == (9000, hashlib.sha256(text).hexdigest())
    capped = ByteLM(path=str(tmp_path / "text"), max_bytes=5000).load().fingerprint
    assert (capped.size, capped.sha256) == (5000, hashlib.sha256(text[:5000]).hexdigest())


def test_the_standard_library_is_read_alike_in_another_process(tmp_path: Path) -> None:
    """Its hashes of strings are others, so that sets have another order."""
    code = """
from eigengraft.experiments.tasks import ByteLM
print(hash("text"), ByteLM(max_bytes=65536, context=16).load().fingerprint.sha256)
"""
    other = run("-c", code, folder=tmp_path)
    assert other.returncode == 0, other.stderr
    order, fingerprint = other.stdout.split()
    assert int(order) != hash("text")
    assert fingerprint == SMALL.load().fingerprint.sha256


def test_the_standard_library_files_are_sources_of_the_library_proper() -> None:
    files = standard_library_files()
    assert len(files) == len(set(files)) > 300
    assert {"argparse.py", "dataclasses.py"} <= {file.name for file in files}
    assert not {"test", "site-packages", "dist-packages"} & {part for file in files for part in file.parts[-3:-1]}
    assert all(file.suffix == ".py" for file in files)


def test_a_text_too_short_for_the_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 1000)
    with refused(ValueError, 1280, 1000, "task.context"):
        ByteLM(path=str(tmp_path / "text")).load()
    with refused(ValueError, "task.path"):
        ByteLM(path="nowhere").load()


def test_gpt_is_causal_and_starts_near_the_uniform_distribution() -> None:
    model, (inputs, targets) = SMALL.new_model(0), SMALL.load().batch(0, 0)
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])
    assert SMALL.loss(before, targets).item() == pytest.approx(math.log(256), abs=0.05)


def test_gpt_has_the_parameters_of_its_definition() -> None:
    # two embeddings and a head, per block four d x d and two d x 4d matrices, and gain and bias of every norm
    task = ByteLM(layers=3, width=32, heads=4, context=16)
    d = 32
    expected = (256 + 16 + 256) * d + 3 * (4 * d * d + 8 * d * d) + (2 * 3 + 1) * 2 * d
    assert sum(p.numel() for p in task.new_model(0).parameters()) == expected


def test_digits_are_those_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    bunch, (images, digits, _) = load_digits(), read_digits()
    assert (images[:, 0] * 16 == torch.from_numpy(bunch.images)).all()
    assert digits.tolist() == bunch.target.tolist()


def test_digits_are_split_once_and_an_epoch_shows_every_image_once() -> None:
    task = Digits(batch_size=64)
    data, (images, digits, _) = task.load(), read_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert 0 <= images.min() < images.max() == 1
    (validation,) = data.evaluation()
    per_epoch = (1797 - len(validation.targets)) // 64
    assert len(validation.targets) == 1797 // 5
    epoch = [data.batch(5, step) for step in range(per_epoch)]
    known = {image.numpy().tobytes() for image in images}  # no two digits are drawn alike
    assert len(known) == 1797
    seen = [image.numpy().tobytes() for batch in epoch for image in batch.inputs]
    held_out = {image.numpy().tobytes() for image in validation.inputs}
    assert len(set(seen)) == len(seen) == per_epoch * 64
    assert not held_out & set(seen)
    other = [image.numpy().tobytes() for image in data.batch(5, per_epoch).inputs]
    assert other != seen[:64]
    assert set(digits.tolist()) == set(range(10))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"width": 30, "heads": 4}, ("heads", 30, 4)),
        ({"context": 1}, ("context", 2, 1)),
        ({"layers": 2.5}, ("layers", 2.5)),
    ],
)
def test_wrong_fields_are_refused_with_their_path(fields: dict[str, object], says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        validated(ByteLM, fields)


def test_a_task_may_come_from_outside() -> None:
    class Parity(Task):
        """Two bits and their sum modulo 2."""

        kind: Literal["parity"] = "parity"

        def load(self) -> "Bits":  # type: ignore[override]
            return Bits()

        def build(self) -> nn.Module:
            return nn.Linear(2, 2)

    class Bits:
        def evaluation(self) -> list[Batch]:
            return [Batch(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([1, 0]))]

    task = validated(Task, "parity")  # type: ignore[type-abstract]
    assert isinstance(task, Parity)
    assert math.isfinite(task.evaluate(task.new_model(0), task.load(), CPU).val_loss)  # type: ignore[arg-type]


def test_every_target_has_the_same_weight_in_further_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 70 sequences of 16 targets, in a batch of 64 and a batch of 6."""
    monkeypatch.setattr(ByteLM, "metrics", lambda self, outputs, targets: {"one": 1, "rows": len(targets)})
    task = SMALL.replace(eval_sequences=70)
    found = task.evaluate(task.new_model(0), task.load(), CPU).others
    assert found == {"one": 1, "rows": pytest.approx((64**2 + 6**2) / 70)}


def rates(schedule: LearningRateSchedule, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedule.scheduler(optimizer, steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_follow_their_formulas() -> None:
    assert rates(Constant(), 3) == [2.0] * 3
    assert rates(Constant(warmup_steps=4), 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(Linear(), 4) == [2.0, 1.5, 1.0, 0.5]
    assert rates(Linear(warmup_steps=2, final=0.5), 6) == [1.0, 2.0, 2.0, 1.75, 1.5, 1.25]


@pytest.mark.parametrize(("power", "final"), [(0.5, 0.0), (1.0, 0.25), (3.0, 0.1)])
def test_power_is_its_formula(power: float, final: float) -> None:
    t = torch.arange(10, dtype=torch.float64) / 10
    expected = 2 * (final + (1 - final) * (1 - t.pow(power)))
    assert rates(PowerDecay(power=power, final=final, warmup_steps=5), 15)[5:] == pytest.approx(
        expected.tolist(), rel=1e-12
    )
    assert rates(PowerDecay(power=power, final=final, warmup_steps=5), 15)[:5] == pytest.approx(
        [0.4, 0.8, 1.2, 1.6, 2.0]
    )


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
@pytest.mark.parametrize(("fraction", "final"), [(0.25, 0.0), (0.5, 0.1), (1.0, 0.0)])
def test_warmup_stable_decay_is_its_formula(shape: str, fraction: float, final: float) -> None:
    schedule = LearningRateSchedule.model_validate(
        {"kind": "wsd", "shape": shape, "decay_fraction": fraction, "final": final, "warmup_steps": 4}
    )
    stable = round(20 * (1 - fraction))
    x = torch.arange(20 - stable, dtype=torch.float64) / (20 - stable)
    falling = 2 * (final + (1 - final) * (1 - (x if shape == "linear" else x.sqrt())))
    expected = [0.5, 1.0, 1.5, 2.0, *[2.0] * stable, *falling.tolist()]
    assert rates(schedule, 24) == pytest.approx(expected, rel=1e-12)
    assert schedule.factor(24, 24) == pytest.approx(final, abs=1e-12)


def test_schedules_that_are_others() -> None:
    assert rates(PowerDecay(power=1.0, final=0.3), 9) == pytest.approx(rates(Linear(final=0.3), 9), rel=1e-12)
    assert rates(WarmupStableDecay(decay_fraction=1.0), 9) == pytest.approx(rates(Linear(), 9), rel=1e-12)


@pytest.mark.parametrize(
    ("fault", "path"),
    [
        ({"kind": "power", "power": 0.0}, "power"),
        ({"kind": "power", "final": 1.5}, "final"),
        ({"kind": "wsd", "decay_fraction": 0.0}, "decay_fraction"),
        ({"kind": "wsd", "decay_fraction": 1.5}, "decay_fraction"),
        ({"kind": "wsd", "shape": "cosine"}, "shape"),
    ],
)
def test_schedules_refuse_values_out_of_range(fault: dict[str, object], path: str) -> None:
    with refused(ValueError, path, list(fault.values())[-1]):
        LearningRateSchedule.model_validate(fault)


def test_cosine_equals_torch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.2)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert rates(Cosine(final=0.1), 20) == pytest.approx(expected, rel=1e-12)
    assert rates(Cosine(final=0.1, warmup_steps=5), 25)[5:] == pytest.approx(expected, rel=1e-12)


def test_loss_is_the_mean_over_every_position() -> None:
    logits = torch.zeros(2, 3, 4)
    logits[0, 0, 1] = math.log(3)  # p = 3 / 6 there, 1 / 4 elsewhere
    targets: Tensor = torch.ones(2, 3, dtype=torch.long)
    assert SMALL.loss(logits, targets).item() == pytest.approx((math.log(2) + 5 * math.log(4)) / 6)
