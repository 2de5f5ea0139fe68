"""Runs of other training loops: written row by row, or imported from their logs, and compared by reports."""

import json
import math
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eigengraft import RecipeError
from eigengraft.experiments import Report, RunLog, diagnose, import_run, load_metrics
from eigengraft.experiments.doctor import EXPLANATIONS
from eigengraft.experiments.files import JsonLines, read_object
from eigengraft.experiments.reports.records import TRAINING_LOSS, read_records
from eigengraft.experiments.run_log import ROW_COLUMNS

from ..cli import invoke
from ..refusals import lacking, refused, warned


def write(directory: Path, values: list[float], **settings: object) -> Path:
    with RunLog(directory, "my text", len(values), **settings) as log:  # type: ignore[arg-type]
        for step, value in enumerate(values, start=1):
            log.row(step, torch.tensor(value, requires_grad=True), val_loss=value + 0.5, perplexity=2.0**value)
    return directory


@pytest.mark.slow
def test_runs_of_own_loops_are_compared_over_seeds(tmp_path: Path) -> None:
    for seed in (0, 1):
        write(tmp_path / "adamw" / f"seed-{seed}", [3.0, 2.0, 1.5 + seed], seed=seed, lr=1e-3, recipe="adamw")
        write(tmp_path / "mine" / f"seed-{seed}", [2.0, 1.0, 0.5 + seed], seed=seed, lr=1e-2, recipe="mine")
    report = Report(tmp_path, baseline="adamw")
    (panel,) = report.panels
    assert [row.label for row in panel.rows] == ["adamw", "mine"]
    assert panel.rows[1].difference is not None and panel.rows[1].difference.mean == -1.0
    assert panel.rows[1].final is not None and panel.rows[1].final.mean == 1.5
    text = report.write().read_text()
    assert "mine" in text and "0.01" in text
    assert report.records.runs[0].rows[0]["perplexity"] == 8.0


def test_the_directory_gives_the_seed(tmp_path: Path) -> None:
    for seed, value in enumerate((1.0, 2.0, 6.0)):
        write(tmp_path / "mine" / f"seed-{seed}", [9.0, value], recipe="mine")
    (panel,) = Report(tmp_path).panels
    assert panel.rows[0].final is not None and panel.rows[0].final.mean == 3.5  # of val_loss
    assert [run.seed for run in panel.rows[0].runs] == [0, 1, 2]


def test_runs_with_the_same_name_and_seed_are_kept_apart(tmp_path: Path) -> None:
    write(tmp_path / "mine", [9.0, 7.0], seed=2)
    for name, value in (("seed-0", 1.0), ("seed-1", 3.0), ("seed-2", 5.0)):
        write(tmp_path / "mine" / name, [9.0, value], seed=2 if name == "seed-2" else 1)
    report = Report(tmp_path)
    (panel,) = report.panels
    names = ["mine", "mine/seed-0", "mine/seed-1", "mine/seed-2"]
    assert [row.label for row in panel.rows] == [f"mine [{name}]" for name in names]
    assert [list(row.finals.values()) for row in panel.rows] == [[7.5], [1.5], [3.5], [5.5]]
    assert all(row.ended for row in panel.rows)
    (notice,) = report.records.apart
    assert lacking(notice, *names) == []


def test_imported_runs_have_the_seeds_of_their_directories(tmp_path: Path) -> None:
    for seed, value in enumerate((1.0, 3.0)):
        file = tmp_path / "log.csv"
        file.write_text(f"step,val_loss\n1,{value}\n")
        out = tmp_path / "runs" / "mine" / f"seed-{seed}"
        done = invoke(["import-run", str(file), "--out", str(out), "--task", "t"])
        assert done.exit_code == 0, done.output
    (panel,) = Report(tmp_path / "runs").panels
    assert [(row.label, row.finals, row.ended) for row in panel.rows] == [("mine", {0: 1.0, 1: 3.0}, True)]


def test_a_log_of_other_settings_is_refused_whatever_their_names(tmp_path: Path) -> None:
    RunLog(tmp_path / "run", "my text", 4, parallel=2)
    with refused(RecipeError, "parallel", "2", "4"):
        RunLog(tmp_path / "run", "my text", 4, parallel=4)


