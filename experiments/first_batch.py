"""Numbers about the first batch of a run, computed with the initial weights of its model.

The doctor uses them to check whether inputs and targets are normalized, whether the first loss is far above that of a
guess, and where the gradient of a layer becomes 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .tasks import Dataset, Task
from .tasks.base import IGNORED_CLASS, loss_fault, training_labels
from .training.divergence import watched_layers
from .training.experiment import Experiment
from .training.train import isolated_run

UNSCALED = 1e3
"""Ratio of the largest number of one input column to that of a usual column, or to 1 if this is less, above which
inputs count as not normalized. Pixels from 1 to 255 and standardized columns are far below. Inputs also count as not
normalized if all their numbers are below 1 / UNSCALED.
"""
UNEVEN = 30
"""Ratio of the root mean square of one input column to that of a usual column, from which the column is a finding if
the first loss is large because of it, or the model learned poorly and nothing else was found.

Columns of digits differ by less than 10, and standardized columns by less than 20, even if one row of 32 has a value of
100. On a table of four classes, a column of ratio 42 lowered the accuracy from 0.92 to 0.54.
"""
LARGE_START = 3
"""Ratio of the first loss to that of a uniform guess among the classes, above which inputs or initial weights count as
too large.
"""
FAR_START = 30
"""Ratio of the first loss of a regression to the loss of a constant guess, the mean of the targets, above which the
first loss counts as large. It is larger than LARGE_START, because models learn targets with a small spread well in
spite of a large ratio. A large first loss is a finding only if the last loss is still above WORSE times that of the
guess."""
LARGE_LAYER = 10
"""A matrix is named as the cause of a large first loss if its relative size (`relative_size`) is at least this number,
and at least this many times the relative size of each other matrix."""


class FirstBatch(NamedTuple):
    """Numbers about the first batch of a run, computed with the initial weights of the model.

    loss: loss of the batch.
    unscaled: a sentence about inputs that are not normalized; "" if they are, or nearly.
    classes: number of classes of the task; 0 if targets are no classes, or the loss of a uniform guess is not known.
    constant: loss of a constant guess, which is the same for each row: uniform among the classes, or in a regression
        the mean of the targets; infinity if it is not known.
    guess: validation loss that the task reports for a uniform guess among the classes; infinity without classes.
    fault: a sentence about a loss that does not fit the outputs; "" if none was found.
    single: a sentence about training labels that are all of one class; "" if there are more classes, or no labels.
    uneven: a sentence about a column that is much larger than the others; "" if there is none.
    even_loss: loss of the batch if all such columns are scaled to the usual size; `loss` if there are none.
    large_layer: name of the matrix whose initial weights alone make the loss large; "" if there is none.
    large_text: a clause about `large_layer`; "" if there is none.
    offset: a sentence about targets of a regression that are so large that the loss is large; "" if they are not.
    unchecked: a clause about the comparison with a uniform guess, with the reason, if it is not possible; else "".
    """

    loss: float
    unscaled: str
    classes: int
    constant: float
    guess: float
    fault: str
    single: str
    uneven: str
    even_loss: float
    large_layer: str
    large_text: str
    offset: str
    unchecked: str

    @property
    def is_large(self) -> bool:
        """True if the loss is far above that of a uniform guess among the classes."""
        return self.classes > 1 and LARGE_START * self.constant < self.loss < math.inf

    @property
    def is_large_by_columns(self) -> bool:
        """True if the loss is far above that of a uniform guess only because some columns are larger than others."""
        return self.is_large and bool(self.uneven) and self.even_loss <= LARGE_START * self.constant


def first_batch(experiment: Experiment, model: nn.Module) -> FirstBatch:
    """Compute the outputs and the loss of an experiment's first batch, and return the numbers of a `FirstBatch`.

    model: model of the experiment with its initial weights, which are not changed.
    """
    task = experiment.task
    with isolated_run(experiment), torch.no_grad():
        data = task.load()
        inputs, targets = data.batch(experiment.seed, 0)
        outputs = model(inputs)
        loss = task.loss(outputs, targets).item()
        uneven, even = uneven_inputs(inputs, data.columns)
        even_loss = task.loss(model(even), targets).item() if uneven else loss
    unchecked, classes, constant = "", _classes(outputs, targets), math.inf
    if classes > 1 and not (constant := _of_uniform(task, outputs, targets)):
        unchecked = (
            "whether losses are above that of a uniform guess among the classes, because the `loss` of the task for "
            "such a guess is not a positive number that is the same for all batches"
        )
        classes, constant = 0, math.inf
    elif classes < 2:
        constant = _of_mean(task, outputs, targets)
    guess = task.reported(constant) if classes > 1 else math.inf
    fault = loss_fault(task, outputs, targets)
    single = _single_class(data, targets) if classes or task.reports_accuracy else ""
    layer, text = "", ""
    if 0 < constant < math.inf and not loss <= (LARGE_START if classes else FAR_START) * constant:
        with isolated_run(experiment), torch.no_grad():
            layer, text = _large_layer(model, lambda outputs: task.loss(outputs, targets).item(), inputs, constant)
    offset = _offset(outputs, targets) if not layer and 0 < FAR_START * constant < loss and not classes else ""
    return FirstBatch(
        loss=loss,
        unscaled=unscaled_inputs(inputs, data.columns),
        classes=classes,
        constant=constant,
        guess=guess,
        fault=fault,
        single=single,
        uneven=uneven,
        even_loss=even_loss,
        large_layer=layer,
        large_text=text,
        offset=offset,
        unchecked=unchecked,
    )


def _classes(outputs: Any, targets: Tensor) -> int:
    """Return the number of classes if each target is a class and has a row of outputs; else 0."""
    if not isinstance(outputs, Tensor) or targets.dtype not in (torch.int64, torch.uint8):
        return 0
    return outputs.shape[-1] if outputs.shape[:-1] == targets.shape else 0


def _of_uniform(task: Task, outputs: Tensor, targets: Tensor) -> float:
    """Return the task's loss for outputs that give all classes the same probability. Return 0 if it is not known.

    It is known if it is positive, and the same for the whole batch and for its first half. A loss that is a sum over
    rows is smaller for the half. The outputs are logarithms of probabilities, so that the cross-entropy and a loss that
    expects such logarithms have the same value.
    """
    uniform = torch.full_like(outputs, -math.log(outputs.shape[-1]))
    half = len(targets) // 2
    try:
        whole, part = task.loss(uniform, targets).item(), task.loss(uniform[:half], targets[:half]).item()
    except Exception:  # a loss of the user may accept only outputs of the model
        return 0.0
    return whole if 0 < whole < math.inf and (math.isclose(whole, part, rel_tol=1e-4) or half == 0) else 0.0


def loss_of_frequencies(experiment: Experiment, classes: int) -> float:
    """Return the validation loss that the task reports if all outputs are the logarithms of the class frequencies among
    the training labels. Return infinity if this loss is not known.

    One label of each class is added to the training labels, so that no frequency is 0.
    """
    task, total, count = experiment.task, 0.0, 0
    with isolated_run(experiment), torch.no_grad():
        data = task.load()
        labels = training_labels(data).long()
        known = labels[(labels >= 0) & (labels < classes)]
        rows = torch.cat([known, torch.arange(classes)]).bincount()
        outputs = (rows / rows.sum()).log()
        for _, targets in data.evaluation():
            total += task.loss(outputs.expand(*targets.shape, classes), targets).item() * targets.numel()
            count += targets.numel()
    found = task.reported(total / count)
    return found if math.isfinite(found) else math.inf


def relative_size(parameter: Tensor) -> float:
    """Return the norm of a parameter divided by a usual norm. The usual norm is that of `Record.shares`."""
    norm = float(parameter.detach().double().norm())  # squares of large weights overflow float32
    return norm / math.sqrt((parameter.shape[0] if parameter.ndim else 1) / 3)


def _large_layer(model: nn.Module, loss: Callable[[Any], float], inputs: Any, constant: float) -> tuple[str, str]:
    """Return the name of the matrix whose initial weights alone make the first loss large, and a clause about it.
    Return "" twice if there is no such matrix.

    Two conditions must hold:

    - The relative size (`relative_size`) of the matrix is at least LARGE_LAYER, and at least LARGE_LAYER times that of
      each other matrix.
    - If the matrix is scaled down, the loss is at most LARGE_START times `constant`. The matrix then has the largest
      relative size of the other matrices, but at least 1.

    loss: function that returns the loss of outputs.
    inputs: inputs of the first batch.
    constant: loss of a constant guess, as in `FirstBatch`.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    sizes = {name: relative_size(p) for name, p in matrices.items()}
    name = max(sizes, key=sizes.__getitem__, default="")
    usual = max([1.0, *(size for layer, size in sizes.items() if layer != name)])
    if not name or not LARGE_LAYER * usual <= sizes[name] < math.inf:
        return "", ""
    scaled = matrices[name] * (usual / sizes[name])
    try:
        smaller = loss(torch.func.functional_call(model, {name: scaled}, (inputs,)))
    except Exception:  # some models, such as compiled ones, accept no other weights
        return "", ""
    if not smaller <= LARGE_START * constant:
        return "", ""
    text = f"; the weights of {name} begin {sizes[name]:.3g} times as large as usual, those of other matrices at most"
    return name, f"{text} {usual:.3g} times"


