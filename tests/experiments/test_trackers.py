"""Trackers: every row of a run is passed on once, also of a run that was stopped and goes on."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from eigengraft import RecipeError
from eigengraft.experiments import load_experiment, train
from eigengraft.experiments.files import JsonLines
from eigengraft.experiments.training.callbacks import Callback, RunView, Tracker
from eigengraft.experiments.training.outcome import Result
from eigengraft.experiments.training.rundir import RunDirectory
from eigengraft.experiments.training.train import Trainer

from ..refusals import refused

pytestmark = pytest.mark.slow

TINY = {
    "task": {"kind": "digits", "layers": 1, "width": 4, "batch_size": 8},
    "recipe": "adamw",
    "steps": 7,
    "log_every": 1,
    "eval_every": 3,
    "checkpoint_every": 4,
}


class Stopped(Exception):
    """A kill, as far as files go."""


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run_in_two(callbacks: list[Any], directory: Path) -> list[dict[str, Any]]:
    """The numbers of the rows of a run that is stopped after step 6 and goes on from its checkpoint at step 4."""
    experiment = load_experiment({**TINY, "callbacks": callbacks})

    def stop(tick: Any) -> None:
        if tick.step == 6:
            raise Stopped

    with pytest.raises(Stopped):
        train(experiment, directory, stop)
    train(experiment, directory)
    return [{k: v for k, v in row.items() if isinstance(v, (int, float))} for row in rows(directory / "metrics.jsonl")]


class OwnTracker(Tracker):
    """A tracker of a user's own."""

    kind: Literal["lines_for_test"] = "lines_for_test"

    @contextmanager
    def open(self, run: RunView, step: int) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
        lines = JsonLines(run.directory / "lines")
        lines.rewind(step - 1)
        yield lambda step, values: lines.append({"step": step, **values})
        (run.directory / "closed").touch()


def test_a_tracker_receives_the_rows_of_the_run(tmp_path: Path) -> None:
    written = run_in_two(["lines_for_test"], tmp_path / "run")
    assert [row["step"] for row in written] == [1, 2, 3, 4, 5, 6, 7]
    assert all({"gradient_norm", "update_ratio_largest", "weight_growth", "skipped"} <= row.keys() for row in written)
    assert rows(tmp_path / "run" / "lines") == written and (tmp_path / "run" / "closed").exists()


def test_a_diverged_run_passes_on_its_last_row(tmp_path: Path) -> None:
    result = train(load_experiment({**TINY, "recipe": "sgd", "lr": 1e30, "callbacks": ["lines_for_test"]}), tmp_path)
    assert result.diverged
    assert [row["step"] for row in rows(tmp_path / "lines")] == list(range(1, result.steps + 1))
    assert (tmp_path / "closed").exists()


class Ends(Callback):
    """A callback that counts its calls in a file, and looks for the result."""

    kind: Literal["ends_for_test"] = "ends_for_test"

    def finished(self, run: RunView, result: Result) -> None:
        assert len(run.rows) == len(rows(run.directory / "metrics.jsonl")) and run.rows[-1]["step"] == result.steps
        JsonLines(run.directory / "ends").append({"result": (run.directory / "result.json").exists()})


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Trainer, "_write_layers"), (Trainer, "_save"), (Trainer, "_finish"), (Ends, "finished"), (RunDirectory, "write")],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_run_killed_at_its_end_ends_like_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, after: bool
) -> None:
    """The kill comes at the last call of a method that a run calls at its end."""
    experiment = load_experiment({**TINY, "callbacks": ["ends_for_test"], "diagnostics": "every 3"})
    train(experiment, tmp_path / "whole")
    act = getattr(owner, method)

    def killed(self: Any, *given: Any) -> Any:
        last = given[0] == "result" if owner is RunDirectory else getattr(self, "step", 7) == 7
        if last and not after:
            raise Stopped
        found = act(self, *given)
        if last:
            raise Stopped
        return found

    monkeypatch.setattr(owner, method, killed)
    with pytest.raises(Stopped):
        train(experiment, tmp_path / "killed")
    monkeypatch.undo()
    train(experiment, tmp_path / "killed")
    whole, again = (rows(tmp_path / name / "diagnostics.jsonl") for name in ("whole", "killed"))
    assert again == whole and any(row["stage"] == "" for row in whole)
    ends = rows(tmp_path / "killed" / "ends")
    assert ends in ([{"result": False}], 2 * [{"result": False}])


def test_rows_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them again after each row would make a run quadratic in its length."""
    reads = []
    read = JsonLines.rows
    monkeypatch.setattr(JsonLines, "rows", lambda self: reads.append(self) or read(self))
    assert len(run_in_two(["lines_for_test"], tmp_path / "run")) == 7 and len(reads) == 2


def test_tensorboard_has_every_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `trackers` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = run_in_two(["tensorboard"], tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("loss", "val_loss", "lr", "weight_norm_largest", "skipped"):
        expected = [(row["step"], row[name]) for row in written if name in row]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        # TensorBoard keeps float32
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra `trackers` is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(load_experiment({**TINY, "callbacks": ["wandb"]}), tmp_path / "run")
    (logged,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = logged.read_bytes()
    assert all(name in content for name in (b"val_loss", b"optimizer_ms", b"digits"))


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with refused(RecipeError, f"callbacks.{kind}", kind):
        train(load_experiment({**TINY, "callbacks": [kind]}), tmp_path)