def test_a_row_without_a_loss_and_with_a_misspelled_one_is_refused(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "my text", 4)
    with refused(ValueError, "los", "'loss'"):
        log.row(1, los=1.0)
    log.row(1, 1.0, los=1.0)


def test_a_loop_that_is_run_again_continues_its_log(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "my text", 4)
    for step in (1, 2, 3):
        log.row(step, float(step), seconds=step)
    again = RunLog(tmp_path / "run", "my text", 4)
    again.row(2, 20.0, seconds=2)
    again.row(4, 40.0, seconds=4)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 20.0), (4, 40.0)] and rows == again.rows
    again.finish()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["train_loss"], result["steps"], result["step_ms"]) == (40.0, 4, 1000.0)
    with refused(RecipeError, tmp_path / "run"):
        RunLog(tmp_path / "run", "my text", 4)


def test_the_row_of_the_last_step_completes_the_run(tmp_path: Path) -> None:
    RunLog(tmp_path, "my text", 2).row(2, 1.0)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with refused(RecipeError, tmp_path):
        RunLog(tmp_path, "my text", 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and read_object(tmp_path / "result.json")["steps"] == 2


def test_a_log_that_begins_again_warns_of_the_rows_that_it_replaces(tmp_path: Path) -> None:
    log = RunLog(tmp_path, "my text", 4)
    log.row(1, 4.0)
    log.row(2, 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RunLog(tmp_path, "my text", 4).row(2, 3.5)
    with warned(UserWarning, tmp_path, "step 1", "2 rows", "step 2"):
        RunLog(tmp_path, "my text", 4).row(1, 5.0)


def test_a_block_that_raises_leaves_an_unfinished_run_and_nan_is_a_divergence(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), RunLog(tmp_path / "a", "my text", 2) as log:
        log.row(1, 1.0)
        raise KeyboardInterrupt
    with RunLog(tmp_path / "b", "my text", 2) as log:
        log.row(1, 1.0, val_loss=1.0)
        log.row(2, float("nan"))
    records = Report(tmp_path).records
    assert sorted(run.status(records.metric) for run in records.runs) == ["diverged", "unfinished"]


N = float("nan")
HEALTHY = [4.0, 3.0, 2.0, 1.5, 1.2, 1.1, 1.0, 1.0, 1.0, 0.8, 1.2, 0.9]


@pytest.mark.parametrize(
    ("losses", "val_losses", "kind", "step"),
    [
        ([2.0, 1.9, 1.8, N, N], None, "loss not finite", 4),
        ([N, N], None, "loss not finite", 1),
        ([2.0, 5.0, 9.0, 36.0, N, N], None, "learning rate", 5),
        ([2.0, 5.0, 9.0, 36.0], None, "learning rate", None),
        ([4.0, 3.0, 2.0, 1.5, 1.2, 1.1, 1.0, 1.0, 3.0, 3.8, 3.9, 3.9], None, "learning rate", None),
        ([2.0] * 5, None, "stalled", None),
        ([2.0, 1.5, 1.2, 1.1], [2.0, 1.5, N, N], "validation data", 3),
        ([2.0, 1.5, None, N], [2.0, 1.5, N, None], "loss not finite", 3),  # the evaluation saw it first
        ([None] * 3, [2.0, N, N], "loss not finite", 2),
        ([None] * 4, [2.0] * 4, "stalled", None),
        (HEALTHY, None, None, None),
        ([*HEALTHY[:5], N, *HEALTHY[5:]], None, "loss not finite", 6),  # a skipped step
        ([None] * 12, HEALTHY, None, None),
    ],
)
def test_the_doctor_reads_the_losses_of_such_runs_and_names_the_checks_that_it_cannot_do(
    tmp_path: Path,
    losses: list[float | None],
    val_losses: list[float | None] | None,
    kind: str | None,
    step: int | None,
) -> None:
    with RunLog(tmp_path, "my text", len(losses), recipe="mine") as log:
        for number, (loss, val_loss) in enumerate(
            zip(losses, val_losses or [None] * len(losses), strict=True), start=1
        ):
            log.row(number, loss, val_loss=val_loss)
    diagnosis = diagnose(tmp_path)
    assert [(one.kind, one.step) for one in diagnosis.findings] == ([] if kind is None else [(kind, step)])
    (note,) = diagnosis.notes
    assert "layers" in note and "recipe.update" not in note and f"{len(losses)} rows" in note


def test_a_report_names_runs_by_their_recipes_if_these_differ(tmp_path: Path) -> None:
    for folder, recipe in {"a": "torch adamw", "b/seed-0": "mine", "b/seed-1": "mine", "c": "old", "d": "old"}.items():
        with RunLog(tmp_path / folder, "my text", 2, recipe=recipe) as log:
            log.row(1, 2.0)
            log.row(2, 1.0)
    report = Report(tmp_path, baseline="a", labels={"d": "other"})
    (panel,) = report.panels
    assert [row.label for row in panel.rows] == ["torch adamw", "mine", "c", "other"]
    assert panel.baseline is not None and panel.baseline.label == "torch adamw"


def test_a_loss_that_is_not_finite_is_forgotten_when_its_step_is_logged_again(tmp_path: Path) -> None:
    log = RunLog(tmp_path, "my text", 4)
    for step, loss in enumerate([2.0, 1.9, N], start=1):
        log.row(step, loss)
    assert diagnose(tmp_path).findings[0].step == 3  # also while the run trains
    log = RunLog(tmp_path, "my text", 4)
    log.row(3, 1.8)
    assert not (tmp_path / "fault.json").exists()
    log = RunLog(tmp_path, "my text", 4)
    log.row(3, N)
    again = RunLog(tmp_path, "my text", 4)
    again.row(2, 1.9)
    again.row(3, 1.8)
    again.row(4, 1.7)
    again.finish()
    assert not diagnose(tmp_path) and read_object(tmp_path / "result.json")["train_loss"] == 1.7


FALLING = [3.0 / step for step in range(1, 61)]


@pytest.mark.parametrize(
    ("lost", "logged", "kind", "words"),
    [
        ({30}, ("loss", N), "loss not finite", ("training loss is nan", "1 of 60 rows", "again from step 31")),
        ({30}, ("loss", -math.inf), "loss not finite", ("training loss is -inf", "1 of 60 rows", "again from step 31")),
        (
            {30, 31},
            ("val_loss", N),
            "validation data",
            ("validation loss is nan", "2 of 60 rows", "again from step 32"),
        ),
        (set(range(1, 60, 2)), ("loss", N), "loss not finite", ("30 of 60 rows", "step 59", "again from step 60")),
        (set(range(2, 61, 2)), ("loss", N), "loss not finite", ("30 of 60 rows", "step 60", "at the end")),
    ],
)
@pytest.mark.parametrize("imported", [False, True], ids=["logged", "imported"])
def test_a_loss_that_is_finite_again_is_found_with_its_rows(
    tmp_path: Path, imported: bool, lost: set[int], logged: tuple[str, float], kind: str, words: tuple[str, ...]
) -> None:
    column, value = logged
    rows = [{"step": step, "loss": x, "val_loss": x} for step, x in enumerate(FALLING, start=1)]
    rows = [{**row, column: value} if row["step"] in lost else row for row in rows]
    if imported:
        lines = ["step,loss,val_loss", *(f"{row['step']},{row['loss']},{row['val_loss']}" for row in rows)]
        (tmp_path / "log.csv").write_text("\n".join(lines))
        import_run(tmp_path / "log.csv", tmp_path / "run", "text")
    else:
        with RunLog(tmp_path / "run", "text", 60) as log:
            for row in rows:
                log.row(**row)  # type: ignore[arg-type]
    (found,) = diagnose(tmp_path / "run").findings
    assert (found.kind, found.step) == (kind, min(lost)) and "this step" in EXPLANATIONS["loss not finite"].remedy
    assert all(word in found.text for word in words), found.text
    ended = read_object(tmp_path / "run" / "result.json")
    assert ended["train_loss"] == (None if 60 in lost else FALLING[-1])


def test_a_loss_that_is_not_finite_hides_neither_the_other_loss_nor_a_later_rise(tmp_path: Path) -> None:
    with RunLog(tmp_path, "text", 12) as log:
        for step in range(1, 13):
            log.row(step, N if step == 5 else float(step), val_loss=N if step == 3 else 1.0)
    first, second = diagnose(tmp_path).findings
    assert (first.kind, first.step, second.kind) == ("loss not finite", 3, "learning rate")
    assert all(f"again from step {step}" in first.text for step in (4, 6)) and "rose from" in second.text


def test_a_loss_that_is_not_logged_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("".join(["step,loss\n", *(f"{s},{'' if s == 3 else 9 - s}\n" for s in range(9))]))
    assert not diagnose(import_run(tmp_path / "log.csv", tmp_path / "run", "text"))


def test_a_number_is_kept_beside_a_nan_of_another_row_of_its_step(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss,val_loss\n1,2.0,nan\n1,nan,2.5\n2,nan,\n2,1.0,\n")
    run = import_run(tmp_path / "log.csv", tmp_path / "run", "text")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["loss"], row["val_loss"]) for row in rows] == [(2.0, 2.5), (1.0, None)]


def test_the_doctor_finds_a_nan_of_an_imported_log(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n0,2.0\n1,1.5\n2,nan\n3,nan\n")
    assert [
        (one.kind, one.step) for one in diagnose(import_run(tmp_path / "log.csv", tmp_path / "run", "text")).findings
    ] == [("loss not finite", 3)]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_log_is_imported_with_its_own_names(tmp_path: Path, suffix: str) -> None:
    rows = [{"global_step": step, "train/loss": 3.0 - step, "note": "x"} for step in range(3)]
    rows += [{"global_step": 2, "eval/loss": 0.75}]  # a row of its own, as many loggers write it
    file = tmp_path / f"log.{suffix}"
    if suffix == "csv":
        names = ["global_step", "train/loss", "eval/loss", "note"]
        lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    else:
        lines = [json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    out = tmp_path / "runs" / "other"
    columns = ["step=global_step", "loss=train/loss", "val_loss=eval/loss"]
    done = invoke(["import-run", str(file), "--out", str(out), "--task", "my text", *columns])
    assert done.exit_code == 0, done.output
    report = Report(tmp_path / "runs", x=["steps"])
    (run,) = report.records.runs
    assert [(row["step"], row["loss"], row["val_loss"]) for row in run.rows] == [
        (1, 3, None),
        (2, 2, None),
        (3, 1, 0.75),
    ]
    assert run.result["val_loss"] == 0.75 and "step_ms" not in run.result
    assert report.write().exists() and len(report.figures()) == 2
    assert Report(tmp_path / "runs").write().exists()  # without seconds


def test_runs_with_nothing_but_a_training_loss_are_compared_by_it(tmp_path: Path) -> None:
    for name, loss in (("a", 2.0), ("b", 1.0)):
        with RunLog(tmp_path / name, "my text", 1) as log:
            log.row(1, loss)
    report = Report(tmp_path)
    assert report.panels[0].best is not None and report.panels[0].best.label == "b"
    assert "training loss" in report.write().read_text()


@pytest.mark.parametrize(
    ("text", "columns", "data"),
    [
        ("step,loss\n1,a\n", {"loss": "loss"}, ("loss",)),
        ("step,loss,val_loss\n1,2,a\n", {}, ("val_loss",)),
        ("loss,note\n1,a\n", {"loss": "loss"}, ("step", "loss, note", "val_accuracy")),
        ("step,accuracy\n1,2\n", {}, ("loss", "val_loss", "step, accuracy", "val_accuracy")),
        ("step,loss,eval\n1,2,3\n", {"val_loss": "evall"}, ("val_loss=evall", "'eval'", "step, loss, eval", "tokens")),
        ("", {}, ("'loss'", "none")),
        ("step,loss,val\n1,2,3\n", {}, ("'val'", "val_loss=val", "val=val")),
        ("step,loss,Eval/Loss\n1,2,3\n", {}, ("val_loss=Eval/Loss",)),
        ("step,loss\n-5,2\n3,1\n", {}, ("row 1", "-5")),
        ("step,loss\n1,2\n1.5,1\n", {}, ("row 2", "1.5")),
    ],
)
def test_logs_without_steps_or_losses_are_refused(
    tmp_path: Path, text: str, columns: dict[str, str], data: tuple[str, ...]
) -> None:
    file = tmp_path / "log.csv"
    file.write_text(text)
    with refused(RecipeError, file, *data):
        import_run(file, tmp_path / "out", "my text", columns)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("header", ["step,loss,train", "step,train,loss"])
@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"loss": "train"}, (1.0, None, {})),
        ({"loss": "train", "val_loss": "train"}, (1.0, 1.0, {})),
        ({"val_loss": "loss"}, (None, 9.0, {"train": 1.0})),
        ({"loss": "train", "own": "loss"}, (1.0, None, {"own": 9.0})),
    ],
)
def test_a_named_column_comes_before_a_column_with_its_name(
    tmp_path: Path, header: str, columns: dict[str, str], expected: tuple[Any, ...]
) -> None:
    values = {"step": 1, "loss": 9.0, "train": 1.0}
    file = tmp_path / "log.csv"
    file.write_text(f"{header}\n{','.join(str(values[name]) for name in header.split(','))}\n")
    (row,) = JsonLines(import_run(file, tmp_path / "run", "t", columns) / "metrics.jsonl").rows()
    others = {name: row[name] for name in row if name not in ROW_COLUMNS}
    assert (row["loss"], row["val_loss"], others) == expected


