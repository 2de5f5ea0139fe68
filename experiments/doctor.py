"""The diagnosis of a run from its directory: what went wrong, at which step, in which layer, why, and what to do.

Three files say what happened. fault.json has the first value that was not finite, metrics.jsonl the loss and norms of
layers over the run, and diagnostics.jsonl the norms of all layers at the end. The task is needed only for checks of the
first batch (first_batch.py). They check inputs, targets, initial outputs, the place at which a gradient becomes 0, and
if a loss is that of a uniform guess. The task is loaded for them if its data are on this machine. Nothing is trained,
and no file is changed.

The limits below separate healthy runs from runs that went wrong. There were three groups of healthy runs: those of
tests/experiments/test_doctor.py, those of `eigengraft demo`, and 130 short runs of twelve recipes at up to 16 times
their learning rates. The tasks of the last group were digits, text, sequences, a differential equation and three tasks
of users. The limits are wide: a false alarm costs more trust than a missed fault.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn

from eigengraft import Optimizer, load_recipe
from eigengraft.errors import RecipeError, counted, name_some, near_path
from eigengraft.optimizers.inspect.table import USUAL
from eigengraft.optimizers.recipe.routing import describe_model

from .files import files_named, read_object
from .first_batch import FirstBatch, GradientEnd, first_batch, gradient_end, loss_of_frequencies, relative_size
from .reports.records import MANIFEST, METRICS, TRAINING_LOSS, TUNING, Metric, Run, error_line, group_by, read_records
from .run_log import ends_lost, is_lost, rows_with
from .tasks.base import generator, number_classes
from .training.divergence import WORSE, Fault, FaultCause, worse_than_at_first
from .training.experiment import Experiment, load_experiment
from .training.rundir import RunDirectory

LARGE_STEP = 0.3
"""Ratio |update| / |weight| of all layers together at or above which the learning rate counts as too high.

Healthy ratios are those of `USUAL`. At ratio 1 an update is as large as the weights.
"""
TARGET = 0.03
"""Ratio |update| / |weight| of the first step at which advice about the learning rate aims.

The update of the first step is proportional to the learning rate, so the ratio determines the advised rate. Runs of 60
steps of adamw, soap_fitted, muon and shampoo on digits and on two tables learned well at all ratios from 0.03 to 0.28.
The smallest of them is the safest in long runs.
"""
GRADIENT_TARGET = 0.01
"""The same as `TARGET`, for recipes whose updates are proportional to gradients. It is smaller, because momentum makes
such updates larger in the steps after the first, and the gradients of a model may grow while it learns."""
REMARKABLE = 3
"""Smallest factor by which advice changes the learning rate. Advice also uses this factor if the sizes of updates are
healthy and therefore determine no other factor."""
FAR = 10
"""A learning rate counts as far from that of its recipe if it is at least this many times larger or smaller. Advice
then names the rate of the recipe."""
HEALTHY_STEP = 0.03
"""A layer is reported for far too large updates only if the median ratio |update| / |weight| of the other layers is
below this value.
"""
SMALL_STEP = 1e-6
"""Ratio |update| / |weight| of all layers together below which the learning rate of a stalled run counts as too low.

Rounding in float32 changes a number by up to 6e-8 of its size. A thousand steps of ratio 1e-6 change the weights by at
most 0.1 %.
"""
LEAST_FALL = 0.02
"""Least fall of a healthy loss, as a fraction of the first loss. A run whose loss falls by less counts as stalled. Runs
that learn exceed this value by far.
"""
EXPLODED = 10
"""A layer counts as exploding if its weight norm has grown to this many times its first value, and has grown this many
times as much as the median of the other layers.
"""
EXPLODED_ALONE = 10
"""Factor by which the limits of `EXPLODED` are multiplied if nothing else is wrong with the run, because layers with
small initial weights grow in healthy runs too.

The factor is not used for a layer that had the largest update of all layers relative to its weights, if this update was
as large as the weights and updates of the other layers were healthy (`HEALTHY_STEP`)."""
RISEN = 0.9
"""A run counts as having got worse if, at the end, its loss has risen again by this fraction of its earlier fall.