def _single_class(data: Dataset, targets: Tensor) -> str:
    """Return a sentence if all training labels are of one class; else "".

    targets: labels of the first batch. The other labels are read only if all labels of this batch are of one class.
    """
    if targets.is_floating_point() or not are_equal(targets[targets != IGNORED_CLASS]):
        return ""
    found = training_labels(data)
    return f"all {len(found)} training labels are of class {int(found[0])}" if are_equal(found) else ""


def are_equal(x: Tensor) -> bool:
    """Return True if a tensor has entries, and all are equal."""
    return x.numel() > 0 and bool((x == x.flatten()[0]).all())


def _of_mean(task: Task, outputs: Tensor, targets: Tensor) -> float:
    """Return the loss in a regression if all outputs are the mean of the targets over the batch.

    Return infinity if outputs and targets differ in shape, or if targets are no floating-point numbers.
    """
    if outputs.shape != targets.shape or not targets.is_floating_point():
        return math.inf
    return task.loss(targets.mean(0, keepdim=True).expand_as(outputs), targets).item()


def _offset(outputs: Tensor, targets: Tensor) -> str:
    """Return a sentence if the targets of a regression are much larger than the outputs of the model; else "".

    This is so if the root mean square of the targets exceeds FAR_START times that of the outputs.
    """
    size = float(targets.double().square().mean().sqrt())
    if not size > FAR_START * float(outputs.double().square().mean().sqrt()):
        return ""
    mean, spread = float(targets.double().mean()), float(targets.double().std(correction=0))
    return (
        f"targets are not normalized: in the first batch their mean is {mean:.3g} and their standard deviation "
        f"{spread:.3g}, while the model begins with outputs near 0"
    )