def test_a_column_with_the_name_of_a_validation_loss_is_kept_if_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("step,loss,val\n1,2,3\n")
    for columns, expected in (({"val": "val"}, (None, 3.0)), ({"val_loss": "val"}, (3.0, None))):
        run = import_run(file, tmp_path / next(iter(columns)), "t", columns)
        (row,) = JsonLines(run / "metrics.jsonl").rows()
        assert (row["val_loss"], row.get("val")) == expected


def test_logged_columns_never_replace_the_run_they_belong_to(tmp_path: Path) -> None:
    with RunLog(tmp_path / "mine" / "seed-4", "t", 1) as log:
        log.row(1, 1.0, seed=77, status=5, variant=6, **{"axis.run": 8})
    frame = load_metrics(tmp_path)
    assert frame[["axis.run", "seed", "status", "variant"]].values.tolist() == [["mine", 4, "complete", 6]]
    assert frame[["logged.seed", "logged.status", "logged.axis.run"]].values.tolist() == [[77, 5, 8]]


def test_steps_outside_of_the_run_and_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "my text", 2)
    with refused(ValueError, "step", 3, 2):
        log.row(3, 1.0)
    with refused(ValueError, "loss", "low"):
        log.row(1, "low")  # type: ignore[arg-type]
    log.row(1, 1.0)
    with refused(ValueError, "step", 1, "RunLog"):
        log.row(1, 2.0)
    assert [row["loss"] for row in log.rows] == [1.0]
    with refused(RecipeError, tmp_path / "run"):
        RunLog(tmp_path / "run", "other text", 2)


