"""Run directories written by other training loops, so that reports can compare these runs with all other runs.

with RunLog("runs/mine/seed-0", task="my text", steps=1000, lr=3e-4) as log:
    for step in range(1, 1001):
        ...
        log.row(step, loss, val_loss=val_loss)
"""

from __future__ import annotations

import csv
import json
import math
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from eigengraft.component import Component
from eigengraft.errors import RecipeError, counted, did_you_mean, name_some, near_names, warn_user

from .training.divergence import Fault, FaultCause
from .training.outcome import finite_or_none
from .training.rundir import RunDirectory

ROW_COLUMNS = ("step", "loss", "val_loss", "val_accuracy", "lr", "seconds")
"""Columns that every row of a `RunLog` has. A column that was not logged has the value None.

Rows may have other columns. Reports draw the columns `tokens` and `flops`, and `load_metrics` returns all columns.
"""
_KNOWN_COLUMNS = (*ROW_COLUMNS, "tokens", "flops", "val.NAME")
"""Columns that reports use, for messages. NAME is any metric of an evaluation."""
NOT_FINITE = ".not_finite"
"""Suffix of the column that marks a loss as NaN or infinite, as in `{"loss": null, "loss.not_finite": "nan"}`.

JSON has no NaN, so the loss itself is null. Without the second column the loss would count as not logged.
"""


def is_lost(row: Mapping[str, Any], column: str) -> bool:
    """Return True if a loss of a row is NaN or infinite, and False if it is finite or was not logged.

    column: column of the loss, "loss" or "val_loss".
    """
    return f"{column}{NOT_FINITE}" in row


def rows_with(rows: Sequence[Mapping[str, Any]], column: str) -> list[Mapping[str, Any]]:
    """Return the rows in which the loss of a column, "loss" or "val_loss", was logged, as a finite value or not."""
    return [row for row in rows if row.get(column) is not None or is_lost(row, column)]