def unscaled_inputs(inputs: Tensor, names: Sequence[str]) -> str:
    """Return a sentence about inputs that are not normalized. Return "" if they are, or nearly.

    The size of a column is its largest absolute number. Inputs are not normalized if the size of a column exceeds
    UNSCALED, or UNSCALED times the lower quartile of the sizes of all columns, or if no column exceeds 1 / UNSCALED.

    Columns of zeros, such as pixels at an edge, do not count. If inputs have other shapes than [B, columns], such as
    those of images, all their numbers count as one column.

    names: names of the columns; (): columns are numbered.
    """
    if not inputs.is_floating_point() or not inputs.numel():
        return ""
    sizes = (inputs if inputs.ndim == 2 else inputs.reshape(-1, 1)).abs().amax(0).float()
    filled, index = sizes[sizes > 0], int(sizes.argmax())
    if not len(filled):
        return ""
    largest, usual = float(sizes[index]), float(filled.quantile(0.25, interpolation="lower"))
    small = largest < 1 / UNSCALED
    if not small and largest <= UNSCALED * min(usual, 1.0):
        return ""
    where = f"column {index}{f' ({names[index]})' if index < len(names) else ''} has" if len(sizes) > 1 else "they have"
    text = f"inputs are not normalized: {where} numbers up to {largest:.3g} in the first batch, and "
    if small and len(sizes) > 1:
        return f"{text}those of the other columns are smaller"
    return text + (
        f"a quarter of the columns at most {usual:.3g}" if largest > UNSCALED * usual else "numbers near 1 are usual"
    )