def test_settings_may_be_tensors_and_numbers_of_numpy(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", "my text", np.int64(2), lr=torch.tensor([0.5]), betas=torch.tensor([0.5, 1]))  # type: ignore[arg-type]
    assert [log.config[name] for name in ("steps", "lr", "betas")] == [2, 0.5, [0.5, 1]]
    for name, value in {"lr": "fast", "steps": "20", "seed": 0.5, "loader": object()}.items():
        with refused(ValueError, name):
            RunLog(tmp_path / "other", "my text", **{"steps": 2, name: value})


@pytest.mark.parametrize(
    ("rows", "every", "joined"),
    [
        ({10: 1.0, 15: 2.0, 20: 4.0, 23: 5.0, 24: 9.0}, 10, {10: 1.0, 20: 3.0, 24: 6.0}),
        ({1: 12.0, 11: 1.0, 21: 3.0, 24: 4.0}, 10, {11: 2.0, 21: 3.0, 24: 4.0}),
        ({10: 1.0, 15: 2.0, 24: 4.0}, None, {10: 1.0, 15: 2.0, 24: 4.0}),
    ],
)
def test_training_losses_of_rows_between_the_logged_ones_are_joined(
    rows: dict[int, float], every: int | None, joined: dict[int, float], tmp_path: Path
) -> None:
    """Rows of evaluations at other steps have means over fewer steps: the first 3.0 is (2 * 5 + 4 * 5) / 10."""
    with RunLog(tmp_path / "run", "my text", 24, log_every=every) as log:
        for step, loss in rows.items():
            log.row(step, loss)
    (run,) = read_records(tmp_path).runs
    assert run.evaluations(TRAINING_LOSS) == joined
