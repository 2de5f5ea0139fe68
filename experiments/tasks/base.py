"""Tasks: data, a model and a loss, and the gradient of one batch.

A `Task` is the declaration. Its method `load` reads the data once into a `Dataset`. Every batch is a function of the
seed and the step number alone, so that a run can continue from a step number.
"""

from __future__ import annotations

import hashlib
import math
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import field_validator
from pydantic_core.core_schema import ValidationInfo
from torch import Tensor, nn
from torch.nn import functional

from eigengraft.component import Component, TextForm
from eigengraft.distributed.rank_group import DistributedError
from eigengraft.errors import counted, near_path

IN_LIBRARY = "python:"
"""Prefix of a path relative to the folder of the standard library. Such a path is valid on every machine."""
IN_PACKAGE = "package:"
"""Prefix of a path in the folder of an installed package. The package is not imported."""


def absolute_path(path: str, home: Path = Path()) -> str:
    """Return the absolute path of a file or folder that a field of a task names.

    An empty path, a URL, and a path that begins with "python:" (IN_LIBRARY) or "package:" (IN_PACKAGE) are returned
    unchanged.

    home: folder to which a relative path is relative; Path(): the working directory.
    """
    if not path or path.startswith((IN_LIBRARY, IN_PACKAGE)) or "://" in path:
        return path
    return str((home / Path(path).expanduser()).absolute())


class _Pair(NamedTuple):
    """The fields of a `Batch`, which adds checks."""

    inputs: Tensor
    targets: Tensor


class Batch(_Pair):
    """A batch of B rows.

    inputs: `[B, ...]`, inputs of the model.
    targets: `[B, ...]`, values that the loss compares with the outputs of the model. They are integer classes if the
        task uses the loss of the base class.

    Raises TypeError for values that are no
    tensors, and ValueError for different numbers of rows.
    """

    __slots__ = ()

    def __new__(cls, inputs: Tensor, targets: Tensor) -> Batch:
        for name, value in (("inputs", inputs), ("targets", targets)):
            got: object = value  # code of the user may pass anything
            if not isinstance(got, Tensor):
                remedy = "torch.from_numpy(...)" if isinstance(got, np.ndarray) else "torch.as_tensor(...)"
                remedy = f"convert it with {remedy}" if got is not None else "give a tensor with a row for each example"
                raise TypeError(f"Batch.{name}: a torch.Tensor is required, got {type(got).__name__}; {remedy}")
        rows, others = inputs.shape[:1], targets.shape[:1]
        if rows != others or not rows:
            raise ValueError(
                f"Batch: the first axis must have the same length in inputs and targets, got inputs "
                f"{list(inputs.shape)} and targets {list(targets.shape)}; give each row of inputs its target"
            )
        return super().__new__(cls, inputs, targets)

    def to(self, device: torch.device) -> Batch:
        """Return a copy of this batch on `device`."""
        return Batch(self.inputs.to(device), self.targets.to(device))


def _path(task: Task) -> str:
    """Return the path of a task in errors, such as "task.digits"."""
    return f"task.{getattr(task, 'kind', '?')}"


def training_batch(task: Task, dataset: Dataset, seed: int, step: int) -> Batch:
    """Return the training batch of one step. Raise TaskError if the method `batch` of the dataset fails or returns no
    `Batch`.
    """
    with located_call(task, "batch", dataset):
        found: object = dataset.batch(seed, step)  # code of the user may return anything
    return _require_batch(task, "training", f"{type(dataset).__name__}.batch()", found)


def validation_batches(task: Task, dataset: Dataset) -> Iterator[Batch]:
    """Yield the validation batches. Raise TaskError if the method `evaluation` of the dataset fails or yields something
    that is no `Batch`.
    """
    with located_call(task, "evaluation", dataset):
        for found in dataset.evaluation():
            yield _require_batch(task, "validation", f"{type(dataset).__name__}.evaluation()", found)


def _require_batch(task: Task, name: str, method: str, batch: object) -> Batch:
    if not isinstance(batch, Batch):
        got = "nothing" if batch is None else type(batch).__name__
        raise TaskError(f"{_path(task)}: a {name} batch: expected Batch(inputs, targets) from {method}, got {got}")
    return batch