def uneven_inputs(inputs: Tensor, names: Sequence[str]) -> tuple[str, Tensor]:
    """Return a sentence about columns that are much larger than usual columns, and the inputs with these columns
    divided so that they have the usual size. The sentence is "" if there are none.

    The size of a column is its root mean square. A column is much larger if its size is at least UNEVEN times the usual
    size. The usual size is the median over columns of the root mean square of their entries other than 0. So a column
    with few entries of 1 and a column of ones count alike. Inputs of other shapes than [B, columns] have no columns.

    names: names of the columns; (): columns are numbered.
    """
    if inputs.ndim != 2 or not inputs.is_floating_point() or not inputs.numel():
        return "", inputs
    squares, filled = inputs.double().square().sum(0), (inputs != 0).sum(0)
    sizes = (squares / len(inputs)).sqrt()
    others = (squares / filled).sqrt()[filled > 0]
    usual, index = float(others.median()) if len(others) else math.nan, int(sizes.argmax())
    if not sizes[index] >= UNEVEN * usual:
        return "", inputs
    name = f" ({names[index]})" if index < len(names) else ""
    text = f"inputs are not normalized: column {index}{name} has a root mean square of {float(sizes[index]):.3g} in the"
    ratios = (sizes / usual).where(sizes >= UNEVEN * usual, 1.0)
    return f"{text} first batch, and a usual column {usual:.3g}", (inputs / ratios).to(inputs.dtype)


class GradientEnd(NamedTuple):
    """The place in the model at which the gradient of a layer becomes 0.

    text: a clause about the place; "" if the place is not known.
    remedy: advice for this place; "" if general advice applies.
    """

    text: str = ""
    remedy: str = ""


class _Call(NamedTuple):
    """A call of a module without children in a forward pass, with its first argument and its result."""

    name: str
    module: nn.Module
    received: Tensor
    returned: Tensor


def gradient_end(experiment: Experiment, model: nn.Module, parameter: str) -> GradientEnd:
    """Return the place at which the gradient of a parameter becomes 0 in the first batch, with the initial weights.

    parameter: name of a parameter whose gradient is missing or 0.
    """
    task, calls = experiment.task, list[_Call]()
    layer = parameter.rpartition(".")[0]

    def record(name: str, module: nn.Module, received: Sequence[Any], returned: Any) -> None:
        if received and isinstance(received[0], Tensor) and isinstance(returned, Tensor):
            for x in (received[0], returned):
                if x.requires_grad:
                    x.retain_grad()
            calls.append(_Call(name, module, received[0], returned))

    with isolated_run(experiment), watched_layers(model, record) as layers:
        inputs, targets = task.load().batch(experiment.seed, 0)
        task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    place = next((number for number, call in enumerate(calls) if call.name == layer), None)
    if place is None:
        found = f"; the forward pass does not call {layer}" if layer in layers else ""
        return GradientEnd(found, f"use {layer} in `forward`, or remove it" if found else "")
    own = calls[place]
    if not own.received.any():
        if own.received is inputs or not inputs.any():
            return GradientEnd("; all inputs of the first batch are 0", "check how the inputs are read and scaled")
        return GradientEnd(
            f"; all inputs of {layer} are 0 in the first batch", "check the weights and activations before this layer"
        )
    if own.returned.grad is None:
        return GradientEnd(
            f"; no gradient of the loss reaches the outputs of {layer}",
            f"use the outputs of {layer} in the loss, without `detach`, `no_grad`, `item`, `argmax` or rounding",
        )
    end = next((call for call in calls[place:] if call.returned.grad is not None and call.returned.grad.any()), None)
    if end is None or end is own or any(not p.any() for p in end.module.parameters()):
        return GradientEnd()
    before = calls[calls.index(end) - 1]
    flat = end.received if next(end.module.parameters(), None) is None else before.returned
    which = f"{end.name} ({type(end.module).__name__})" if flat is end.received else f"a function after {before.name}"
    low, high = float(flat.detach().min()), float(flat.detach().max())
    return GradientEnd(
        f"; the gradient becomes 0 in {which}, whose inputs are from {low:.3g} to {high:.3g} in the first batch",
        "bring these inputs near 0, by normalized inputs of the model or by smaller initial weights and biases of the "
        "layers before, or use an activation that is not flat at these inputs",
    )