def ends_lost(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the last logged training loss or the last logged validation loss is NaN or infinite."""
    return any(is_lost(row, name) for name in ("loss", "val_loss") for row in rows_with(rows, name)[-1:])


class RunLog:
    """A run of your own training loop, written in the format of this library's runs.

    The row of the last step completes the run. In a `with` statement, the end of the block also does, unless the block
    raises an error. A complete run is never changed. A second log in the directory of an incomplete run with the same
    settings continues this run: its first row replaces the rows of the same and of later steps.

    Args:
        directory: directory of the run. Runs in `NAME/seed-0` and `NAME/seed-1` count as two seeds of the method NAME.
            Reports name a method by its recipe if no other method has a recipe of that name, and else by its directory.
            In the arguments `baseline`, `only` and `labels` of `Report`, methods are named by their directories.
        task: name of the task and its data. Runs of other tasks are never compared.
        steps: number of steps of the run, at least 1.
        seed: seed of the run. None: the number of a directory `seed-K`, else 0.
        lr: peak of the learning rate. None: unknown.
        recipe: the optimizer, as a recipe, a mapping or a name.
        settings: other settings of the run, as numbers, texts, lists or mappings. The report shows a setting if it
            differs between runs.

    Raises:
        ValueError: `steps`, `seed` or `lr` is no number of its type or range, or JSON cannot store a setting.
        RecipeError: the directory contains a complete run, or a run with other settings.
    """

    def __init__(
        self,
        directory: str | Path,
        task: str,
        steps: int,
        *,
        seed: int | None = None,
        lr: float | None = None,
        recipe: Component | Mapping[str, Any] | str | None = None,
        **settings: Any,
    ) -> None:
        self.directory, self.steps = Path(directory), _whole("steps", steps)
        if self.steps < 1:
            raise ValueError(f"steps: it must be at least 1, got {steps}")
        self._run = RunDirectory(directory)
        if isinstance(recipe, Component):
            recipe = recipe.model_dump(mode="json")
        if seed is None:
            named = re.fullmatch(r"seed-(\d+)", self.directory.name)
            seed = int(named[1]) if named else 0
        declared = {"name": recipe} if isinstance(recipe, str) else dict(recipe or {})
        fixed = {"name": self.directory.name, "task": {"kind": task}, "recipe": declared}
        given = {**settings, **fixed, "lr": None if lr is None else _parsed("lr", lr)}
        given |= {"steps": self.steps, "seed": _whole("seed", seed)}
        self.config = {name: _as_json(name, value) for name, value in given.items()}
        self._run.acquire(self.config, ignored=())
        if self._run.read("result") is not None:
            raise RecipeError(f"{self.directory}: contains a complete run; choose another directory, or remove it")
        where = {"python": platform.python_version(), "platform": platform.platform(), "command": sys.argv}
        self._run.write("env", where)
        self.rows = self._run.metrics.rows()
        self._began, self._last = time.perf_counter(), 0

    def row(self, step: int, loss: float | None = None, **numbers: float | None) -> None:
        """Append a row. The row of the last step completes the run.

        If the log continues a run, its first row drops the run's rows of the same and of later steps, with a warning if
        these are all of its rows.

        Args:
            step: number of steps so far, from 1, and larger than that of the row before.
            loss: mean training loss since the row before. None: not measured.
            numbers: other columns: `val_loss`, `val_accuracy`, `lr`, `tokens`, `flops`, `seconds` (by default the time
                since the log was made), or any of your own. Tables and reports show the last value of each column
                `val.NAME`, in which NAME is a metric of an evaluation. None: the row has no value in this column.

        Raises:
            ValueError: `step` is out of range or not above that of the row before, a value is no number, or the name of
                a column is probably a misspelled `loss` or `val_loss`.
        """
        if not 1 <= step <= self.steps:
            raise ValueError(f"step: it must be between 1 and the {self.steps} steps of the run, got {step}")
        if step <= self._last:
            raise ValueError(
                f"step: it must be larger than {self._last}, the step of the row before, got {step}; to continue from "
                "an earlier step, make a new RunLog of the directory"
            )
        given = {"seconds": time.perf_counter() - self._began, **numbers, "step": step, "loss": loss}
        if loss is None and "val_loss" not in given:
            for name in numbers:
                if near := near_names(name, ("loss", "val_loss"), 0.75):
                    raise ValueError(
                        f"{name}: is this a misspelled '{near[0]}'? A row that has neither 'loss' nor 'val_loss' must "
                        "have no column with a similar name; correct the name, or choose another one"
                    )
        parsed = {name: _parsed(name, value) for name, value in given.items() if value is not None}
        losses = {name: parsed[name] for name in ("loss", "val_loss") if name in parsed}
        row = {**dict.fromkeys((*ROW_COLUMNS, *given)), **{name: finite_or_none(x) for name, x in parsed.items()}}
        row |= {f"{name}{NOT_FINITE}": str(x) for name, x in losses.items() if not math.isfinite(x)}
        if self.rows and step <= self.rows[-1]["step"]:
            if step <= self.rows[0]["step"]:
                warn_user(
                    f"{self.directory}: the row of step {step} replaces all {counted(len(self.rows), 'row')} of an "
                    f"incomplete run, up to step {self.rows[-1]['step']}; give every run a directory of its own"
                )
            self._run.rewind(int(step) - 1)
            self.rows = self._run.metrics.rows()
        self._last = int(step)
        self.rows.append({**row, "step": int(step)})
        self._run.metrics.append(self.rows[-1])
        known = self._run.read("fault")
        if not all(map(math.isfinite, losses.values())) and (known is None or known["cause"] == "validation data"):
            self._run.write("fault", asdict(_first_fault(self.rows)))
        if step == self.steps:
            self.finish()

    def finish(self) -> None:
        """Write the result from the last row. A run whose last losses are not finite has diverged.

        Raises:
            ValueError: the run has no row.
        """
        if not self.rows:
            raise ValueError(
                f"{self.directory}: no row was logged, so the run has no result; call row() before the end"
            )
        last = self.rows[-1]
        evaluated = [row for row in self.rows if row["val_loss"] is not None]
        lost = ends_lost(self.rows)
        final = evaluated[-1] if evaluated and not lost else {}
        losses = [row["loss"] for row in self.rows if row["loss"] is not None]
        result = {name: final.get(name) for name in ("val_loss", "val_accuracy")}
        result["metrics"] = {name: value for name, value in final.items() if name.startswith("val.")}
        result |= {"train_loss": losses[-1] if losses and not lost else None, "steps": last["step"]}
        if last["seconds"] is not None:
            result |= {"seconds": last["seconds"], "step_ms": 1e3 * last["seconds"] / last["step"]}
        self._run.write("result", result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.finish()


def _first_fault(rows: Sequence[Mapping[str, Any]]) -> Fault:
    """Return the fault of the first loss that is not finite, without a search for the reason."""
    place = next(i for i, row in enumerate(rows) if is_lost(row, "loss") or is_lost(row, "val_loss"))
    row, training = rows[place], is_lost(rows[place], "loss")
    column, name = ("loss", "training") if training else ("val_loss", "validation")
    finite = [one for one in rows[:place] if one[column] is not None]
    last = f"; it was {finite[-1][column]:.4g} at step {finite[-1]['step']}" if finite else ", its first row"
    text = f"the {name} loss is {row[column + NOT_FINITE]} at step {row['step']}{last}"
    # Validation data are the cause only if training losses were logged, and none of the whole run is NaN or infinite.
    trains = any(one["loss"] is not None for one in rows[: place + 1]) and not any(is_lost(one, "loss") for one in rows)
    cause: FaultCause = "validation data" if trains else "loss not finite"
    return Fault("loss" if training else "evaluation", cause, row["step"], "", text)


def _parsed(name: str, value: Any) -> float:
    """Convert a value, such as a text or a tensor with one element, to a number. Raises ValueError if this fails.

    name: name of the value, for the error.
    """
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        raise ValueError(f"{name}: it must be a number, got {value!r}") from None


def _whole(name: str, value: Any) -> int:
    """Convert a value to an `int`. Raises ValueError, which begins with `name`, if it is not a whole number."""
    number = _parsed(name, value)
    if isinstance(value, (str, bool)) or not number.is_integer():
        raise ValueError(f"{name}: it must be a whole number, got {value!r}")
    return int(number)


def _as_json(name: str, value: Any) -> Any:
    """Return a setting as JSON stores it. Tensors, and arrays and numbers of NumPy, become numbers or lists.

    name: name of the setting, for the error.
    """
    try:
        return json.loads(json.dumps(value, default=lambda own: own.tolist()))
    except (TypeError, AttributeError):
        raise ValueError(f"{name}: it must be a number, text, list or mapping, got {value!r}") from None


def import_run(
    file: str | Path,
    directory: str | Path,
    task: str,
    columns: Mapping[str, str] | None = None,
    **settings: Any,
) -> Path:
    """Make a run directory of a CSV or JSONL file with a row for each logged step.

    Args:
        file: the file. Rows of one step are joined, so that training and validation may have rows of their own.
        directory: directory of the run, see `RunLog`.
        task: name of the task.
        columns: column of a run -> name of this column in the file, as `{"loss": "train/loss"}`. Other columns keep
            their names. With this example a column `loss` of the file itself is dropped. `step` and a loss are
            required. None: all columns keep their names. Reports use `step`, `loss`, `val_loss`, `val_accuracy`, `lr`,
            `seconds`, `tokens`, `flops` and `val.NAME`, in which NAME is a metric of an evaluation.
        settings: `seed`, `lr`, `recipe` and other settings of `RunLog`.

    Returns:
        The directory.

    Raises:
        RecipeError: the file has no steps, or a step that is negative or no whole number, or lacks a column that
            `columns` names, or has a value that is no number, or the directory contains another run.
    """
    named, raws = dict(columns or {}), list(_read(Path(file)))
    known = list(dict.fromkeys(str(name) for raw in raws for name in raw))
    for here, there in named.items():
        if there not in known:
            hint = did_you_mean(there, known, 0.5)
            raise RecipeError(f"{file}: {here}={there} names a column that the file does not have{hint}{_both(known)}")
    kept = {name: name for name in known if name not in named and name not in named.values()} | named
    if "val_loss" not in kept and (near := [one for one in kept if one not in named and _VALIDATION.fullmatch(one)]):
        raise RecipeError(
            f"{file}: there is no column 'val_loss'; is '{near[0]}' this loss? Give it as val_loss={near[0]}, or "
            f"{near[0]}={near[0]} if it is a column of your own"
        )
    rows: dict[int, dict[str, float]] = {}
    for place, raw in enumerate(raws, start=1):
        found = {here: raw[there] for here, there in kept.items() if raw.get(there) not in ("", None)}
        row: dict[str, float] = {}
        for name, value in found.items():
            try:
                row[name] = _parsed(name, value)
            except ValueError as error:
                if name in named or name in _REQUIRED:  # values of other columns may be texts
                    raise RecipeError(f"{file}, row {place}: {error}") from None
        step = row.pop("step", None)
        if step is None or not math.isfinite(step):
            raise RecipeError(
                f"{file}, row {place}: there is no column 'step'; give the name of the column of steps as step=NAME"
                f"{_both(known)}"
            )
        if step < 0 or not step.is_integer():
            raise RecipeError(f"{file}, row {place}: the step must be a whole number >= 0, got {step:g}")
        joined = rows.setdefault(int(step), {})
        # A NaN does not replace a number of an earlier row, because it may stand for a missing value.
        joined |= {name: value for name, value in row.items() if name not in joined or math.isfinite(value)}
    if not any("loss" in row or "val_loss" in row for row in rows.values()):
        raise RecipeError(
            f"{file}: there is no column 'loss' or 'val_loss'; give the name of such a column as loss=NAME"
            f"{_both(known)}"
        )
    first = min(rows)
    shifted = {step + (first < 1): row for step, row in sorted(rows.items())}  # steps of some loops begin at 0
    with RunLog(directory, task, max(shifted), **settings) as log:
        for step, row in shifted.items():
            log.row(step, row.pop("loss", None), **{"seconds": None, **row})
    return Path(directory)


def _both(known: Sequence[str]) -> str:
    """Return two lines for the end of an error: the columns of a file (`known`), and the columns that reports use."""
    return (
        f"\ncolumns of the file: {name_some(known, 30) or 'none'}"
        f"\ncolumns of a run: {', '.join(_KNOWN_COLUMNS)}, and any of your own"
    )


_REQUIRED = ("step", "loss", "val_loss")
"""Columns of an imported file without which a row means nothing: a value that is no number is refused."""


_VALIDATION = re.compile(r"(val|valid|validation|eval|evaluation)([/_ -]?loss)?", re.IGNORECASE)
"""Names of columns that are probably validation losses. Reports do not draw columns with these names."""


def _read(file: Path) -> Iterator[Mapping[str, Any]]:
    if not file.is_file():
        raise RecipeError(f"{file}: there is no such file")
    if file.suffix == ".csv":
        with file.open(encoding="utf-8-sig", newline="") as stream:
            yield from csv.DictReader(stream)
        return
    if file.suffix not in (".jsonl", ".json", ".ndjson"):
        raise RecipeError(f"{file}: it must be a .csv or .jsonl file")
    for place, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise RecipeError(f"{file}, line {place}: malformed JSON ({error})") from None
        if not isinstance(row, dict):
            raise RecipeError(f"{file}, line {place}: it must be an object with the columns of a row")
        if row:
            yield row