def data_fault(batch: Batch, rows: Sequence[int] | None = None, source: str = "training data") -> str:
    """Return a text that names the rows of a batch with numbers that are not finite; empty if all are finite.

    batch: the batch. Integers are always finite.
    rows: position of each row of the batch in the data; None: unknown.
    source: name of the data for readers.
    """
    for name, values in zip(batch._fields, batch, strict=True):
        if values.is_floating_point() and not bool((finite := torch.isfinite(values)).all()):
            count = int((~finite).sum())
            verb = "is" if count == 1 else "are"
            return f"{counted(count, 'number')} in its {name} that {verb} not finite ({_place(~finite, rows, source)})"
    return ""


def label_fault(batch: Batch, rows: Sequence[int] | None = None, source: str = "training data", *, classes: int) -> str:
    """Return a text that names the rows of a batch whose class has no output of the model; empty if there are none.

    batch: the batch, with integer classes as targets.
    rows: position of each row of the batch in the data; None: unknown.
    source: name of the data for readers.
    classes: number of classes of the model.
    """
    wrong = ((batch.targets < 0) | (batch.targets >= classes)) & (batch.targets != IGNORED_CLASS)
    return f"labels that are no class of the model ({_place(wrong, rows, source)})" if bool(wrong.any()) else ""


def _place(wrong: Tensor, rows: Sequence[int] | None, source: str) -> str:
    """Return a text with the rows of a batch that have a wrong number. The other arguments are those of `data_fault`.

    wrong: True at the wrong numbers, in the shape of the inputs or targets of the batch.
    """
    bad = wrong.reshape(len(wrong), -1).any(1).nonzero().flatten().tolist()
    where = f"{_name_rows(bad)} of {len(wrong)}"
    if rows is not None and (known := [rows[row] for row in bad]) != bad:
        where += f", in the {source} {_name_rows(known)}"
    return f"{where}, counted from 0"


def loss_fault(task: Task, outputs: Tensor, targets: Tensor) -> str:
    """Return a text about a loss that does not fit the outputs of the model; empty if no such fault was found.

    There are two faults: a cross-entropy applies a softmax to outputs that are probabilities, and a loss broadcasts
    outputs and targets, so that it compares each output with the targets of all rows.
    """
    return _second_softmax(task, outputs, targets) or _broadcast(task, outputs, targets)


def _second_softmax(task: Task, outputs: Tensor, targets: Tensor) -> str:
    """Return a sentence if the outputs are probabilities, and the loss applies a softmax to them; else "".

    To see if the loss applies a softmax, it is computed for outputs that give the right class the probability 0.9. A
    loss of probabilities is then -log(0.9). With a softmax it is the cross-entropy of torch.
    """
    classes = outputs.shape[-1] if outputs.ndim > 1 and outputs.is_floating_point() else 0
    if classes < 2 or targets.dtype != torch.int64 or targets.shape != outputs.shape[:-1]:
        return ""
    rows, chosen = outputs.detach().float(), targets
    if bool((rows < 0).any()) or not torch.allclose(rows.sum(-1), torch.ones(()), atol=1e-3):
        return ""
    index = chosen.clamp(0, classes - 1)  # the class that torch ignores is negative
    sure = torch.full_like(rows, 0.1 / (classes - 1)).scatter(-1, index.unsqueeze(-1), 0.9)
    cross_entropy = functional.cross_entropy(sure.flatten(0, -2), index.flatten())
    if not math.isclose(float(task.loss(sure, index)), float(cross_entropy), rel_tol=1e-4):
        return ""
    return (
        "the outputs of the model are probabilities, which sum to 1, and its cross-entropy applies a second softmax; "
        "return logits, without a softmax"
    )


