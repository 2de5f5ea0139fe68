"""Run directories, read from their files, and the metrics that runs are compared by.

Unfinished, failed and missing runs are included.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from eigengraft.errors import ArgumentError, counted, name_some

from ..files import JsonLines, files_named, read_object
from ..provenance import provenance_of, variants, without_folders
from .seed_statistics import Target

_Item = TypeVar("_Item")
K = TypeVar("K", bound=Hashable)
Status = Literal["complete", "diverged", "failed", "unfinished", "missing"]
Abscissa = Literal["steps", "seconds", "tokens", "flops"]
"""The quantity along which a metric is drawn."""
ABSCISSAS: dict[Abscissa, str] = {
    "steps": "training steps",
    "seconds": "training seconds",
    "tokens": "training tokens",
    "flops": "training FLOPs",
}
"""Titles of axes.

Tokens are the trained targets, which are tokens of a text, or images. FLOPs are 6 for each weight and target, without
the work of the optimizer.
"""


@dataclass(frozen=True)
class Metric:
    """A metric by which runs are compared.

    key: column of metrics.jsonl and field of result.json.
    title: name for readers.
    sign: 1 if smaller values are better, -1 if larger values are.
    """

    key: str
    title: str
    sign: int

    @property
    def worst(self) -> float:
        """Value that a diverged run has in place of this metric."""
        return self.sign * math.inf


METRICS = {
    "val_loss": Metric("val_loss", "validation loss", 1),
    "val_accuracy": Metric("val_accuracy", "validation accuracy", -1),
}
"""Metrics that have a title of their own, by name."""


def metric_of(name: str, larger: bool = False) -> Metric:
    """Return a metric by its name.

    larger: True if larger values are better. It has no effect on validation loss and validation accuracy.
    """
    return METRICS.get(name) or Metric(name, name, -1 if larger else 1)


TRAINING_LOSS = Metric("loss", "training loss", 1)
"""The metric of runs without a validation loss: the mean loss of the steps since the previous row of metrics.jsonl."""


ROSE = 0.1
"""A run counts as overfitted if its metric has lost again, at the end, at least this share of its improvement.