Not less than 0.9: in short runs with a high but usable learning rate, the loss rose by up to 0.8 of its fall and then
fell again.
"""
BURST = 3
"""Ratio to the first loss from which a temporary rise of the loss in a single row is reported. A rise in two rows is
reported from the smaller ratio `WORSE`, because one row may be a batch of unusual examples."""
NOISE = 5
"""A temporary rise of the loss is reported only if it is at least this many times the usual difference between
successive rows."""
GROWN = 10
"""The learning rate counts as too high if most matrices have grown to this many times their first norm, and the loss
hardly fell or rose far above its first value (`_is_untroubled`). For a first norm below a usual norm, the usual norm
counts. Growth alone is no fault: in runs of 200 steps of muon, soap_fitted and anvil on digits, norms grew to 12 to 96
times their first value, and accuracies were 0.96 to 0.99."""
CHANCE = 0.01
"""Tolerance, as a fraction of the loss of a uniform guess. A validation loss that is never lower than that loss by more
than this fraction counts as never below it, because the loss of a model that only guesses varies a little."""
LEAST_RISEN = 0.1
"""A rise of the loss is reported only if the loss fell before by at least this fraction of the first loss. A smaller
fall may be noise.
"""
POOR = 0.9
"""Accuracy at or above which inputs that are not normalized are no finding, because the model learns in spite of them.
Without an accuracy, the last loss must be at most half of that of a guess.
"""
BEGAN = 100
"""A layer is named as the one in which a fault began only if its first update, relative to its weights, is at least
this many times as large as that of every other layer."""

QUICK_DATA = 2**26
"""Largest size of data, in bytes, that `is_quick` accepts. Loading 64 MiB takes about a second."""
QUICK_STEP = 1e3
"""Largest time of a step, in milliseconds, that `is_quick` accepts."""
QUICK_STUDY = 1.0
"""Seconds after which `diagnose_study` loads no further task."""

FindingKind = Literal[
    FaultCause,
    "inputs",
    "targets",
    "loss",
    "one class",
    "exploding layer",
    "dead layer",
    "stalled",
    "overfitting",
    "worse than guessing",
]


@dataclass(frozen=True)
class Explanation:
    """Text for all findings of one kind.

    usual: usual causes.
    remedy: things to do, in the order in which they are tried, or a function that returns them for a run. The text that
        a function returns names only settings that the run has, and no setting that already has the advised value.
    symptom: True if such a fault may be a symptom of a faulty layer or of the initial weights. Layers and initial
        weights are then checked too, and findings about them come first.
    """

    usual: str
    remedy: str | Callable[[Record], str]
    symptom: bool = False


_HEALTHY = " to ".join(f"{end:g}" for end in USUAL["update_ratio"])
"""Text of the usual range of |update| / |weight|, such as "0.0001 to 0.1"."""

EXPLANATIONS: Mapping[FindingKind, Explanation] = {
    "data": Explanation(
        "a row of the data has NaN or infinity, from a missing value or from a division by a spread of 0",
        "remove or fill the rows named above; `eigengraft.testing.check_task` finds them before a run",
    ),
    "validation data": Explanation(
        "rows that only validation reads have NaN, or are scaled differently from the training rows",
        "check the validation rows for NaN, and scale them with the numbers of the training rows; in an imported log, "
        "leave missing values empty",
    ),
    "labels": Explanation(
        "classes are numbered from 1, an extra class means `ignore`, or the model has too few outputs",
        number_classes(-1),
    ),
    "initialization": Explanation(
        "initial weights are too large for the width of their layer, or are not finite",
        lambda run: f"scale initial weights by 1 / sqrt(inputs), or start the output layer at 0{_init(run)}",
    ),
    "learning rate": Explanation(
        "the learning rate is too high for this recipe, or rises too fast",
        lambda run: _alone(run) + _lower(run) + _further(run),
        symptom=True,
    ),
    "inputs": Explanation(
        "columns of the data have large, tiny or different units and were not normalized, or were read wrongly",
        "if the numbers were read correctly, subtract from each column its mean over the training rows, and divide it "
        "by its standard deviation there; do the same in validation rows",
    ),
    "targets": Explanation(
        "targets of a regression have a large mean or unit and were not normalized",
        "subtract from the targets their mean over the training rows, and divide them by their standard deviation "
        "there; do the same in validation rows, and undo it in predictions",
    ),
    "loss": Explanation(
        "the model ends with a softmax, although the loss has one, or targets have an axis more or less than outputs",
        "remove the softmax at the end of the model, or give outputs and targets the same shape; "
        "`eigengraft.testing.check_task` finds both before a run",
    ),
    "one class": Explanation(
        "another column was read as the class, or the rows are sorted by class and were split without a shuffle",
        "read the column of the classes, and shuffle the rows before they are split; "
        "`eigengraft.testing.check_task` finds this before a run",
    ),
    "precision": Explanation(
        "activations or logits exceed the range of the low precision, which float32 still holds",
        "compute the layer with large numbers in float32, normalize its inputs, or remove `precision`",
    ),
    "failed root": Explanation(
        "a statistic is nearly singular or badly scaled, so that its inverse root cannot be computed",
        lambda run: (
            f"raise `eps` of the root solver{_solver(run)}{'' if _is_slow(run) else ', lower lr'}, or raise "
            "`failure.roots`"
        ),
    ),
    "model": Explanation(
        "an operation of the model or of the loss has no finite value or derivative at some input: a root or norm of "
        "0, a log of 0",
        "add a small number inside the root, log or division of the layer, or of the loss",
        symptom=True,
    ),
    "loss not finite": Explanation(
        "the learning rate is too high, the data have NaN or infinity, or an operation of the model overflows",
        "check the rows of the batch of this step with `torch.isfinite`; if they are finite, divide lr by 10, or clip "
        "gradients; in an imported log, leave missing values empty",
        symptom=True,
    ),
    "error": Explanation(
        "the code of the task, the model, a callback or a stage raised the error, or the recipe does not fit the model",
        "do what the message says; `eigengraft.testing.check_task` finds faults of a task before a run, and "
        "`eigengraft --debug train` prints where the error was raised",
    ),
    "exploding layer": Explanation(
        "this layer has a learning rate, an initial size or a gain that is far from that of the other layers",
        lambda run: f"{_lower_layer(run)}add a norm before it, or give it {_decay(run)}",
    ),
    "dead layer": Explanation(
        "its initial weights, its inputs or the weights of the next layer are 0, the loss does not use its outputs, "
        "they are detached, or the activation after it is flat at all its inputs (ReLU with very negative inputs, Tanh "
        "or Sigmoid with very large ones)",
        lambda run: _revive(run),
    ),
    "stalled": Explanation(
        "the learning rate is far too low or too high, the run is too short, labels do not belong to inputs, or "
        "gradients are cut off",
        lambda run: _raise(run),
        symptom=True,
    ),
    "overfitting": Explanation(
        "the model has learned the training rows by heart: it is large, or trains long, for so few rows; if validation "
        "was never much better than a guess, labels may belong to other inputs",
        lambda run: (
            f"train for fewer steps, use more data, {_decay(run)} or dropout; compare the best evaluation, not the last"
        ),
    ),
    "worse than guessing": Explanation(
        "labels are noise or belong to other inputs, validation rows are unlike training rows, or the model overfits",
        "check the labels of some rows by eye, and that training and validation rows are made alike; train for fewer "
        "steps",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong in a run.

    kind: name of the fault or of its cause, such as "stalled" or "learning rate".
    step: step at which the fault was seen; None: the finding is about the whole run.
    layer: name of the layer, or of its state; "" for none.
    text: a sentence that describes the observation.
    usual: usual causes of findings of this kind.
    remedy: things to do in this run, in the order in which they are tried.
    """

    kind: FindingKind
    step: int | None
    layer: str
    text: str
    usual: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The findings of the doctor about a run. `print` shows them. `bool(diagnosis)` is False if there are no findings.

    directory: directory of the run.
    findings: faults of the run, the first cause first; () if nothing was found.
    notes: checks that were not possible, with the reason.
    unfinished: a sentence about how far a run without a result has come; "" if the run has ended.
    """

    directory: Path
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    unfinished: str = ""

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        nothing = "unfinished, nothing found so far" if self.unfinished else "nothing found"
        nothing += ", but not everything was checked" if self.notes else ""
        lines = [f"{self.directory}: {self.findings[0].kind if self.findings else nothing}"]
        lines += [f"\nunfinished: {self.unfinished}"] if self.unfinished else []
        for number, one in enumerate(self.findings, start=1):
            step = "" if one.step is None else f", step {one.step}"
            lines += [f"\n{number}. {one.kind}{step}{one.layer and f', {one.layer}'}", f"   seen:    {one.text}"]
            lines += [f"   usually: {one.usual}", f"   do:      {one.remedy}"]
        return "\n".join([*lines, *(f"\nnot checked: {note}" for note in self.notes)])

    def records(self) -> dict[str, Any]:
        """Return the fields of this diagnosis as plain data."""
        return {**asdict(self), "directory": str(self.directory), "notes": list(self.notes)}


@dataclass(frozen=True)
class Record:
    """The files of a run, and numbers computed from them. The checks of this module compare these numbers.

    run: the files: configuration, rows of metrics, diagnostics and result.
    fault: the first fault that the run recorded.
    with_task: False if the task must not be loaded.
    """

    run: Run
    fault: Fault | None
    with_task: bool = True

    @classmethod
    def read(cls, directory: Path, with_task: bool = True) -> Record:
        """Read the directory of a run. Raises RecipeError for any other directory."""
        run = Run({}, 0, directory)
        if not directory.is_dir():
            kind = "is a file, not a directory" if directory.exists() else "does not exist"
            hint = near_path(directory) or "; give the directory of a run"
            raise RecipeError(f"{directory}: {kind}{hint}")
        if not run.config:
            runs = sorted(str(path.parent) for path in files_named("config.json", directory))[:3]
            hint = f"; choose one of its runs, such as {', '.join(runs)}" if runs else "; give the directory of a run"
            raise RecipeError(f"{directory}: has no config.json, which every run has{hint}")
        fault = read_object(directory / "fault.json")
        return cls(run, Fault(**fault) if fault else None, with_task)

    @cached_property
    def initial(self) -> tuple[Experiment, nn.Module] | Exception:
        """The experiment, and its model with the initial weights, or the error if the task cannot be loaded."""
        if not self.with_task:
            return LookupError("the task was not loaded")
        try:
            experiment = load_experiment(dict(self.run.config))
            return experiment, experiment.task.new_model(experiment.seed)
        except Exception as error:  # code of the user may raise any error
            return error

    @cached_property
    def start(self) -> FirstBatch | Exception:
        """Loss and other numbers about the first batch, or the error if the task or its data cannot be loaded."""
        if isinstance(self.initial, Exception):
            return self.initial
        try:
            return first_batch(*self.initial)
        except Exception as error:  # code of the user may raise any error
            return error

    @cached_property
    def guess(self) -> float:
        """Validation loss of the better of two guesses that do not depend on the inputs: the class frequencies, and
        equal probabilities of all classes. Infinity if the task has no classes or cannot be loaded.
        """
        if self.imported or isinstance(self.initial, Exception) or isinstance(self.start, Exception):
            return math.inf
        if self.start.classes < 2:
            return math.inf
        try:
            return min(self.start.guess, loss_of_frequencies(self.initial[0], self.start.classes))
        except Exception:  # a loss of the user may accept only outputs of the model
            return self.start.guess

    def gradient_end(self, parameter: str) -> GradientEnd:
        """Return the place at which the gradient of a parameter becomes 0 in the first batch. If none is found, both
        texts of the result are empty.
        """
        if isinstance(self.initial, Exception):
            return GradientEnd()
        try:
            return gradient_end(*self.initial, parameter)
        except Exception:  # code of the user may raise any error
            return GradientEnd()

    @cached_property
    def shares(self) -> Mapping[str, tuple[float, bool]]:
        """Initial norms of layers in proportion to usual norms: layer -> (share, True if the layer is a matrix).

        The share is the initial norm divided by a usual norm, but at most 1. The usual norm is that of entries with
        variance 1 / (3 inputs), as torch initializes matrices. A vector counts as having one input. Empty if the task
        cannot be loaded.
        """
        if isinstance(self.initial, Exception):
            return {}
        try:
            return {name: (min(1.0, relative_size(p)), p.ndim > 1) for name, p in self.initial[1].named_parameters()}
        except Exception:  # parameters without values, as those of lazy layers, have no norm
            return {}

    def share(self, name: str) -> float:
        """Return the norm that a layer had at the start, divided by a usual norm, but at most 1.

        The usual norm is that of weights that torch has initialized, as in `shares`. If the task cannot be loaded, it
        is the median over all layers of the norms at the start. Returns 1 if the norm of the layer is not known.
        """
        if name in self.shares:
            return self.shares[name][0]
        norms, growths = (self.run.layers.get(measure, {}) for measure in ("weight_norm", "weight_growth"))
        first = {own: norms[own] / growth for own, growth in growths.items() if 0 < growth < math.inf and own in norms}
        return min(1.0, first[name] / median(first.values())) if name in first else 1.0

    def numbers(self, column: str) -> list[float]:
        """Return the values of a column of metrics, without rows that lack the column."""
        return [row[column] for row in self.run.rows if row.get(column) is not None]

    @property
    def recipe_rate(self) -> float | None:
        """The learning rate of the recipe; None if the configuration has no recipe, as that of an imported run."""
        rate = _setting(self.run.config, "recipe", "lr")
        return rate if isinstance(rate, (int, float)) else None

    @property
    def rate(self) -> float | None:
        """The peak learning rate of the run: that of the experiment or else that of the recipe; None: not known."""
        rate = _setting(self.run.config, "lr")
        if isinstance(rate, (int, float)):
            return rate
        return None if self.imported else self.recipe_rate

    @cached_property
    def grows_with_gradients(self) -> bool:
        """True if the updates of the recipe are proportional to gradients, or nearly."""
        return not self.imported and _grows_with_gradients(self.run.config.get("recipe"))

    @property
    def target(self) -> float:
        """The ratio |update| / |weight| at which advice about the learning rate aims."""
        return GRADIENT_TARGET if self.grows_with_gradients else TARGET

    @property
    def has_gradients(self) -> bool:
        """True if a gradient other than 0 was measured."""
        return any(self.numbers("gradient_norm"))

    @property
    def first_step(self) -> float | None:
        """The ratio |update| / |weight| that the first step would have at the peak learning rate. None if no ratio was
        measured.

        This is the median over matrices of their ratios in the first step. The ratio of a matrix that begins small is
        multiplied by its share (`shares`), because such a matrix has large ratios in healthy runs too. If the task
        cannot be loaded, it is the median over all layers. If the run has recorded no layers, it is the ratio in the
        first row of metrics that has one. A ratio of step k of a warm-up is multiplied by warmup_steps / k, because
        step k has the fraction k / warmup_steps of the peak learning rate.
        """
        rows = [(row["step"], row["update_ratio"]) for row in self.run.rows if row.get("update_ratio") is not None]
        layers = self.run.layers.get("update_ratio_first", {})
        matrices = {name: share for name, (share, matrix) in self.shares.items() if matrix and name in layers}
        firsts = [layers[name] * share for name, share in matrices.items()] or [*layers.values()]
        measured = [(1, median(firsts))] if firsts else rows
        if not measured:
            return None
        step, ratio = measured[0]
        warmup = 0 if self.imported else _setting(self.run.config, "schedule", "warmup_steps") or 0
        return ratio * max(1.0, warmup / step)

    @property
    def first_is_large(self) -> bool:
        """True if the first step would be too large at the peak learning rate, for most layers (`first_step`)."""
        return (self.first_step or 0.0) >= LARGE_STEP

    @property
    def imported(self) -> bool:
        """True if another training loop logged the run. Such a run has no record of the identity of its data set."""
        return bool(self.run.environment) and "data" not in self.run.provenance

    @property
    def ended_by_fault(self) -> bool:
        """True if a recorded fault ended the run.

        This is so if the run has a fault and no result. A run that another training loop logged (`imported`) always
        has a result. A fault has ended such a run if its last training or validation loss is NaN or infinite.
        """
        return self.fault is not None and (ends_lost(self.run.rows) if self.imported else not self.run.result)

    @property
    def unfinished(self) -> str:
        """A sentence about how far the run has come and how to continue it.

        It is "" if the run has a result, another training loop logged it, or an error or a recorded fault ended it.
        """
        if self.run.result or self.run.error or self.imported or self.ended_by_fault:
            return ""
        steps = self.run.rows[-1]["step"] if self.run.rows else 0
        seen = f"the last row of metrics is that of step {steps}" if steps else "there is no row of metrics"
        try:
            saved = max(RunDirectory(self.run.directory).checkpoints(), default=0)
        except RecipeError as error:
            advice = str(error)
        else:
            where = f"from the checkpoint of step {saved}" if saved else "from the start, as there is no checkpoint"
            advice = f"if it was stopped, `eigengraft train {self.run.directory}` continues it {where}"
        return f"{seen}, of {self.run.config.get('steps')} steps; the run was stopped or still trains; {advice}"

    @property
    def loss(self) -> Metric:
        """The training loss. If no row has one, as in some imported runs, the validation loss."""
        return TRAINING_LOSS if self.numbers("loss") else METRICS["val_loss"]

    @property
    def losses(self) -> list[float]:
        """Losses of all rows that have one."""
        return self.numbers(self.loss.key)

    @property
    def first_loss(self) -> float | None:
        """Loss of the first step if the result of the run has it, else the first of `losses`; None without losses."""
        first = self.run.result.get("first_loss")
        return next(iter(self.losses), None) if first is None else first

    @property
    def last_loss(self) -> float | None:
        """Median loss over the last quarter of the rows; None without rows."""
        return next(reversed(self.quarters), None)

    @property
    def quarters(self) -> list[float]:
        """Median loss in each quarter of the rows of the run. If there are fewer than four losses, these losses."""
        losses = self.losses
        size = max(1, len(losses) // 4)
        ends = range(len(losses), max(0, len(losses) - 4 * size), -size)
        return [median(losses[end - size : end]) for end in reversed(ends)]

    @property
    def largest_step(self) -> float | None:
        """Largest measured ratio of an update to the weights; None if none was measured.

        This is the largest of three numbers: the largest ratio |update| / |weight| over all layers together at a logged
        step, the median over layers of each layer's largest ratio, and the median over layers of their ratios in the
        first step. The last number may exceed the second, because layers that begin with weights of 0 have no ratio in
        the first step.
        """
        measures = [self.run.layers.get(name, {}).values() for name in ("update_ratio_peak", "update_ratio_first")]
        return max([*self.numbers("update_ratio"), *(median(own) for own in measures if own)], default=None)

    def of_others(self, measure: str, name: str) -> float | None:
        """Return the median of a measure at the end of the run, over all layers except the layer `name`. Return None
        if no other layer has the measure.

        measure: name of a measure of layers, such as "weight_growth".
        """
        others = [value for layer, value in self.run.layers.get(measure, {}).items() if layer != name]
        return median(others) if others else None

    @cached_property
    def peak(self) -> tuple[str, float, float]:
        """Three values: the layer with the largest ratio of an update to its weights, this ratio, and the median ratio
        of the other layers. The layer is "" if none was measured. The median is NaN if there are no other layers.
        """
        peaks = self.run.layers.get("update_ratio_peak", {})
        name = max(peaks, key=peaks.__getitem__, default="")
        typical = self.of_others("update_ratio_peak", name)
        return name, peaks.get(name, 0.0), math.nan if typical is None else typical

    @cached_property
    def began(self) -> tuple[str, str]:
        """The layer in which a fault began, and a clause about this layer; both are "" if there is no such layer.

        It is the layer whose first update, relative to its weights, was far larger than that of every other layer. This
        update must also be large compared with usual initial weights (`share`), because a layer that begins nearly at 0
        has a large first ratio in healthy runs too.
        """
        firsts = self.run.layers.get("update_ratio_first", {})
        name = max(firsts, key=firsts.__getitem__, default="")
        others = max((ratio for layer, ratio in firsts.items() if layer != name), default=math.inf)
        first = firsts.get(name, 0.0)
        if first < BEGAN * others or first * self.share(name) < max(LARGE_STEP, EXPLODED * others):
            return "", ""
        text = f"; the first update of {name} had {first:.3g} times the norm of its weights, and those of the other"
        return name, f"{text} layers at most {others:.3g} times"

    @property
    def fastest(self) -> str:
        """The layer with by far the largest ratio of an update to its weights; "" if no layer stands out."""
        name, peak, typical = self.peak
        return name if peak >= LARGE_STEP and peak >= EXPLODED * typical else ""


def diagnose_all(directory: str | Path, with_task: bool = True) -> list[Diagnosis]:
    """Find the faults of all runs of a study, or of all runs below a directory, as `diagnose` does.

    Runs that have not started and trials of a search are left out. While no run of a study has started, the trials of
    its search are diagnosed instead.

    Args:
        directory: directory of a study, or of several studies or runs.
        with_task: as in `diagnose`.

    Returns:
        A diagnosis for each run, in the order of the study; or for each trial, in the order of their directories.

    Raises:
        ValueError: there is no run.
    """
    home = Path(directory)
    search, manifest = home / TUNING, read_object(home / f"{MANIFEST}.json")
    if not any((home / run["directory"] / "config.json").is_file() for run in manifest.get("runs", ())):
        home = search if manifest and any(files_named("config.json", search)) else home
    return [diagnose(run.directory, with_task) for run in read_records(home).runs if run.config]


def diagnose_study(directory: str | Path) -> list[Diagnosis]:
    """Find the faults of all runs of a study, as `diagnose_all` does, in about a second.

    The task of a run is loaded only if this is quick (`is_quick`), and fewer than QUICK_STUDY seconds have passed. The
    first runs of all cells are diagnosed first, so that their tasks are loaded. Diagnoses of runs whose task was not
    loaded have a note that says so.

    Returns a diagnosis for each run that has started, in the order of the study.
    """
    runs = [run for run in read_records(Path(directory)).runs if run.config]
    cells = group_by(runs, lambda run: tuple(run.labels.values())).values()
    found, start, elapsed = dict[Path, Diagnosis](), perf_counter(), 0.0
    for run in filter(None, chain.from_iterable(zip_longest(*cells))):
        found[run.directory] = diagnose(run.directory, is_quick(run) and elapsed < QUICK_STUDY)
        elapsed = perf_counter() - start
    return [found[run.directory] for run in runs]


def is_quick(run: Run) -> bool:
    """Return True if the task of a run can be loaded again quickly: the data have at most QUICK_DATA bytes, the run was
    on the CPU, its steps took at most QUICK_STEP milliseconds, and its batches were not split into micro-batches.
    """
    size, step_ms = run.environment.get("data", {}).get("size", math.inf), run.result.get("step_ms", math.inf)
    undivided = run.config.get("device") == "cpu" and run.config.get("accumulate") is None
    return bool(undivided and size <= QUICK_DATA and step_ms <= QUICK_STEP)


def diagnose(directory: str | Path, with_task: bool = True) -> Diagnosis:
    """Find the faults of a run from the files in its directory.

    Args:
        directory: directory of a run that has ended, was stopped, or still trains.
        with_task: False to load neither task nor data, which takes milliseconds. The first batch is then not checked.

    Returns:
        The findings, the first cause first, and the checks that were not possible.

    Raises:
        RecipeError: the directory is not that of a run.
    """
    record, notes = Record.read(Path(directory), with_task), list[str]()
    found = [*_of_fault(record)]
    found += [one for one in _of_end(record) if one.kind not in {other.kind for other in found}]
    if not found and not record.run.rows and not record.run.result:
        notes.append("losses and layers, as the run has no row of metrics yet")
    elif record.imported and not any(row.get("weight_growth_largest_layer") for row in record.run.rows):
        notes.append(
            "data, initial outputs, roots and layers, as the run was logged by another training loop, which records "
            f"none of them; its losses were checked ({counted(len(record.run.rows), 'row')})"
        )
    if not found or EXPLANATIONS[found[0].kind].symptom:
        start = () if record.imported else _first_batch(record, notes, sick=bool(found))
        dead = [*_dead(record)]
        layers = [*_exploding(record, sick=bool(found))]
        own = any(_route(record, one.layer) for one in layers)  # the learning rate is too high for one layer only
        if layers and not found and not own and (large := _step_size(record)):
            found = [Finding("learning rate", None, record.fastest, large.removeprefix("; "))]
        if not found or found[0].kind != "learning rate" or own:
            first = [*layers, *found]
        else:  # if updates of all layers were too large, layers stand out that weight decay does not shrink
            first = found if record.first_is_large else [*found, *layers]
        if dead:  # without gradients no learning rate lets the loss fall
            first = [one for one in first if one.kind != "stalled"]
        found = [*start, *dead, *first]
    elif found[0].kind == "initialization":  # huge inputs make outputs overflow too
        inputs = [one for one in _first_batch(record, notes, sick=True) if one.kind == "inputs"]
        cause, batch = found[0], record.start
        if not cause.layer and isinstance(batch, FirstBatch) and batch.large_layer:
            cause = replace(cause, layer=batch.large_layer, text=cause.text + batch.large_text)
        found = [*inputs, cause, *found[1:]]
    found = [one for one in found if not _has_other_cause(record, one, {other.kind for other in found})]
    if not found:
        found += _generalization(record)
    if not any(one.kind == "failed root" for one in found):
        found += _failed_roots(record)
    found = [_with_origin(record, one) for one in found]
    explained = [_explained(record, one) for one in found]
    if found and found[0].kind == "exploding layer" and _route(record, found[0].layer):
        after = f"first do what is advised for {found[0].layer} above; only if the loss does not fall after that, "
        explained = [
            replace(one, remedy=f"{after}{one.remedy}") if one.kind == "learning rate" else one for one in explained
        ]
    return Diagnosis(record.run.directory, tuple(explained), tuple(notes), record.unfinished)


def _has_other_cause(record: Record, found: Finding, kinds: set[FindingKind]) -> bool:
    """Return True if a finding `found` of the kind "learning rate" or "stalled" follows from another finding. The
    advice of `found`, another learning rate, would then mislead.

    If initial weights, inputs, targets or the loss function are at fault, the losses of the run say nothing about the
    learning rate. A finding "learning rate" then follows from this fault, unless an update was too large. A finding
    "stalled" follows from this fault too. It also follows from any finding that advises a lower learning rate, because
    the advice of "stalled" may be a higher one.

    kinds: kinds of all findings of the run.
    """
    meaningless = bool(kinds & {"initialization", "inputs", "targets", "loss"})
    if found.kind == "stalled":
        return meaningless or bool(kinds & {"learning rate", "loss not finite"})
    return found.kind == "learning rate" and meaningless and (record.largest_step or 0.0) < LARGE_STEP


def _with_origin(record: Record, found: Finding) -> Finding:
    """Return a finding about large updates or weights with the layer in which they began (`Record.began`), if there is
    one. Other findings are returned as they are.
    """
    if found.kind not in ("learning rate", "exploding layer") or not record.began[0]:
        return found
    name, text = record.began
    return replace(found, layer=name, text=found.text if found.layer == name else found.text + text)


def _explained(record: Record, found: Finding) -> Finding:
    """Return a copy of a finding with the usual causes of its kind. If the finding has no advice yet, add the advice of
    its kind for this run.
    """
    own = EXPLANATIONS[found.kind]
    remedy = found.remedy or (own.remedy if isinstance(own.remedy, str) else own.remedy(record))
    return replace(found, usual=own.usual, remedy=remedy)


def _setting(config: Mapping[str, Any], *path: str) -> Any:
    """Return the value at a path of nested mappings; None if there is none."""
    value: Any = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _lower(record: Record) -> str:
    """Return advice to divide the learning rate by a factor, which is computed from the size of the first update.

    The size is |update| / |weight|, see `Record.first_step`. The factor is this size divided by `Record.target`, a
    healthy size. If the factor is less than REMARKABLE, the advice is to divide by REMARKABLE until the loss falls. If
    no finite size was measured, it is to divide by 10 until the loss falls. The sizes of later updates are not used,
    because the run may already diverge then.
    """
    first = record.first_step
    if first is None or not math.isfinite(first):
        return f"divide lr by 10 until the loss falls{_of_recipe(record)}"
    target = record.target
    if first < REMARKABLE * target:
        return f"divide lr by {REMARKABLE} until the loss falls{_of_recipe(record)}"
    factor = _rounded(first / target)
    return f"divide lr by {factor:g}{_advised(record, 1 / factor)}{_of_recipe(record)}"


def _alone(record: Record) -> str:
    """Return "first check ... alone; then ": advice about the layer in which a fault began (`Record.began`), to be put
    before other advice. Return "" if there is no such layer, or if a route multiplies the learning rate of this layer,
    because there is other advice about routes.
    """
    name = record.began[0]
    if not name or _route(record, name):
        return ""
    return f"first check the gain, the initial weights and the learning rate of {name} alone; then "


def _raise(record: Record) -> str:
    """Return advice about a loss that does not fall. It depends on the largest measured ratio |update| / |weight|.

    - All updates were 0: set the learning rate.
    - The ratio was small: multiply the learning rate by `Record.target` / ratio. The new rate is limited to FAR times
      that of the recipe, or to REMARKABLE times the present rate if this is larger.
    - All other cases: train for more steps, or try other rates.

    A ratio is small if it is at most `Record.target` / REMARKABLE, and if the updates of all steps together could not
    have changed the weights by the norm of the weights.
    """
    own, largest = record.recipe_rate, record.largest_step
    if record.rate == 0 or (largest == 0 and record.has_gradients):  # all updates were rounded to 0
        return f"set lr to {f'that of the recipe, {own:g}' if own else 'a positive number'}"
    batch = "train on one batch, and check its labels"
    if not largest or largest * record.run.rows[-1]["step"] >= 1 or largest * REMARKABLE > record.target:
        return (
            f"{batch}; if the model learns them, train for more steps, or try an lr 3 times larger and 3 times smaller"
        )
    factor = record.target / largest
    if own and record.rate:
        factor = min(factor, max(FAR * own / record.rate, REMARKABLE))
    factor = _rounded(factor)
    text = f"multiply lr by {factor:g}{_advised(record, factor)}{_of_recipe(record)}, or train for more steps"
    return f"{text}; if the loss still does not fall, {batch}"


def _rounded(factor: float) -> float:
    """Return a factor rounded to one significant digit."""
    return float(f"{factor:.0e}")


def _advised(record: Record, factor: float) -> str:
    """Return a clause with the learning rate of the run times `factor`; "" if the rate of the run is not known."""
    return f", to {record.rate * factor:.2g}" if record.rate else ""


def _of_recipe(record: Record) -> str:
    """Return a clause about the learning rate of the recipe if that of the run is far from it, else ""."""
    own, rate = record.recipe_rate, record.rate
    far = own and rate and not own / FAR < rate < own * FAR
    return f" (the recipe has lr {own:g})" if far else ""


def _further(record: Record) -> str:
    """Return further advice against a learning rate that is too high: warm-up and clipping, if the run lacks them.

    Clipping is advised only if updates grow with gradients. The advice is general for a run that another training loop
    logged, because the settings of such a run are not known.
    """
    config = record.run.config
    if record.imported:
        return ", start with a smaller lr, or clip gradients"
    parts = [] if _setting(config, "schedule", "warmup_steps") else ["add `schedule.warmup_steps`"]
    if config.get("grad_clip") is None and record.grows_with_gradients:
        parts.append("set `grad_clip: 1.0`")
    listed = "".join(f", {'or ' if part == parts[-1] else ''}{part}" for part in parts)
    return f"{listed}; `tune` in a study finds lr"


def _grows_with_gradients(recipe: Any) -> bool:
    """Return True if gradients that are 1000 times larger make the updates of a matrix at least twice as large.

    This is tried with an 8 x 8 matrix in three steps of the recipe's `update`, on this process alone. Returns False if
    such steps are not possible, for example because the update needs a model.
    """
    sizes, draws = [], generator(0)
    gradients = [torch.from_numpy(draws.standard_normal((8, 8))).float() for _ in range(3)]
    start = torch.eye(8, dtype=torch.float32, device="cpu")
    try:
        own = load_recipe({**recipe, "routes": [], "expect": {}, "compile": False, "distribution": {"mode": "local"}})
        for scale in (1.0, 1e3):
            weight = nn.Parameter(start.clone())
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
                optimizer = Optimizer([("weight", weight)], own.replace(total_steps=3), lr=1e-3, weight_decay=0.0)
                for gradient in gradients:
                    weight.grad = gradient * scale
                    optimizer.step()
            sizes.append(float((weight.detach() - start).norm()))
    except Exception:  # a stage of the user may raise any error
        return False
    return sizes[1] >= 2 * sizes[0] > 0


def _is_slow(record: Record) -> bool:
    """Return True if the loss does not fall. A lower learning rate must not be advised for such a run."""
    return any(one.kind == "stalled" for one in _stalled(record))


def _lower_layer(record: Record) -> str:
    """Return advice to lower the setting that scales the updates of one layer.

    The setting is `lr_multiplier` if the recipe has routes, else `lr`. Return "" in place of the advice about `lr` if
    the loss does not fall (`_is_slow`).
    """
    if _setting(record.run.config, "recipe", "routes"):
        return "lower `lr_multiplier` of its route, "
    return "" if _is_slow(record) else "lower lr, "


def _init(record: Record) -> str:
    """Return advice to set `task.init` to `spectral`. Return "" if the task has no field `init`, or if it has this
    value already.
    """
    task = record.run.config.get("task", {})
    return ", or set `task.init: spectral`" if task.get("init", "spectral") != "spectral" else ""


def _decay(record: Record) -> str:
    """Return "more weight decay" if the run has weight decay, else "weight decay"."""
    own = record.run.config.get("weight_decay")
    rate = _setting(record.run.config, "recipe", "weight_decay", "rate") if own is None else own
    return "more weight decay" if rate else "weight decay"


def _solver(record: Record) -> str:
    """Return a clause that advises to compute matrix roots with the solver `eigh`. Return "" if `eigh` is the only
    solver in the recipe.
    """
    solvers = _solvers(record.run.config.get("recipe"))
    return "" if solvers and all(_setting(one, "kind") == "eigh" for one in solvers) else ", choose `solver: eigh`"


def _solvers(config: Any) -> list[Any]:
    """Return the values of all fields `solver` in nested data."""
    if isinstance(config, Mapping):
        own = [config["solver"]] if isinstance(config.get("solver"), Mapping) else []
        return [*own, *(solver for value in config.values() for solver in _solvers(value))]
    return [solver for value in config for solver in _solvers(value)] if isinstance(config, (list, tuple)) else []


def _revive(record: Record) -> str:
    """Return advice about layers without a gradient: about initial weights if a layer has only zeros, else general."""
    if _has_zero_layer(record):
        return (
            "give these layers random initial weights; at most one of two layers in a row, such as the last, may begin "
            "with weights of 0"
        )
    return (
        "check the inputs, the initial weights and the biases of this and the next layer, and that the loss depends on "
        "the layer; then use a smooth activation, or remove the layer"
    )


def _has_zero_layer(record: Record) -> bool:
    """Return True if all parameters of some layer are 0 at the end of the run."""
    norms = record.run.layers.get("weight_norm", {})
    return any(all(norms[name] == 0 for name in own) for own in group_by(norms, _layer).values())


def _of_fault(record: Record) -> Iterator[Finding]:
    """Yield a finding about the recorded fault of the run, if there is one.

    The finding names the learning rate in place of the recorded cause in two cases:

    - The recorded cause is the model, the fault came after the first step, and the learning rate is suspect: an update
      was too large, or the learning rate is at least FAR times that of the recipe and the loss hardly fell or rose far
      (`_is_untroubled` is False).
    - The run is imported, its finite losses rose, and its last loss is not finite.
    """
    fault = record.fault
    if fault is None:
        return
    kind: FindingKind = fault.cause
    if record.imported:
        text = f"{fault.text}{_extent(record, fault)}"
        if kind == "loss not finite" and ends_lost(record.run.rows) and (rise := _rise(record)):
            kind, text = "learning rate", f"{text}; before, {rise}"
        yield Finding(kind, fault.step, "", text)
        return
    layer, text = fault.layer, fault.text
    rate, own = record.rate or 0.0, record.recipe_rate or math.inf
    far = rate >= FAR * own and not _is_untroubled(record)
    if kind == "model" and fault.step > 1 and (far or (record.largest_step or 0.0) >= LARGE_STEP):
        kind, text = "learning rate", text.partition(";")[0]
        text += f"; lr is {rate / own:.3g} times that of the recipe" if far else ""
    if kind == "learning rate":
        fastest = record.fastest
        layer, text = layer or fastest, text + _step_size(record)
        text += "" if layer == fastest else _route(record, layer.partition(":")[0])
    yield Finding(kind, fault.step, layer, text)


def _extent(record: Record, fault: Fault) -> str:
    """Return a clause about an imported run. It says in how many of the logged rows the training loss or the validation
    loss is not finite, and from which step this loss is finite again.

    fault: the first loss that is not finite. The clause is appended to the text of this fault, which names its step.
    """
    columns = {"loss": "training", "val_loss": "validation"}
    if fault.place == "evaluation":
        columns = dict(reversed(columns.items()))
    text = ""
    for number, (column, name) in enumerate(columns.items()):
        logged = rows_with(record.run.rows, column)
        lost = [row for row in logged if is_lost(row, column)]
        if not lost:
            continue
        first, last = lost[0]["step"], lost[-1]["step"]
        after = next((row["step"] for row in logged if row["step"] > last), None)
        together = len(lost) == sum(first <= row["step"] <= last for row in logged)
        parts = [f"{len(lost)} of {counted(len(logged), 'row')}", *([] if together else [f"the last at step {last}"])]
        parts.append("not finite at the end" if after is None else f"finite again from step {after}")
        text += f"; the {name} loss is not finite at step {first}" if number else ""
        text += f" ({'; '.join(parts)})"
    return text


def _of_end(record: Record) -> Iterator[Finding]:
    """Yield a finding about an error that ended the run, a learning rate of 0, a loss that rose or did not fall, or
    matrices that grew. Yields nothing if there is none of these, or if a recorded fault ended the run.
    """
    if record.run.result.get("diverged") and record.fault is None:  # older versions recorded no fault
        yield Finding("learning rate", record.run.result["steps"], "", record.run.result["diagnosis"])
    elif record.run.error and not record.run.result and record.fault is None:
        yield Finding("error", None, "", error_line(record.run.error))
    elif record.run.result.get("diverged") or record.ended_by_fault:
        return
    elif record.rate == 0 and not record.imported and not record.largest_step:
        yield Finding("stalled", None, "", "lr is 0, so that no step changes a weight")
    elif seen := _rise(record) or "; ".join(filter(None, (_burst(record), _grown(record)))):
        yield Finding("learning rate", None, record.fastest, f"{seen}{_step_size(record)}")
    else:
        yield from _stalled(record)


def _burst(record: Record) -> str:
    """Return a sentence if the loss rose far above its first value in some rows, else "".

    A loss that was still as high at the end is found by `_rise`.
    """
    first, losses = record.first_loss, record.losses
    if first is None or first <= 0:
        return ""
    begin = max(first, losses[0])  # a row is a mean over several batches, the first of which may be unusual
    high, top = [loss for loss in losses if loss >= WORSE * begin], max(losses)
    late = losses[len(losses) // 2 :]
    noise = median(abs(after - before) for before, after in pairwise(late)) if len(late) > 1 else 0.0
    if not (len(high) > 1 or top >= BURST * first) or top - first < NOISE * noise:
        return ""
    step = next(row["step"] for row in record.run.rows if row.get(record.loss.key) == top)
    text = (
        f"the {record.loss.title} rose from {first:.4g} to {top:.4g} (step {step}), {top / first:.3g} times its first "
    )
    return f"{text}value, and was {losses[-1]:.4g} at the end"


def _grown(record: Record) -> str:
    """Return a sentence if most matrices grew to GROWN times their first norm; else "".

    The norm of a matrix that begins small is compared with a usual first norm instead (see `Record.shares`).
    """
    growths = record.run.layers.get("weight_growth", {})
    if max(growths.values(), default=0.0) < GROWN or _is_untroubled(record):  # spares loading the task
        return ""
    grown = {
        name: growths[name] * share for name, (share, matrix) in record.shares.items() if matrix and name in growths
    }
    most = [name for name, growth in grown.items() if growth >= GROWN]
    if 2 * len(most) <= len(grown):
        return ""
    growth, name = max((growths[name], name) for name in most)
    text = f"{len(most)} of {counted(len(grown), 'matrix', 'matrices')} grew tenfold or more"
    return f"{text}; {name} grew to {growth:.3g} times its first norm"


def _is_untroubled(record: Record) -> bool:
    """Return True if the loss (`Record.loss`) fell by at least LEAST_RISEN of its first value, and never rose to WORSE
    times its first value. If an update was too large, the loss must have halved.
    """
    first, last = record.first_loss, record.last_loss
    if first is None or last is None or max(record.losses) >= WORSE * first:
        return False
    fall = LEAST_RISEN if (record.largest_step or 0.0) < LARGE_STEP else 0.5
    return first - last >= fall * abs(first)


def _rise(record: Record) -> str:
    """Return a sentence if the loss ended far above its first value or rose again by nearly its whole fall, else ""."""
    first, usual, losses = record.first_loss, record.last_loss, record.losses
    end = next(reversed(losses), None)
    if worse := worse_than_at_first(first, end, usual, record.loss.title):
        return worse
    if first is None or end is None or usual is None or len(losses) < 8:
        return ""
    best = min(record.quarters)
    if first - best < LEAST_RISEN * abs(first) or min(end, usual) - best < RISEN * (first - best):
        return ""
    fell = f"the {record.loss.title} fell from {first:.4g} to {best:.4g} (median of a quarter of the rows)"
    return f"{fell} and rose again to {end:.4g} at the end"


def _step_size(record: Record) -> str:
    """Return a clause about the largest update (`Record.largest_step`) if it is too large, else an empty text."""
    largest = record.largest_step or 0.0
    if largest < LARGE_STEP:
        return ""
    text = f"; an update had {largest:.2g} times the norm of the weights, and {_HEALTHY} are healthy"
    if name := record.fastest:
        _, peak, typical = record.peak
        text += f"; the largest was that of {name}, {peak:.3g} times, against {typical:.3g} times (median) of the other"
        text += f" layers{_route(record, name)}"
    return text


def _route(record: Record, layer: str) -> str:
    """Return a clause about the factor by which the recipe multiplies the learning rate of a layer.

    Return "" if the factor is 1, or if the task cannot be loaded.
    """
    if not any(route.get("lr_multiplier", 1) != 1 for route in record.run.config.get("recipe", {}).get("routes", ())):
        return ""
    if isinstance(record.initial, Exception):
        return ""
    experiment, model = record.initial
    infos, parameters = describe_model(model), dict(model.named_parameters())
    if layer not in parameters:
        return ""
    path = experiment.recipe.route(infos[id(parameters[layer])])[0]
    multiplier = getattr(experiment.recipe.rules()[path], "lr_multiplier", 1)
    return "" if multiplier == 1 else f"; recipe.{path} multiplies its learning rate by {multiplier:g}"


def _exploding(record: Record, sick: bool) -> Iterator[Finding]:
    """Yield a finding about a layer whose weights grew far more than those of the other layers. If there is none, and
    `sick` is True, yield a finding about a layer whose updates were far larger than those of the other layers.

    Growth is measured from a layer's first norm, or from a usual norm if the first norm is smaller. The limit of growth
    is EXPLODED in two cases: another check found a fault (`sick`), or one update of the layer was as large as its
    weights and the largest of all layers, while the updates of the other layers were healthy. In all other cases it is
    EXPLODED_ALONE times larger, because layers also grow in healthy runs.

    sick: True if another check found a fault.
    """
    fastest, peak, typical = record.peak
    rows = [row for row in record.run.rows if row.get("weight_growth_largest_layer")]
    grown = [(_or_infinite(row["weight_growth_largest"]), row["weight_growth_largest_layer"], row) for row in rows]
    if grown:
        most, name, row = max(grown, key=lambda one: one[0])
        others = record.of_others("weight_growth", name) or _or_infinite(row["weight_growth_smallest"])
        fast = fastest == name and typical < HEALTHY_STEP and peak * record.share(name) >= 1
        limit = EXPLODED * max(1.0, others) * (1 if sick or fast else EXPLODED_ALONE)
        if (
            most >= limit and most * record.share(name) >= limit and others < EXPLODED
        ):  # otherwise all layers have grown
            step = next(row["step"] for growth, layer, row in grown if layer == name and growth >= limit)
            text = f"the weights of {name} grew to {most:.3g} times their first norm"
            text += f", and those of the other layers to {others:.3g} times (median){_route(record, name)}"
            yield Finding("exploding layer", step, name, text)
            return
    if sick and typical < HEALTHY_STEP and peak >= EXPLODED and peak * record.share(fastest) >= EXPLODED:
        text = f"an update of {fastest} had {peak:.3g} times the norm of its weights"
        text += f", and of the other layers {typical:.3g} times (median){_route(record, fastest)}"
        yield Finding("exploding layer", None, fastest, text)


def _or_infinite(value: float | None) -> float:
    """Return the value, or infinity for None, which rows of metrics have for a value that is not finite."""
    return math.inf if value is None else value


def _dead(record: Record) -> Iterator[Finding]:
    """Yield a finding about layers whose gradient was missing or 0 in all measured steps.

    Yields nothing if fewer than two steps were measured.
    """
    measured = sum(row.get("gradient_norm") is not None for row in record.run.rows)
    dead = [name for name, zeros in record.run.layers.get("zero_gradients", {}).items() if zeros == 1]
    if not dead and not record.run.layers:  # a run that was stopped or still trains has no table of layers
        rows = [row for row in record.run.rows if row.get("gradient_norm_smallest") is not None]
        found = {row["gradient_norm_smallest_layer"] for row in rows if row["gradient_norm_smallest"] == 0}
        dead = sorted(found) if len(found) == 1 and all(row["gradient_norm_smallest"] == 0 for row in rows) else []
    if dead and measured >= 2:
        first, names = _dead_layers(list(record.run.layers.get("zero_gradients", dead)), dead)
        text = f"{names} had no gradient other than 0 in any measured step ({measured} rows)"
        norms = record.run.layers.get("weight_norm", {})
        if zeros := sum(norms.get(name) == 0 for name in dead):
            text += f"; {zeros} of {counted(len(dead), 'parameter')} without a gradient have only entries that are 0"
        end = GradientEnd() if _has_zero_layer(record) else record.gradient_end(first)
        yield Finding("dead layer", None, first, text + end.text, remedy=end.remedy)


def _dead_layers(parameters: list[str], dead: list[str]) -> tuple[str, str]:
    """Return the parameter that a finding about missing gradients names, and the names of all layers without a
    gradient.

    A layer whose outputs are always 0 stops the gradients of its own parameters and of all layers before it. The next
    layer has inputs of 0: its weight has no gradient, but its bias has one. So if a layer lacks only some gradients,
    the finding names the layer before it. If there is none, it names the first layer without a gradient.

    parameters: names of all parameters, in the order of the model.
    dead: names of the parameters without a gradient.
    """
    layers = group_by(parameters, _layer)
    silent = [layer for layer, own in layers.items() if set(own) <= set(dead)]
    partly = [name for layer, own in layers.items() if layer not in silent for name in own if name in dead]
    stops = [layer for layer, after in pairwise(layers) if layer in silent and set(layers[after]) & set(partly)]
    first = layers[[*stops, *silent][0]][0] if silent else partly[0]
    parts = [f"all parameters of {name_some(silent, 8)}"] if silent else []
    return first, ", and ".join([*parts, *([name_some(partly, 8)] if partly else [])])


def _layer(parameter: str) -> str:
    """Return the name of the layer that has a parameter."""
    return parameter.rpartition(".")[0] or parameter


def _too_small(record: Record) -> float | None:
    """Return the largest logged ratio |update| / |weight| if it is below SMALL_STEP, and the updates of all steps could
    change the weights by at most 0.1 %. Otherwise return None.
    """
    largest = max(record.numbers("update_ratio"), default=math.inf)
    return largest if largest < SMALL_STEP and largest * record.run.rows[-1]["step"] <= 1000 * SMALL_STEP else None


def _stalled(record: Record) -> Iterator[Finding]:
    """Yield a finding if neither training loss nor validation loss has fallen in the run, and four losses or more were
    logged. Its text says how large the updates were.
    """
    evaluations, first, last, small = record.numbers("val_loss"), record.first_loss, record.last_loss, None
    if first is None or last is None or first <= 0 or len(record.losses) < 4:
        return
    learned = len(evaluations) > 1 and evaluations[-1] < (1 - LEAST_FALL) * min(evaluations[0], first)
    if learned or ((small := _too_small(record)) is None and last < (1 - LEAST_FALL) * first):
        return
    text = f"the {record.loss.title} does not fall: {first:.4g} at first, "
    text += f"{last:.4g} in the last quarter of the rows (median)"
    if small is None and (large := _step_size(record)):
        yield Finding("learning rate", None, record.fastest, text + large)
        return
    largest = record.largest_step if small is None else small
    if largest is not None:
        text += f"; updates had at most {largest:.2g} times the norm of the weights, and {_HEALTHY} are healthy"
    low = small is not None and (small or record.has_gradients)
    yield Finding("stalled", None, "", f"{text}{', so that the learning rate is too low' if low else ''}")


def _first_batch(record: Record, notes: list[str], sick: bool) -> Iterator[Finding]:
    """Yield findings about the first batch with the initial weights: a loss function that does not fit the outputs,
    inputs or targets that are not normalized, or a loss far above that of a constant guess.

    notes: list of things that were not checked. A note is appended if the task or its data are not on this machine, or
        if the loss of a uniform guess is not known.
    sick: True if another check found a fault. If False, inputs that are not normalized are reported only if the first
        loss is large or the model learned poorly, because many models learn in spite of them.
    """
    start = record.start
    if isinstance(start, Exception):
        notes.append(
            f"inputs, labels and initial outputs, as the task cannot be loaded: {start}. If a file of yours defines "
            "it, pass `--import FILE.py`"
        )
        return
    if start.fault:
        yield Finding("loss", 1, "", start.fault)
    if start.single:
        yield Finding("one class", 1, "", start.single)
    if start.unchecked:
        notes.append(start.unchecked)
    if start.unscaled and (sick or start.is_large or _learned_poorly(record, start)):
        yield Finding("inputs", 1, "", start.unscaled)
    elif start.is_large_by_columns or (
        start.uneven and not sick and not start.is_large and _learned_poorly(record, start)
    ):
        yield Finding("inputs", 1, "", start.uneven)
    elif start.is_large:
        text = f"the loss before the first step is {start.loss:.3g}, and that of a uniform guess among {start.classes}"
        yield Finding("initialization", 1, start.large_layer, f"{text} is {start.constant:.3g}{start.large_text}")
    elif start.large_layer and _is_worse_than_mean(record, start):
        text = f"the loss before the first step is {start.loss:.3g}, and that of the mean of the targets"
        yield Finding("initialization", 1, start.large_layer, f"{text} is {start.constant:.3g}{start.large_text}")
    elif start.offset and _is_worse_than_mean(record, start):
        yield Finding("targets", 1, "", start.offset)


def _learned_poorly(record: Record, start: FirstBatch) -> bool:
    """Return True if the last accuracy is below POOR. Without an accuracy, return True if the last loss is above half
    of the first loss, or above half of the loss of a constant guess.
    """
    accuracies, first, last = record.numbers("val_accuracy"), record.first_loss, record.last_loss
    if accuracies:
        return bool(accuracies[-1] < POOR)
    return first is not None and last is not None and last > min(first, start.constant) / 2


def _is_worse_than_mean(record: Record, start: FirstBatch) -> bool:
    """Return True if the last loss of a regression is above WORSE times that of the mean of the targets."""
    return record.last_loss is not None and record.last_loss > WORSE * start.constant


def _generalization(record: Record) -> Iterator[Finding]:
    """Yield the findings about a validation loss that got worse while the training loss fell.

    Either the validation loss rose after its best evaluation, or it was never below the loss of a guess that does not
    depend on the inputs (`Record.guess`), ended above it, and the training loss fell below it. In the second case a
    small fall of the training loss is enough if the validation loss did not fall.

    If the first update was too large, the learning rate is the first finding: at a usual learning rate, the same model
    may not overfit.
    """
    rows = [row for row in record.run.rows if row.get("loss") is not None]
    evaluations, first, usual = record.numbers("val_loss"), record.first_loss, record.last_loss
    if not rows or not evaluations or first is None or usual is None:
        return
    last, reached, rise = rows[-1]["loss"], evaluations[-1], record.run.rise(METRICS["val_loss"])
    before, text = first, f"the validation loss ended at {reached:.4g}"
    if rise is not None:
        step, best = rise
        before = next((row["loss"] for row in reversed(rows) if row["step"] <= step), first)
        text = f"the validation loss rose from {best:.4g} (step {step}) to {reached:.4g} at the end"
    guess = record.guess if usual < reached else math.inf  # spares reading all labels
    flat = len(evaluations) > 1 and reached >= evaluations[0]
    learned = usual < (1 - (LEAST_FALL if flat else LEAST_RISEN)) * min(first, guess)
    kind: FindingKind = "overfitting"
    if learned and guess < reached and (1 - CHANCE) * guess <= min(evaluations):
        kind, before = "worse than guessing", first
    elif rise is None or last >= min(before, (1 - LEAST_RISEN) * first):
        return
    text += f", above the {guess:.4g} of a constant guess of the class frequencies" if guess < reached else ""
    text += f", while the training loss fell from {before:.4g} to {last:.4g}"
    if record.first_is_large:
        large = f"; an update had {record.first_step:.2g} times the norm of the weights, and {_HEALTHY} are healthy"
        yield Finding("learning rate", None, record.fastest, text + large)
    yield Finding(kind, rise[0] if rise and kind == "overfitting" else None, "", text)


def _failed_roots(record: Record) -> Iterator[Finding]:
    """Yield the finding about roots that failed and were replaced by older ones."""
    rows = record.run.rows
    failed = [row["step"] for row in rows if row.get("failed_roots")]
    if failed:
        text = f"roots or bases could not be computed in {len(failed)} of {len(rows)} rows; old ones were used"
        yield Finding("failed root", failed[0], "", text)