def _broadcast(task: Task, outputs: Tensor, targets: Tensor) -> str:
    """Return a sentence if the loss compares each output with the targets of all rows, because outputs and targets have
    different shapes, such as [B, 1] and [B], and are broadcast; else "".

    This is so if, for outputs equal to their targets, the loss of the batch is not the mean of the losses of its single
    rows.
    """
    shapes = [list(outputs.shape), list(targets.shape)]
    if outputs.numel() != targets.numel() or shapes[0] == shapes[1] or not outputs.is_floating_point():
        return ""
    try:
        both = list(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:  # the shapes cannot be broadcast
        return ""
    if both in shapes:
        return ""
    if targets.is_floating_point():
        # all targets of the batch differ, and are in (0, 1), because some losses take probabilities
        targets = torch.linspace(0.25, 0.75, targets.numel()).to(targets).reshape(targets.shape)
    guesses = targets.to(outputs.dtype).reshape(outputs.shape)
    single = [float(task.loss(guesses[row : row + 1], targets[row : row + 1])) for row in range(len(targets))]
    if math.isclose(float(task.loss(guesses, targets)), sum(single) / len(single), rel_tol=1e-4, abs_tol=1e-7):
        return ""
    return (
        f"outputs {shapes[0]} and targets {shapes[1]} were broadcast to {both}, so that each output is compared with "
        "the targets of all rows; give them the same shape"
    )


def _name_rows(rows: Sequence[int]) -> str:
    """Return a text with the numbers of the first five rows."""
    return ("rows " if len(rows) > 1 else "row ") + ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")


IGNORED_CLASS = -100
"""The class that the cross-entropy ignores, for rows without a class. It is the default of torch."""
SAMPLED_BATCHES = 50
"""Number of training batches that stand for the data: enough to contain most rows of a small data set."""
_CLASSES = (torch.int64, torch.uint8)
"""Dtypes of classes that the cross-entropy of torch accepts."""


class LabelError(ValueError):
    """An error about a class in a batch for which the model has no output, such as class 10 with ten outputs.

    message: text of the error.
    classes: number of classes of the model.
    """

    def __init__(self, message: str, classes: int) -> None:
        super().__init__(message)
        self.classes = classes


class TaskError(RuntimeError):
    """An error in the code of a task: in `load` or `build`, in a method of its dataset, or in its model or loss (for
    example wrong shapes)."""


@contextmanager
def located_call(task: Task, method: str, dataset: Dataset | None = None) -> Iterator[None]:
    """Raise TaskError in place of an error in the `with` block, which calls `method` of the task or of its dataset.

    The TaskError names the method, and the last line of the traceback that is in the method's file. Two kinds of errors
    are not changed: a TaskError, and the error about a lost rank. A ValueError that the library itself raised is not
    replaced either, because its text says what to do. If the method is that of a user's class, this ValueError gets a
    note with the line.

    dataset: dataset whose method is called; None: the method is one of the task.
    """
    owner = type(task if dataset is None else dataset)
    called = f"{method}()" if dataset is None else f"{owner.__name__}.{method}()"
    try:
        yield
    except Exception as error:  # code of the user may raise any error
        frames = list(traceback.walk_tb(error.__traceback__))
        own = str(frames[-1][0].f_globals.get("__name__")).startswith("eigengraft.")
        if isinstance(error, TaskError | DistributedError):
            raise
        code = getattr(getattr(owner, method), "__code__", None)
        file = code.co_filename if code is not None else frames[-1][0].f_code.co_filename
        lines = [line for frame, line in frames if frame.f_code.co_filename == file]
        where = f" ({Path(file).name}:{lines[-1]})" if lines else ""
        if own and isinstance(error, ValueError):
            if not owner.__module__.startswith("eigengraft."):
                error.add_note(f"raised by {called} of {_path(task)}{where}")
            raise
        reason = str(error).strip()
        raise TaskError(
            f"{_path(task)}: {called} raised {type(error).__name__}"
            f"{f': {reason}' if reason else ''}{where}{_missing_path(task, error)}"
        ) from error


def _missing_path(task: Task, error: Exception) -> str:
    """Return a clause with the field of the task that names a missing file; "" if no field names the file of the error,
    or if the error is not about a missing file.
    """
    for name, value in task if isinstance(error, FileNotFoundError) else ():
        named = rf"(?<![^\s'\"]){re.escape(str(value))}(?![\w/-])"
        if isinstance(value, (str, Path)) and str(value) and re.search(named, str(error)):
            hint = near_path(Path(value), [Path(value).suffix]) or "; give an existing file"
            return f"; the missing file is the value of task.{name}{hint}"
    return ""


@contextmanager
def located_errors(task: Task, model: nn.Module, batch: Batch) -> Iterator[None]:
    """Raise TaskError in place of a RuntimeError or IndexError in the `with` block, which computes outputs or a loss.

    The TaskError names the task, the layer and the shapes of the batch. If the batch has another dtype than the model,
    the TaskError says how to convert it. An error of a derived class, such as an error about memory or ranks, is not
    changed.
    """
    try:
        yield
    except (RuntimeError, IndexError) as error:
        if type(error) not in (RuntimeError, IndexError):
            raise
        shapes = (f"{name} {list(x.shape)} of {x.dtype}" for name, x in zip(batch._fields, batch, strict=True))
        reason = next(iter(str(error).splitlines()), "")
        layer, remedy = _failed_layer(error, model)
        raise TaskError(
            f"{_path(task)}: {layer} raised an error for a batch with {' and '.join(shapes)}: "
            f"{reason}{remedy or _dtype_remedy(model, batch)}"
        ) from error


def _dtype_remedy(model: nn.Module, batch: Batch) -> str:
    """Return the end of an error about a batch in a dtype that no parameter of the model has: how to convert it.

    Return "" if the batch has the dtype of a parameter.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    other = [
        name for name, x in zip(batch._fields, batch, strict=True) if x.is_floating_point() and x.dtype not in dtypes
    ]
    if not other or len(dtypes) != 1:
        return ""
    (dtype,) = dtypes
    convert = "float()" if dtype == torch.float32 else f"to({dtype})"
    written = " and ".join(f"`{name}.{convert}`" for name in other)
    return f"; the parameters are {dtype}: return {written} from load()"


def _failed_layer(error: Exception, model: nn.Module) -> tuple[str, str]:
    """Return two texts: the innermost layer of the model in which the error was raised, and a clause with a remedy.

    The clause is about an `nn.Linear` whose inputs have another number of columns than the layer has features. It is ""
    in all other cases. If the error was raised outside of all layers, the first text is "the loss".
    """
    names, layer, inputs = {id(module): name for name, module in model.named_modules()}, None, None
    frame = error.__traceback__
    while frame is not None:
        own = frame.tb_frame.f_locals
        if id(own.get("self")) in names:
            layer, inputs = own["self"], own.get("input")
        frame = frame.tb_next
    if not isinstance(layer, nn.Module):
        return "the loss", ""
    name, remedy = names[id(layer)], ""
    if isinstance(layer, nn.Linear) and isinstance(inputs, Tensor) and inputs.shape[-1] != layer.in_features:
        columns = counted(inputs.shape[-1], "column")
        remedy = f"; its input has {columns} and the layer {layer.in_features} features, so make them equal"
    return f"{f'layer {name}' if name else 'the model'}, {type(layer).__name__}({layer.extra_repr()}),", remedy


@dataclass(frozen=True)
class Fingerprint:
    """The identity of the data of a run.

    source: description of the data for readers.
    size: size in bytes.
    sha256: sha256 of the content.
    """

    source: str
    size: int
    sha256: str

    @classmethod
    def of(cls, source: str, *content: bytes) -> Fingerprint:
        """Return the fingerprint of data with this content. Several parts, such as inputs and labels, are joined."""
        whole = b"".join(content)
        return cls(source, len(whole), hashlib.sha256(whole).hexdigest())


@dataclass(frozen=True)
class Metrics:
    """Results of an evaluation.

    val_loss: validation loss as the task reports it.
    val_accuracy: accuracy in [0, 1]; None if the task reports none.
    others: further metrics, which the task reports besides loss and accuracy, by name.
    """

    val_loss: float
    val_accuracy: float | None
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, float]:
        """Further metrics by their columns in metrics.jsonl and tables. The column of the metric NAME is `val.NAME`."""
        return {f"val.{name}": value for name, value in self.others.items()}


MetricName = Annotated[
    str,
    TextForm(r"^(val_loss|val_accuracy|val\..+)$", "val_loss, val_accuracy, or val.NAME for a metric of the task,"),
]
"""Name of a metric by which runs are compared."""


class Dataset(ABC):
    """The data of a task, held in memory."""

    fingerprint: Fingerprint
    columns: Sequence[str] = ()
    """Names of the columns of inputs [B, columns], for messages. (): messages have the numbers of the columns."""

    @abstractmethod
    def batch(self, seed: int, step: int) -> Batch:
        """Return the training batch of one step. Equal arguments give equal batches, in every process."""

    @abstractmethod
    def evaluation(self) -> Iterator[Batch]:
        """Yield the validation batches, which are the same every time."""

    def batch_rows(self, seed: int, step: int) -> Sequence[int] | None:
        """Return the position in the training data of each row of `batch(seed, step)`, for messages about faulty rows.

        The default is None: messages then name rows of the batch alone.
        """
        return None


class Examples(Dataset):
    """A data set of single examples. Each epoch visits the training examples in a new permutation.

    train: examples to train on.
    validation: examples that every evaluation uses.
    batch_size: examples of a training batch, at least 1 and at most all training examples.
    fingerprint: identity of the data.
    scale: divisor of inputs that are stored as uint8; such inputs are converted to float32 when they are used.
    columns: names of the columns of inputs, for messages; (): messages have the number of a column.
    """

    def __init__(
        self,
        train: Batch,
        validation: Batch,
        batch_size: int,
        fingerprint: Fingerprint,
        scale: float = 1,
        columns: Sequence[str] = (),
    ) -> None:
        for name, batch in (("train", train), ("validation", validation)):
            if not isinstance(batch, Batch):
                raise TypeError(
                    f"{name}: a Batch is required, got {type(batch).__name__}; write Batch(inputs, targets)"
                )
        if not isinstance(fingerprint, Fingerprint):
            raise TypeError(
                f"fingerprint: a Fingerprint is required, got {type(fingerprint).__name__}; write "
                "Fingerprint.of(source, content), with the bytes of the data as content"
            )
        rows = len(train.targets)
        if not 1 <= batch_size <= rows:
            raise ValueError(
                f"batch_size: a batch has at least 1 row and at most all {counted(rows, 'training row')}, got "
                f"{batch_size}; choose a batch size in this range"
            )
        if columns and len(columns) != (found := train.inputs.shape[-1]):
            raise ValueError(
                f"columns: {counted(len(columns), 'name')} for {counted(found, 'column')} of inputs; name each column"
            )
        self.train, self.validation, self.batch_size, self.fingerprint = train, validation, batch_size, fingerprint
        self.scale, self.columns = scale, columns

    def batch(self, seed: int, step: int) -> Batch:
        chosen = torch.from_numpy(self._chosen(seed, step))
        return self._shown(self.train.inputs[chosen], self.train.targets[chosen])

    def batch_rows(self, seed: int, step: int) -> Sequence[int]:
        return [int(row) for row in self._chosen(seed, step)]

    def _chosen(self, seed: int, step: int) -> NDArray[np.int64]:
        epoch, position = divmod(step, len(self.train.targets) // self.batch_size)
        order = _permutation(seed, epoch, len(self.train.targets))
        return order[position * self.batch_size : (position + 1) * self.batch_size]

    def evaluation(self) -> Iterator[Batch]:
        parts = (torch.split(part, 4096) for part in self.validation)
        for inputs, targets in zip(*parts, strict=True):
            yield self._shown(inputs, targets)

    def _shown(self, inputs: Tensor, targets: Tensor) -> Batch:
        return Batch(inputs.float() / self.scale if inputs.dtype == torch.uint8 else inputs, targets)


class Task(Component, family="task"):
    """Data, model and loss under one name: methods `load`, `build` and, unless the task classifies, `loss`.

    Laws: `new_model(seed)` and `Dataset.batch(seed, step)` depend on their arguments only and leave torch's global
        random state unchanged. Evaluation batches never change during a run.
    """

    reports_accuracy: ClassVar[bool] = False
    """True if targets are classes, and the largest output of the model is its prediction."""

    @field_validator("*", check_fields=False)
    @classmethod
    def _absolute_files(cls, value: Any, info: ValidationInfo) -> Any:
        """Make the field `path` and fields of type `Path` absolute, so that a run can be continued from any directory.

        Relative paths are relative to the working directory.
        """
        if isinstance(value, Path):
            return Path(absolute_path(str(value)))
        return absolute_path(value) if info.field_name == "path" and isinstance(value, str) else value

    @abstractmethod
    def load(self) -> Dataset:
        """Read the data and return them. Called once in a process.

        Raises ValueError with a remedy if the data are not on this machine.
        """

    @abstractmethod
    def build(self) -> nn.Module:
        """Return a new model on the CPU, initialized from torch's global generator. Called by `new_model`, which seeds
        the generator before and restores it afterwards.
        """

    @final
    def new_data(self) -> Dataset:
        """Return the data. Raises TaskError if `load` fails or returns no dataset with a fingerprint."""
        with located_call(self, "load"):
            data: object = self.load()  # code of the user may return anything
        who = f"{_path(self)}: load() must return"
        if not isinstance(data, Dataset):
            raise TaskError(
                f"{who} a Dataset, got {type(data).__name__}; for data in memory return Examples(Batch(inputs, "
                "targets), Batch(inputs, targets), batch_size, fingerprint)"
            )
        if not isinstance(mark := getattr(data, "fingerprint", None), Fingerprint):
            raise TaskError(
                f"{who} a Dataset with a Fingerprint as its `fingerprint`, got {type(mark).__name__}; set "
                "`self.fingerprint = Fingerprint.of(source, content)`, with the bytes of the data as content"
            )
        return data

    @final
    def new_model(self, seed: int) -> nn.Module:
        """Return a new model on the CPU whose initial weights depend on `seed` alone. Raises TaskError if `build` fails
        or returns no module.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with located_call(self, "build"):
                model: object = self.build()  # code of the user may return anything
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"{_path(self)}: build() must return an nn.Module, got {type(model).__name__}; return the model alone"
            )
        return model

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over targets. The default is the cross-entropy, in nats, of logits [B, ..., C] and
        classes [B, ...].

        The default raises ValueError if the targets are no classes of these shapes, and LabelError if a class is out of
        range.
        """
        if targets.dtype not in _CLASSES or outputs.shape[:-1] != targets.shape:
            raise ValueError(
                f"{_path(self)}: cross-entropy needs targets with one class (torch.int64) for each "
                f"row of outputs, got targets {targets.dtype} {list(targets.shape)} for outputs {list(outputs.shape)}; "
                f"{_to_classes(outputs, targets)}, or define `loss(self, outputs, targets)` in the task"
            )
        try:
            return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        except IndexError:  # raised on the CPU only; a device checks labels without telling the host
            found = targets[targets != IGNORED_CLASS]
            low, high, classes = int(found.min()), int(found.max()), outputs.shape[-1]
            raise LabelError(
                f"{_path(self)}: targets from {low} to {high} are out of range, as each output has "
                f"{classes} scores, for the classes 0 to {classes - 1}; {number_classes(low)}",
                classes,
            ) from None

    def reported(self, mean: float) -> float:
        """Return the validation loss to report, given the mean of `loss` over all validation targets. The default is
        that mean.
        """
        return mean

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor | float]:
        """Return metrics of a validation batch besides loss and accuracy, by name. Each is a mean over the targets of
        the batch. The default returns no metrics.
        """
        return {}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, dataset: Dataset, device: torch.device) -> Metrics:
        """Return the metrics over all evaluation batches. Each target has the same weight.

        A task whose metrics are no means over targets overrides this method.
        """
        was_training = model.training
        model.eval()
        total, hits, count, others = 0.0, 0, 0, dict[str, float]()
        for found in validation_batches(self, dataset):
            inputs, targets = batch = found.to(device)
            with located_errors(self, model, batch):
                outputs = model(inputs)
                total += self.loss(outputs, targets).item() * targets.numel()
            if self.reports_accuracy:
                hits += int((outputs.argmax(-1) == targets).sum())
            for name, value in self.metrics(outputs, targets).items():
                others[name] = others.get(name, 0.0) + float(value) * targets.numel()
            count += targets.numel()
        model.train(was_training)
        means = {name: value / count for name, value in others.items()}
        return Metrics(self.reported(total / count), hits / count if self.reports_accuracy else None, means)


def _to_classes(outputs: Tensor, targets: Tensor) -> str:
    """Return the clause of an error that tells users how to convert targets to the form that cross-entropy needs: one
    class for each row of outputs.
    """
    if targets.shape == outputs.shape and outputs.shape[-1] > 1:
        return "turn one-hot rows into classes with `targets.argmax(-1)`"
    if targets.shape == (*outputs.shape[:-1], 1):
        return f"remove the last axis with `targets.squeeze(-1){'' if targets.dtype in _CLASSES else '.long()'}`"
    if targets.dtype in _CLASSES:
        return "give each row of outputs one class"
    return "convert classes with `targets.long()`"


def training_labels(dataset: Dataset) -> Tensor:
    """Return the labels of the training data, without those of the class that the loss ignores.

    These are all labels of an `Examples`. Of other data sets, only the labels of the first SAMPLED_BATCHES batches are
    returned.
    """
    batches = (
        [dataset.train] if isinstance(dataset, Examples) else map(partial(dataset.batch, 0), range(SAMPLED_BATCHES))
    )
    labels = torch.cat([targets.flatten() for _, targets in batches])
    return labels[labels != IGNORED_CLASS]


def number_classes(lowest: int) -> str:
    """Return the clause of an error that tells users to number the classes from 0, with one output for each class.

    lowest: lowest class of the targets. If it is negative, the clause also says that IGNORED_CLASS is the only negative
        class that the loss accepts, and ignores.
    """
    advice = "number the classes from 0, and give the model one output for each class"
    return advice if lowest >= 0 else f"{advice}; only the class {IGNORED_CLASS} is ignored, for rows without a class"


def validation_fault(dataset: Dataset, fault: Callable[[Batch, Sequence[int], str], str] = data_fault) -> str:
    """Return a text that names the first validation batch with a fault; empty if there is none.

    dataset: the data, whose validation batches are checked in order.
    fault: function that finds the fault of a batch, with the arguments of `data_fault`. The default finds numbers that
        are not finite.
    """
    before = 0
    for index, batch in enumerate(dataset.evaluation()):
        rows = range(before, before + len(batch.targets))
        if text := fault(batch, rows, "validation data"):
            return f"validation batch {index} with {text}"
        before = rows.stop
    return ""


def generator(*key: int) -> np.random.Generator:
    """Return a random generator that depends on its key alone. Different keys give independent numbers.

    key: one or more non-negative integers.
    """
    return np.random.default_rng(key)


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Return the order of the examples in one epoch."""
    return generator(seed, epoch).permutation(count)