The improvement is that from the start of the run to the best evaluation. It counts as at least the size of the best
value, because the best evaluation may be the first one. Noise of evaluations is below this share.
"""


@dataclass(frozen=True)
class Run:
    """One run directory.

    labels: label by axis of the study.
    variant: text that distinguishes the run from runs with the same labels that were made differently, and are
        therefore not averaged with it. It has the values in which configuration or provenance differ. It has the
        directory, too, if another run has the same seed. Empty if all runs with these labels may be averaged.
    """

    labels: dict[str, str]
    seed: int
    directory: Path
    variant: str = ""

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_object(self.directory / "config.json")

    @cached_property
    def environment(self) -> dict[str, Any]:
        return read_object(self.directory / "env.json")

    @cached_property
    def provenance(self) -> dict[str, str]:
        """Versions, code and data that produced the numbers. Empty before the run has started."""
        return provenance_of(self.environment)

    @cached_property
    def result(self) -> dict[str, Any]:
        return read_object(self.directory / "result.json")

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the task besides loss and accuracy, at the end of the run, by column `val.NAME`."""
        found: dict[str, float | None] = self.result.get("metrics", {})
        return found

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl. A last line that a kill has cut short is left out."""
        return JsonLines(self.directory / "metrics.jsonl").rows()

    @cached_property
    def diagnostics(self) -> list[dict[str, Any]]:
        """Lines of diagnostics.jsonl. A run writes them at its end, and during training if the experiment asks for
        this.
        """
        return JsonLines(self.directory / "diagnostics.jsonl").rows()

    @cached_property
    def layers(self) -> dict[str, dict[str, float]]:
        """Measures of layers at the end of the run: measure -> layer -> value. NaN is replaced by infinity."""
        rows = [row for row in self.diagnostics if row["stage"] == row["slot"] == ""]
        found: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["step"] == rows[-1]["step"]:
                value = math.inf if row["value"] is None else float(row["value"])
                found.setdefault(row["measure"], {})[row["parameter"]] = value
        return found

    @cached_property
    def error(self) -> str:
        path = fault_file(self.directory)
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def status(self, metric: Metric) -> Status:
        if self.result:
            return "complete" if math.isfinite(self.final(metric)) else "diverged"
        if self.error:
            return "failed"
        return "unfinished" if self.config else "missing"

    def final(self, metric: Metric) -> float:
        """Return the metric at the end of a complete run, the worst value if the run diverged."""
        numbers = {**self.result, **self.metrics}
        return _number(numbers.get("train_loss" if metric is TRAINING_LOSS else metric.key), metric)

    @property
    def data(self) -> tuple[str, str]:
        """Kind of the task and sha256 of its data."""
        return str(self.config.get("task", {}).get("kind", "")), self.provenance.get("data", "")

    @cached_property
    def median_step(self) -> float | None:
        """Median over logged rows of the median milliseconds of their steps. None if no row has this number."""
        found = [float(row["step_ms"]) for row in self.rows if row.get("step_ms")]
        return median(found) if found else None

    @property
    def busy(self) -> bool:
        """True if other load slowed the run.

        Each row of metrics.jsonl has a step time, the median over its steps. There was load during a part of the run if
        this time is above 1.5 times its median over the rows, in more than a tenth of the rows. There was load during
        the whole run if the median over the rows of (step time / processor time of a step) is above 1.25. This is known
        only for runs with one thread on a CPU. Both tests need at least four rows.
        """
        found = sorted(float(row["step_ms"]) for row in self.rows if row.get("step_ms"))
        slowed = len(found) >= 4 and found[-(-9 * len(found) // 10) - 1] > 1.5 * (self.median_step or math.inf)
        alone = self.environment.get("threads") == 1 and self.environment.get("device") == "cpu"
        waits = [row["step_ms"] / row["cpu_ms"] for row in self.rows if alone and row.get("cpu_ms")]
        return slowed or (len(waits) >= 4 and median(waits) > 1.25)

    def seconds(self) -> list[float]:
        """Return the training seconds at every row, corrected for other load of the machine.

        The seconds since the previous row are multiplied by the median step time of the run, and divided by the median
        step time of the row. All are NaN if a row has no seconds.
        """
        total, before, found = 0.0, 0.0, []
        if any(row.get("seconds") is None for row in self.rows):  # runs of other training loops may lack seconds
            return [math.nan for _ in self.rows]
        for row in self.rows:
            own = row.get("step_ms")
            total += (float(row["seconds"]) - before) * ((self.median_step or 1.0) / float(own) if own else 1.0)
            before = float(row["seconds"])
            found.append(total)
        return found

    def abscissas(self, along: Abscissa) -> list[float]:
        """Return the steps, seconds, tokens or FLOPs at every row. Empty if the run has not recorded them."""
        if along == "seconds":
            found = self.seconds()
            return [] if any(map(math.isnan, found)) else found
        key = {"steps": "step", "tokens": "tokens", "flops": "flops"}[along]
        return [float(row[key]) for row in self.rows] if all(key in row for row in self.rows) else []

    def evaluations(self, metric: Metric) -> dict[int, float]:
        """Return the metric of every evaluation by step. For the training loss, see `_training_losses`."""
        rows = (row for row in self.rows if row.get(metric.key) is not None)
        found = {int(row["step"]): _number(row[metric.key], metric) for row in rows}
        return self._training_losses(found) if metric is TRAINING_LOSS else found

    def _training_losses(self, logged: Mapping[int, float]) -> dict[int, float]:
        """Return the means of the training loss over at least `log_every` steps, by their last step.

        A row is also logged at every evaluation. If it is between the others, it and the next row have means over fewer
        steps, so that a curve through all rows would show which batches they have. Such rows are joined here. The last
        mean may have fewer steps.

        logged: mean training loss since the row before, by the step of the row.
        """
        every, last = self.config.get("log_every"), max(logged, default=0)
        every = every if isinstance(every, int) else 1  # runs of other training loops may have any value
        found, joined, began, before = dict[int, float](), 0.0, 0, 0
        for step, mean in logged.items():
            joined = mean if before == began else (joined * (before - began) + mean * (step - before)) / (step - began)
            before = step
            if step - began >= every or step == last:
                found[step], began = joined, step
        return found

    def points(self, metric: Metric, along: Abscissa) -> dict[int, tuple[float, float]]:
        """Return (abscissa, metric) of every evaluation by step. Empty if the run has not recorded the abscissa."""
        places = {int(row["step"]): x for row, x in zip(self.rows, self.abscissas(along), strict=False)}
        return {step: (places[step], y) for step, y in self.evaluations(metric).items()} if places else {}

    def best(self, metric: Metric) -> tuple[int, float] | None:
        """Return the step and the value of the best evaluation, None without an evaluation that is finite."""
        found = [(metric.sign * y, step) for step, y in self.evaluations(metric).items() if math.isfinite(y)]
        return (min(found)[1], metric.sign * min(found)[0]) if found else None

    def rise(self, metric: Metric) -> tuple[int, float] | None:
        """Return the step and the metric of the best evaluation if the last one is much worse, None otherwise.

        It is much worse if the metric has lost more than the share ROSE of its improvement from the start of the run to
        the best evaluation. The improvement counts as at least the size of the metric in the best evaluation. The
        result is also None for the training loss, and for a last evaluation that is not finite.
        """
        best, values = self.best(metric), list(self.evaluations(metric).values())
        if best is None or metric is TRAINING_LOSS or not math.isfinite(values[-1]):
            return None
        first = self.result.get("first_loss") if metric.key == "val_loss" else None
        starts = [metric.sign * y for y in (values[0], first) if y is not None and math.isfinite(y)]
        improved = max(starts, default=-math.inf) - metric.sign * best[1]
        lost = metric.sign * (values[-1] - best[1])
        return best if lost > ROSE * max(improved, abs(best[1])) else None


def fault_file(run: Path) -> Path:
    """Return the file beside the directory `run`. A study records in this file why the run failed."""
    return run.with_name(f"{run.name}.error.txt")


def error_line(text: str) -> str:
    """Return the error at the end of a traceback, with its notes, in one line, without the module of the error's class.
    Of other text, return the last line.
    """
    _, frame, end = text.strip().rpartition('\n  File "')
    lines = end.splitlines()
    own = [line for line in lines[1:] if not line.startswith("    ")] if frame else []
    return re.sub(r"^(?:\w+\.)+(?=\w+(?::|;|$))", "", "; ".join(own)) or lines[-1]


def failure_lines(failed: Mapping[str, str]) -> list[str]:
    """Return a line for each reason for which runs failed, with the name of the first run and the number of others.

    failed: the reason of each failed run, a text as for `error_line`, by the directory of the run.
    """
    lines = []
    for reason, runs in group_by(failed, lambda run: error_line(failed[run])).items():
        others = f" and {counted(len(runs) - 1, 'other run')}" if len(runs) > 1 else ""
        lines.append(f"{runs[0]}{others}: {reason}")
    return lines


def _number(value: object, metric: Metric) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else metric.worst


RESULT_NUMBERS = (
    *("val_loss", "val_accuracy", "train_loss", "steps", "seconds", "step_ms", "optimizer_ms"),
    "state_bytes_per_parameter",
)
"""Numbers of a finished run in tables and in the results of papers and tracks, by their names in result.json."""
MANIFEST, TUNING = "study", "tuning"
"""Name of the file with the plan of a study, and of the directory with the runs of its searches."""
_SHARED = (
    "name",
    "seed",
    "imports",
    "parallel",
    "diagnostics",
    "checkpoint_every",
    "keep_checkpoint",
    "log_every",
    "silence",
)
"""Fields of an experiment in which runs with equal labels may differ. They do not change the averaged numbers."""


@dataclass(frozen=True)
class Tried:
    """One trial of a search: the values that it tried, and the result.

    values: values by dotted path.
    mean: mean of the metric over seeds; None if a run diverged.
    stopped: step at which successive halving stopped a run; None: all runs were completed.
    """

    values: Mapping[str, Any]
    mean: float | None
    stopped: int | None


@dataclass(frozen=True)
class TunedCell:
    """The result of the search in one cell of a study. A cell is one combination of labels, with its runs over seeds.

    cell: name of the cell: axis=label for every axis, separated by commas.
    values: best values, by dotted path.
    edges: field -> "least" or "largest", for fields whose best value is at that end of the tried values.
    tried: everything that was tried, by ascending values.
    rule: sentences that say how values were chosen.
    """

    cell: str
    values: Mapping[str, Any]
    edges: Mapping[str, str]
    tried: tuple[Tried, ...]
    rule: str

    @property
    def best(self) -> Tried:
        """The item of `tried` with the best values."""
        return next(one for one in self.tried if one.values == self.values)

    @property
    def notices(self) -> list[str]:
        """A sentence for each field whose best value is at an end of the tried values. If all runs diverged, one
        sentence that says so.
        """
        if self.best.mean is None:
            return [
                "every value that was tried diverged or failed, so that none is the best; what went wrong is in tuning"
            ]
        ends = ((field, self.values[field], end) for field, end in self.edges.items())
        return [
            f"the best {field}, {value}, is at the {end} end of what was tried; a better one may lie beyond it"
            for field, value, end in ends
        ]


FEW_EVALUATIONS = 5
"""If a run has fewer evaluations than this, reports say that its steps to a value are coarse."""


@dataclass(frozen=True, eq=False)
class Records:
    """All runs of a directory, and how reports compare them.

    Runs are compared along the axis `compare`: two runs are compared if their labels on all other axes are equal.
    Reports show how the metric of each label on this axis differs from that of the label `baseline`. If no run with the
    label `baseline` is among the compared runs, no differences are shown. Two instances of this class are equal only if
    they are the same object, so that the results of functions of a `Records` can be cached.

    name: name of the study or directory.
    description: question of the study.
    compare: name of the axis along which runs are compared.
    baseline: label of the baseline; empty: no differences are shown.
    tuned: results of searches, one for each cell.
    target: value of the metric to reach. Tables have the first step at which each row reaches it. None: no target.
    equal: "steps" if the configurations set the numbers of steps, "seconds" if all runs train for as many seconds as
        the baseline.
    originals: label of the report -> label of the study, for labels that the report shows under other names.
    tuned_in: directory of a run -> file in which the learning rates of its study were tuned. It has only runs of
        studies with a field `tuned_in`.
    selected: labels to which the report is limited, because other runs were left out. A label on an axis other than
        `compare` is written `axis=label`. (): no run was left out.
    """

    name: str
    description: str
    metric: Metric
    compare: str
    baseline: str
    runs: tuple[Run, ...]
    tuned: tuple[TunedCell, ...] = ()
    target: Target | None = None
    equal: str = "steps"
    originals: Mapping[str, str] = field(default_factory=dict)
    tuned_in: Mapping[Path, str] = field(default_factory=dict)
    selected: tuple[str, ...] = ()

    @property
    def notices(self) -> list[str]:
        """Everything that readers of a report must know about these runs, a sentence each."""
        return [*self.apart, *filter(None, [self.without_baseline, self.untuned, self.coarse])]

    @property
    def without_baseline(self) -> str:
        """A sentence that says that the baseline is not among the selected runs; "" if it is, or if there is none."""
        shown = any(run.labels.get(self.compare) == self.baseline for run in self.runs)
        if shown or not self.baseline or not self.selected:
            return ""
        return (
            f"The baseline {self.baseline} is left out, so that no differences from it are shown; select it too, as "
            f"with --only '{self.baseline}'"
        )

    @property
    def apart(self) -> list[str]:
        """A sentence for each combination of labels whose runs are not all averaged.

        Runs are not averaged if they differ in configuration, code or data, or have the same seed.
        """
        found: dict[str, Counter[str]] = {}
        for run in self.runs:
            if run.variant:
                found.setdefault(", ".join(run.labels.values()), Counter())[run.variant] += 1
        return [
            f"The runs of {cell} were made differently, or have the same seed, and are kept apart: "
            + "; ".join(f"{variant} ({counted(count, 'run')})" for variant, count in counts.items())
            for cell, counts in found.items()
        ]

    @property
    def untuned(self) -> str:
        """A warning that some methods were run at a single learning rate, which no search has found.

        Empty if there are no such methods, or if all runs have one recipe. Runs are left out whose study says where its
        learning rates were tuned.
        """
        searched = {one.cell for one in self.tuned if any(path.split(".")[-1] == "lr" for path in one.values)}
        recipes, tried = set[str](), dict[tuple[str, ...], set[float | None]]()
        labels: dict[tuple[str, ...], dict[str, None]] = {}
        for run in (run for run in self.runs if run.config):
            recipe = json.dumps({key: value for key, value in run.config["recipe"].items() if key != "lr"})
            recipes.add(recipe)
            if run.directory in self.tuned_in or cell_name(run.labels) in searched:
                continue
            cell = (recipe, *(text for axis, text in run.labels.items() if axis not in (self.compare, self.rates)))
            tried.setdefault(cell, set()).add(learning_rate(run.config))
            labels.setdefault(cell, {}).setdefault(run.labels[self.compare])
        single = [cell for cell, rates in tried.items() if len(rates) < 2]
        if len(recipes) < 2 or not single:
            return ""
        names = name_some(list(dict.fromkeys(label for cell in single for label in labels[cell])), 8)
        return (
            f"The learning rate was not tuned for {names}: there are runs at one rate only, and others may change the "
            "comparison; a study tries other rates with `tune` or an axis `lr`, and `tuned_in` says where it was done"
        )

    @cached_property
    def axes(self) -> dict[str, list[str]]:
        """Labels of each axis (setting that a study varies, such as "recipe"), in the order of the runs."""
        pairs = dict.fromkeys(pair for run in self.runs for pair in run.labels.items())
        return {axis: [label for other, label in pairs if other == axis] for axis, _ in pairs}

    @cached_property
    def rates(self) -> str:
        """The axis of learning rates; empty if there is none.

        If several axes have learning rates, it is the compared axis if this is one of them, else the last one.
        """
        common = (axis for axis in self.axes if all(axis in run.labels for run in self.runs))
        found = [axis for axis in common if is_rate(axis, self.axes[axis])]
        return self.compare if self.compare in found else found[-1] if found else ""

    @property
    def coarse(self) -> str:
        """A sentence that warns of complete runs with few evaluations, "" if there are none.

        The step at which such a run reaches a value is coarse: it is interpolated between distant evaluations. Runs
        that diverged are not counted, because they may have few evaluations only for having ended early.
        """
        complete = [run for run in self.runs if run.status(self.metric) == "complete"]
        few = [run for run in complete if len(run.evaluations(self.metric)) < FEW_EVALUATIONS]
        if not few:
            return ""
        return (
            f"In {len(few)} of {counted(len(complete), 'complete run')} there are fewer than {FEW_EVALUATIONS} "
            "evaluations, so that the steps to a value are coarse; for more evaluations set eval_every to fewer steps"
        )

    def search(self, labels: Mapping[str, str]) -> TunedCell | None:
        """Return the result of the search that tuned the runs with these labels, or None if nothing was tuned."""
        return next((one for one in self.tuned if one.cell == cell_name(labels)), None)

    def rate_edge(self, labels: Mapping[str, str]) -> str:
        """Return "least" or "largest" if the tuned learning rate of a cell is the least or the largest that was tried.

        Return "" if it is neither, or if no learning rate was tuned.

        labels: the label of the cell on each axis.
        """
        found = self.search(labels)
        return "" if found is None else found.edges.get("lr", "")


def group_by(items: Iterable[_Item], key: Callable[[_Item], K]) -> dict[K, list[_Item]]:
    """Return the items by key. Keys and items keep their order."""
    found: dict[K, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def is_rate(axis: str, labels: Iterable[str]) -> bool:
    """Return True if an axis has learning rates: its name, a dotted path, ends in `lr`, and it has at least two labels,
    all of them finite numbers.
    """
    numbers = [label_number(label) for label in dict.fromkeys(labels)]
    return axis.split(".")[-1] == "lr" and len(numbers) > 1 and all(map(math.isfinite, numbers))


def label_number(label: str) -> float:
    """Return a label as a number, NaN if it is none."""
    try:
        return float(label)
    except ValueError:
        return math.nan


def cell_name(labels: Mapping[str, str]) -> str:
    """Return the name of the cell with these labels: `axis=label` for every axis, separated by commas."""
    return ",".join(f"{axis}={label}" for axis, label in labels.items())


def read_tuned(directory: Path) -> tuple[TunedCell, ...]:
    """Return the results of the searches of the study in `directory` so far."""
    manifest = read_object(directory / f"{MANIFEST}.json")
    return tuple(_tuned(cell, one) for cell, one in manifest.get("tuned", {}).items())


def read_records(
    directory: Path, baseline: str | None = None, only: Iterable[str] = (), labels: Mapping[str, str] | None = None
) -> Records:
    """Return the runs of the study in `directory`. Without a study, return the runs of all studies and single runs
    below it.

    Raises ValueError if no run has started, or if an argument names a label that does not exist.

    baseline, only, labels: the arguments of `Report` with these names, with the same meaning of None.
    """
    manifest = read_object(directory / f"{MANIFEST}.json")
    records = _of_study(manifest, directory) if manifest else _joint(directory)
    if baseline is not None:
        records = _compared_with(records, baseline)
    records = _selected(records, only)
    return _renamed(records, {**_recipe_names(records), **(labels or {})})


def _recipe_names(records: Records) -> dict[str, str]:
    """Return {label of a run: name of its recipe} for runs that `RunLog` has logged.

    The label of such a run is the path of its folder, and reports show the name in its place. A label is left out if
    its runs have several names or none, if runs of another label have the same name, or if the name is itself a label.
    """
    names: dict[str, set[str]] = {}
    for run in (run for run in records.runs if "run" in run.labels):
        logged = run.environment and "data" not in run.provenance
        name = run.config.get("recipe", {}).get("name") if logged else None
        names.setdefault(run.labels["run"], set()).add(name or "")
    counts = Counter(name for own in names.values() for name in own)
    found = {label: name for label, own in names.items() for name in own if len(own) == 1 and counts[name] == 1}
    return {label: name for label, name in found.items() if name and name not in names}


def _quoted(labels: Iterable[str]) -> str:
    """Return labels as text, each in quotes, because labels may contain the commas that separate them."""
    return ", ".join(f"'{label}'" for label in labels)


def _compared_with(records: Records, baseline: str) -> Records:
    """Return the records compared with another baseline.

    baseline: label to compare with. The runs are compared along its axis. `axis=label` chooses between axes that have
        the same label.
    """
    known = records.axes
    axis, equals, label = baseline.partition("=")
    named = bool(equals) and axis in known
    label = label if named else baseline
    axes = [axis] if named else [records.compare, *(other for other in known if other != records.compare)]
    found = [one for one in axes if label in known.get(one, ())]
    if not found or (len(found) > 1 and found[0] != records.compare):
        lists = "; ".join(f"the axis {axis} has {_quoted(labels)}" for axis, labels in known.items())
        what = (
            f"is a label of the axes {' and '.join(found)}; write AXIS={label}"
            if found
            else f"is not a label of any axis: {lists}"
        )
        raise ArgumentError("baseline", f"'{baseline}' {what}")
    return replace(records, compare=found[0], baseline=label)


def _selected(records: Records, only: Iterable[str]) -> Records:
    """Return the records with only some of the runs.

    only: patterns for labels of the compared axis, or `axis=pattern` for another axis. A run is kept if it matches a
        pattern on each axis for which there are patterns.
    """
    patterns: dict[str, list[str]] = {}
    for text in only:
        axis, equals, label = text.partition("=")
        named = equals and axis in records.axes
        patterns.setdefault(axis if named else records.compare, []).append(label if named else text)
    for axis, chosen in patterns.items():
        known = records.axes[axis]
        for pattern in chosen:
            if not any(fnmatchcase(label, pattern) for label in known):
                raise ArgumentError(
                    "only", f"'{pattern}' is not a label of the axis {axis}, whose labels are {_quoted(known)}"
                )
    runs = tuple(
        run
        for run in records.runs
        if all(any(fnmatchcase(run.labels.get(axis, ""), p) for p in some) for axis, some in patterns.items())
    )
    if not runs:
        raise ArgumentError("only", f"no run has {' and '.join(f'{axis}={some}' for axis, some in patterns.items())}")
    cells = {cell_name(run.labels) for run in runs}
    tuned = tuple(one for one in records.tuned if one.cell in cells) if patterns else records.tuned
    if len(runs) == len(records.runs):
        return records
    pairs = dict.fromkeys((axis, run.labels[axis]) for axis in patterns for run in runs)
    selected = tuple(label if axis == records.compare else f"{axis}={label}" for axis, label in pairs)
    return replace(records, runs=runs, tuned=tuned, selected=selected)


def _renamed(records: Records, texts: Mapping[str, str]) -> Records:
    """Return the records with other texts for some labels. Raises ValueError if two labels would become equal."""
    known = {label for labels in records.axes.values() for label in labels}
    for label in texts.keys() - known:
        listed = _quoted(sorted(known))
        raise ArgumentError("labels", f"'{label}' is not a label of the runs, whose labels are {listed}")
    for axis, before in records.axes.items():
        after = [texts.get(label, label) for label in sorted(before)]
        if twice := next((text for text in after if after.count(text) > 1), None):
            alike = " and ".join(f"'{label}'" for label in sorted(before) if texts.get(label, label) == twice)
            raise ArgumentError(
                "labels",
                f"{alike} of {axis} would both be called '{twice}', and their runs would be averaged together; "
                "give them different labels",
            )
    renamed = [{axis: texts.get(label, label) for axis, label in run.labels.items()} for run in records.runs]
    cells = {cell_name(run.labels): cell_name(own) for run, own in zip(records.runs, renamed, strict=True)}
    return replace(
        records,
        runs=tuple(replace(run, labels=own) for run, own in zip(records.runs, renamed, strict=True)),
        baseline=texts.get(records.baseline, records.baseline),
        originals={text: label for label, text in texts.items()},
        tuned=tuple(replace(one, cell=cells.get(one.cell, one.cell)) for one in records.tuned),
    )


def _of_study(manifest: Mapping[str, Any], directory: Path) -> Records:
    planned = (Run(run["labels"], run["seed"], directory / run["directory"]) for run in manifest["runs"])
    runs = _kept_apart(planned, directory)
    study, tuned = manifest["study"], read_tuned(directory)
    metric = metric_of(study["metric"], study["larger"])
    if not tuned and all(run.status(metric) == "missing" for run in runs):
        search = directory / TUNING
        remedy = f"its search may still run; the trials are in {search}" if search.is_dir() else "run the study first"
        raise ValueError(f"{directory}: none of the study's runs has started ({len(runs)} planned); {remedy}")
    target = None if study["target"] is None else Target(**study["target"])
    declared = (study["name"], study["description"], metric, manifest["compare"], manifest["baseline"])
    return Records(*declared, runs, tuned, target, study["equal"], tuned_in=_tuned_in(manifest, directory))


def _tuned_in(manifest: Mapping[str, Any], directory: Path) -> dict[Path, str]:
    """Return where the study in `directory` says that its learning rates were tuned, by the directory of each run."""
    where = manifest["study"]["tuned_in"]
    return {directory / run["directory"]: where for run in manifest["runs"]} if where else {}


def _tuned(cell: str, found: Mapping[str, Any]) -> TunedCell:
    tried = sorted(
        (Tried(**one) for one in found["tried"]), key=lambda one: list(map(value_order, one.values.values()))
    )
    return TunedCell(cell, found["values"], found["edges"], tuple(tried), found["rule"])


def value_order(value: object) -> tuple[bool, float, str]:
    """Return a key that sorts values of a hyperparameter: numbers by size, then all other values by their text."""
    return (False, float(value), str(value)) if isinstance(value, (int, float)) else (True, 0.0, str(value))


def _joint(directory: Path) -> Records:
    """Return the runs of all studies below a directory, and the runs outside of studies. Runs of searches are left out.

    A label of each run says its task, data and length, if these differ between runs. A report therefore compares only
    runs in which they are equal. The result has no baseline, because no study declares one for all runs together. It
    has the results of the studies' searches, and the target if all runs belong to studies with one target.
    """
    manifests = {path.parent: read_object(path) for path in sorted(files_named(f"{MANIFEST}.json", directory))}
    studies = {home: manifest for home, manifest in manifests.items() if "runs" in manifest}
    places = [home / run["directory"] for home, manifest in studies.items() for run in manifest["runs"]]
    places += [
        path.parent
        for path in files_named("config.json", directory)
        if studies.keys().isdisjoint(path.parents) and read_object(path)
    ]
    found = [place for place in sorted(places) if (place / "config.json").is_file()]
    if not found:
        found_none = "contains neither a study nor runs" if directory.exists() else "does not exist"
        raise ValueError(f"{directory}: {found_none}; give the directory of a study or of runs")
    runs = [_single_run(path, directory) for path in found]
    for run, title in zip(runs, _conditions(runs), strict=True):
        if title:
            run.labels["task"] = title
    declared = [manifest["study"] for manifest in studies.values()]
    metrics = {metric_of(study["metric"], study["larger"]) for study in declared}
    metric = metrics.pop() if len(metrics) == 1 else METRICS["val_loss"]
    if not any(row.get("val_loss") is not None for run in runs for row in run.rows):
        metric = TRAINING_LOSS  # other training loops may record no validation
    cells, tuned = {run.directory: cell_name(run.labels) for run in runs}, list[TunedCell]()
    for home, manifest in studies.items():
        own = {cell_name(run["labels"]): cells.get(home / run["directory"]) for run in manifest["runs"]}
        tuned += (replace(one, cell=cell) for one in read_tuned(home) if (cell := own.get(one.cell)))
    targets = [study["target"] for study in declared]
    alone = any(studies.keys().isdisjoint(run.directory.parents) for run in runs)
    one_target = bool(targets) and not alone and targets[0] is not None and all(x == targets[0] for x in targets)
    return Records(
        directory.name,
        "",
        metric,
        "run",
        "",
        _kept_apart(runs, directory),
        tuple(tuned),
        Target(**targets[0]) if one_target else None,
        tuned_in={run: where for home, own in studies.items() for run, where in _tuned_in(own, home).items()},
    )


def _conditions(runs: Sequence[Run]) -> list[str]:
    """Return a title for each run with its task, data and length. The titles are "" if these are equal for all runs."""
    configs = [without_folders(run.config) for run in runs]
    found = [
        {"steps": config.get("steps"), "task": config.get("task"), "data": run.data[1]}
        for run, config in zip(runs, configs, strict=True)
    ]
    if all(one == found[0] for one in found):
        return ["" for _ in found]
    titles = ["" for _ in found]
    for kind in {run.data[0] for run in runs}:
        places = [place for place, run in enumerate(runs) if run.data[0] == kind]
        for place, name in zip(places, variants([found[place] for place in places]), strict=True):
            titles[place] = ", ".join(filter(None, (kind, name)))
    return titles


def _single_run(path: Path, directory: Path) -> Run:
    seed = read_object(path / "config.json").get("seed", 0)
    name = path.relative_to(directory).as_posix() if path != directory else path.name
    return Run({"run": re.sub(r"/?seed-\d+$", "", name) or directory.name}, seed, path)


def _kept_apart(runs: Iterable[Run], directory: Path) -> tuple[Run, ...]:
    """Return the runs with their field `variant` set, which keeps runs apart that must not be averaged.

    These are runs with equal labels that differ in configuration or provenance, or that have the same seed.

    directory: directory of all runs; a variant may contain the path of a run relative to it.
    """
    all_runs = list(runs)
    cells = group_by((run for run in all_runs if run.environment), lambda run: tuple(run.labels.items()))
    found = dict[Path, str]()
    for cell in cells.values():
        made = [
            {**{k: v for k, v in without_folders(run.config).items() if k not in _SHARED}, **run.provenance}
            for run in cell
        ]
        found |= {run.directory: name for run, name in zip(cell, variants(made), strict=True)}
    named = [replace(run, variant=found.get(run.directory, "")) for run in all_runs]
    seeds = Counter(_seed_in_row(run) for run in named)
    return tuple(
        replace(run, variant=", ".join(filter(None, (run.variant, run.directory.relative_to(directory).as_posix()))))
        if seeds[_seed_in_row(run)] > 1
        else run
        for run in named
    )


def _seed_in_row(run: Run) -> tuple[object, ...]:
    """Return the labels, the variant and the seed of a run. At most one run of a row of a table has this key."""
    return (*run.labels.items(), run.variant, run.seed)


def learning_rate(config: Mapping[str, Any]) -> float | None:
    """Return the peak learning rate of a run: that of the experiment if it has one, else that of the recipe."""
    own: float | None = config.get("lr")
    return config.get("recipe", {}).get("lr") if own is None else own