Autocast = Literal["bfloat16"]


@dataclass(frozen=True)
class GradientPass:
    """The computation of the gradient of a batch. Apart from rounding, the result does not depend on the number of
    parts, unless a layer of the model, such as BatchNorm, computes statistics of the rows that it receives.

    task: task that provides the loss.
    parts: number of parts of the batch. Each part has its own forward and backward pass, and the gradients of all parts
        are summed.
    precision: dtype of matrix products in forward passes (torch.autocast); None: dtype of the parameters.
    """

    task: Task
    parts: int = 1
    precision: Autocast | None = None

    def backward(self, module: nn.Module, batch: Batch, weight: float) -> Tensor:
        """Add the gradient of weight * (mean loss of a batch) to the gradients of the module; return this product.

        Raises ValueError if the batch has fewer rows than the number of parts into which it is split.
        """
        rows, targets = len(batch.inputs), batch.targets.numel()
        if rows < self.parts:
            raise ValueError(
                f"accumulate: a batch of {rows} rows cannot be split into {self.parts} parts; lower accumulate"
            )
        total = torch.zeros((), device=batch.inputs.device)
        for part in range(self.parts):
            own = slice(part * rows // self.parts, (part + 1) * rows // self.parts)
            share = weight * batch.targets[own].numel() / targets if self.parts > 1 else weight
            piece = Batch(batch.inputs[own], batch.targets[own])
            with located_errors(self.task, module, piece):
                with self._autocast(batch.inputs.device):
                    outputs = module(piece.inputs)
                loss: Tensor = self.task.loss(outputs.float() if self.precision else outputs, piece.targets) * share
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return total

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=getattr(torch, self.precision))
