"""The laws of tasks: reproducible batches and weights, metrics over all validation targets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from eigengraft.errors import counted, name_some

from .laws import Case, Law, LawError, in_parentheses, require, the_declaration_survives

if TYPE_CHECKING:
    from eigengraft.experiments.tasks import Batch, Examples, Task

_CPU = torch.device("cpu")


def the_data_are_batches(case: Case[Task]) -> None:
    """The method `load` returns a dataset with a fingerprint, whose training and validation data are batches."""
    from eigengraft.experiments.tasks.base import training_batch, validation_batches

    with _faults_of_task(case):
        data = case.component.new_data()
        training_batch(case.component, data, 0, 0)
        first = next(validation_batches(case.component, data), None)
        require(first is not None, "validation batches", "at least one", "none")


def the_model_accepts_the_batches(case: Case[Task]) -> None:
    """The method `build` returns a model that maps inputs of training and validation batches to a tensor."""
    from eigengraft.experiments.tasks.base import located_errors

    with _faults_of_task(case):
        data, model = case.component.new_data(), case.component.new_model(0).eval()
        for name, batch in (("training", data.batch(0, 0)), ("validation", next(iter(data.evaluation())))):
            with located_errors(case.component, model, batch), torch.no_grad():
                outputs: object = model(batch.inputs)
            got = "nothing" if outputs is None else type(outputs).__name__
            require(isinstance(outputs, Tensor), f"outputs for a {name} batch", "a tensor", got)


@contextmanager
def _faults_of_task(case: Case[Task]) -> Iterator[None]:
    """Replace a TaskError in the `with` statement by a LawError. Both name the method or the layer that failed."""
    from eigengraft.experiments.tasks import TaskError

    try:
        yield
    except TaskError as error:
        raise LawError(str(error).removeprefix(f"{case.who}: ")) from error


def batches_are_a_pure_function_of_seed_and_step(case: Case[Task]) -> None:
    """Batches are equal when the data are read again; other seeds and steps give other batches."""
    from eigengraft.experiments.first_batch import are_equal

    first, second = case.component.load(), case.component.load()
    for step in (7, 0, 500):
        same = _equal(first.batch(3, step), second.batch(3, step))
        require(same, f"batch(3, {step}), from data that are read again", "the same batch", "another")
    same = _equal(first.batch(3, 7), first.batch(3, 7))
    require(same, "batch(3, 7), called twice", "the same batch", "another")
    one = first.batch(3, 7).inputs
    for name, other in (("seed", first.batch(4, 7)), ("step", first.batch(3, 8))):
        cause = f"does batch() use the {name}?"
        if bool((one == one[:1]).all()):
            value = f"entries are all {one.flatten()[0]:g}" if are_equal(one) else "rows are all equal"
            cause = f"the cause is not the {name}, but the inputs, whose {value}; does load() fill them with data?"
        different = not _same(one, other.inputs)
        require(different, f"the inputs of the batch of another {name}", "others", "the same", in_parentheses(cause))


def the_data_are_finite(case: Case[Task]) -> None:
    """All numbers of the first training batches, of examples in memory, and of the validation batches are finite."""
    from eigengraft.experiments.tasks import Examples, data_fault, validation_fault
    from eigengraft.experiments.tasks.base import SAMPLED_BATCHES

    data = case.component.load()
    whole = data_fault(data.train) if isinstance(data, Examples) else ""
    require(not whole, "the training data", "finite numbers", whole)
    for step in range(SAMPLED_BATCHES):
        fault = data_fault(data.batch(0, step), data.batch_rows(0, step))
        what = f"batch(0, {step}), the batch of seed 0 in step {step + 1} of a run"
        require(not fault, what, "finite numbers", fault)
    fault = validation_fault(data)
    require(not fault, "the data for validation", "finite numbers", fault)


def validation_rows_are_not_trained_on(case: Case[Task]) -> None:
    """At least one row of the validation examples is not a row of the training examples.

    Single rows may occur in both, because real tables have equal rows.
    """
    data = cast("Examples", case.component.load())
    known = set(_rows(data.train))
    same = all(row in known for row in _rows(data.validation))
    cause = in_parentheses("did load() give the same rows twice, or choose the validation rows before a shuffle?")
    require(not same, "the validation rows", "rows that are not trained on", "training rows alone", cause)


def _without_rows(case: Case[Task]) -> str | None:
    """Return the reason why the rows of a task cannot be compared, or None if they are in memory."""
    from eigengraft.experiments.tasks import Examples

    return None if isinstance(case.component.load(), Examples) else "its data are no Examples"


def _rows(batch: Batch) -> Iterator[tuple[bytes, ...]]:
    """Yield the bytes of the inputs and targets of each row."""
    parts = (part.reshape(len(part), -1).contiguous().view(torch.uint8).numpy() for part in batch)
    return zip(*([row.tobytes() for row in part] for part in parts), strict=True)


def the_data_have_a_fingerprint(case: Case[Task]) -> None:
    """The fingerprint is the same each time the data are read, and contains the sha256 of the data."""
    one, two = case.component.load().fingerprint, case.component.load().fingerprint
    require(one == two, "the fingerprint of data that are read again", f"{one}", two)
    require(len(one.sha256) == 64, "sha256 of the fingerprint", "64 hexadecimal digits", f"'{one.sha256}'")


def initial_weights_depend_on_the_seed_alone(case: Case[Task]) -> None:
    """Equal seeds give equal weights, in any state of torch's global generator, and other seeds give other weights."""
    first = case.component.new_model(1).state_dict()
    with torch.random.fork_rng(devices=[]):
        torch.rand(5)
        again = case.component.new_model(1).state_dict()
    same = all(torch.equal(first[name], value) for name, value in again.items())
    require(same, "initial weights of the same seed", "the same bits", "other bits")
    others = case.component.new_model(2).state_dict()
    differ = any(not torch.equal(first[name], value) for name, value in others.items())
    cause = in_parentheses("does build() set a seed?")
    require(differ, "initial weights of another seed", "other weights", "the same", cause)


def the_loss_is_a_mean_over_targets(case: Case[Task]) -> None:
    """The loss of a batch is the mean of the losses of its two halves, weighted by numbers of targets.

    The tolerance is 1e-4, for float32.
    """
    from eigengraft.experiments.tasks.base import located_errors

    batch = case.component.load().batch(0, 0)
    inputs, targets = batch
    model, half = case.component.new_model(0).eval(), len(inputs) // 2
    require(half > 0, "rows of a batch", "at least 2", len(inputs))
    with _faults_of_task(case), located_errors(case.component, model, batch), torch.no_grad():
        outputs = model(inputs)
        whole, total = float(case.component.loss(outputs, targets)), 0.0
        for rows in (slice(None, half), slice(half, None)):
            total += float(case.component.loss(outputs[rows], targets[rows])) * targets[rows].numel() / targets.numel()
    _require_finite(whole, _FIRST)
    _require_finite(total, "a half of batch(0, 0)")
    fine = math.isclose(whole, total, rel_tol=1e-4, abs_tol=1e-7)
    expected = f"{total:.6g}, the mean over targets, computed from the two halves of the batch"
    require(fine, "the loss of a batch", expected, f"{whole:.6g}")


def labels_are_classes_with_a_score(case: Case[Task]) -> None:
    """Training and validation labels are integer classes. Each class has a score in the outputs, and at least two
    classes occur.

    For a task that defines its own loss, targets count as labels only if the task reports an accuracy, and
    floating-point targets are not checked. The class that torch ignores is never checked.
    """
    from eigengraft.experiments.tasks import Task
    from eigengraft.experiments.tasks.base import IGNORED_CLASS, number_classes, training_labels

    task, data = case.component, case.component.load()
    first = data.batch(0, 0)
    with torch.no_grad():
        outputs = task.new_model(0)(first.inputs)
    own = type(task).loss is not Task.loss
    if own and outputs.shape[:-1] != first.targets.shape:
        return
    validation = torch.cat([targets.flatten() for _, targets in data.evaluation()])
    for name, labels in (("training labels", training_labels(data)), ("validation labels", validation)):
        if labels.is_floating_point() and own:
            continue
        integer = labels.dtype in (torch.int64, torch.uint8)
        require(integer or own, name, "classes of dtype torch.int64", f"{labels.dtype}")
        labels, classes = labels[labels != IGNORED_CLASS], outputs.shape[-1]
        require(len(labels), name, "classes", f"only {IGNORED_CLASS}, which is ignored")
        low, high = int(labels.min()), int(labels.max())
        expected = f"classes from 0 to {classes - 1}, because the model has {counted(classes, 'output')} for each label"
        remedy = in_parentheses(number_classes(low))
        require(low >= 0 and high < classes, name, expected, f"classes from {low} to {high}", remedy)
        remedy = in_parentheses("are the rows sorted by class? shuffle them before they are split")
        require(low < high, name, "two classes or more", f"class {low} alone", remedy)


def _without_labels(case: Case[Task]) -> str | None:
    """Return the reason why a task has no labels, or None if it has labels.

    A task has labels if it uses the cross-entropy or reports an accuracy.
    """
    from eigengraft.experiments.tasks import Task

    has = type(case.component).loss is Task.loss or case.component.reports_accuracy
    return None if has else "its targets are not classes"


def the_loss_fits_the_outputs(case: Case[Task]) -> None:
    """The loss applies no softmax to outputs that are probabilities, and compares each output with the target of the
    same row alone. See `loss_fault`.
    """
    from eigengraft.experiments.tasks.base import loss_fault

    data, model = case.component.load(), case.component.new_model(0).eval()
    for name, batch in (("training", data.batch(0, 0)), ("validation", next(data.evaluation()))):
        with torch.no_grad():
            fault = loss_fault(case.component, model(batch.inputs), batch.targets)
        require(not fault, f"the loss of a {name} batch", "one that fits the outputs", f"one that does not: {fault}")


def the_loss_is_a_number_with_gradients(case: Case[Task]) -> None:
    """The loss is one finite number, and every trainable parameter gets a finite gradient."""
    from eigengraft.experiments.tasks.base import located_errors

    batch, model = case.component.load().batch(0, 0), case.component.new_model(0)
    with _faults_of_task(case), located_errors(case.component, model, batch):
        loss = case.component.loss(model(batch.inputs), batch.targets)
    got = type(loss).__name__
    require(isinstance(loss, Tensor), "loss()", "a tensor", got, in_parentheses("return it without item() or float()"))
    require(loss.ndim == 0, "the loss", "one number, of shape []", f"a tensor of shape {list(loss.shape)}")
    _require_finite(float(loss.detach()), _FIRST)
    cause = in_parentheses("does loss() or the model call detach(), `.data` or torch.no_grad()?")
    require(loss.requires_grad, "the loss", "a tensor with gradients", "one without", cause)
    loss.backward()  # type: ignore[no-untyped-call]
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unused := [name for name, gradient in trained.items() if gradient is None]:
        raise LawError(f"the loss does not depend on {name_some(unused, 4)}; use these parameters, or remove them")
    for name, gradient in trained.items():
        fine = gradient is not None and bool(gradient.isfinite().all())
        require(fine, f"the gradient of {name}", "finite numbers", "nan or inf")


def metrics_are_means_over_all_validation_targets(case: Case[Task]) -> None:
    """The metrics of `evaluate` are means of the task's loss in which every target has the same weight, for any sizes
    of batches. The tolerance is 1e-5, for float32.
    """
    data, model = case.component.load(), case.component.new_model(0).eval()
    total, hits, count = 0.0, 0, 0
    names = set()
    for place, (inputs, targets) in enumerate(data.evaluation()):
        with torch.no_grad():
            outputs: Tensor = model(inputs)
        names.add(tuple(case.component.metrics(outputs, targets)))
        loss = float(case.component.loss(outputs.double(), targets))
        _require_finite(loss, f"batch {place} of the data for validation")
        total += loss * targets.numel()
        hits += int((outputs.argmax(-1) == targets).sum()) if case.component.reports_accuracy else 0
        count += targets.numel()
    metrics = case.component.evaluate(model, data, _CPU)
    mean = case.component.reported(total / count)
    fine = math.isclose(metrics.val_loss, mean, rel_tol=1e-5)
    require(fine, "val_loss", f"{mean:.6g}, the mean over all targets", f"{metrics.val_loss:.6g}")
    accuracy = hits / count if case.component.reports_accuracy else None
    require(metrics.val_accuracy == accuracy, "val_accuracy", f"{accuracy}", metrics.val_accuracy)
    require(len(names) == 1, "names of further metrics", "the same in every validation batch", sorted(names))
    unreal = [name for name, value in metrics.others.items() if not math.isfinite(value)]
    require(not unreal, "further metrics", "finite numbers", f"others for {unreal}")


def evaluation_repeats_and_leaves_the_model_training(case: Case[Task]) -> None:
    """Two evaluations of one model give the same metrics, and leave the model in training mode."""
    data, model = case.component.load(), case.component.new_model(0)
    one, two = case.component.evaluate(model, data, _CPU), case.component.evaluate(model, data, _CPU)
    # two metrics with nan are not equal
    require(one == two or repr(one) == repr(two), "metrics of the same weights, computed again", f"{one}", two)
    require(model.training, "the model after evaluate()", "training mode", "evaluation mode")


_FIRST = "batch(0, 0), the batch of seed 0 in step 1 of a run"


def _require_finite(loss: float, batch: str) -> None:
    require(math.isfinite(loss), f"the loss of {batch}", "a finite number", loss)


def _equal(one: Batch, two: Batch) -> bool:
    return _same(one.inputs, two.inputs) and _same(one.targets, two.targets)


def _same(one: Tensor, two: Tensor) -> bool:
    """Return True if two tensors have the same numbers. NaN is the same as NaN."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return bool(((one == two) | (one.isnan() & two.isnan())).all())


def input_notes(task: Task) -> Iterator[str]:
    """Yield a sentence about inputs of the first batch that are not normalized, by the rules of `eigengraft doctor`.

    This is no law, because a model may normalize its inputs itself.
    """
    from eigengraft.experiments.first_batch import uneven_inputs, unscaled_inputs

    data = task.load()
    inputs = data.batch(0, 0).inputs
    if text := unscaled_inputs(inputs, data.columns) or uneven_inputs(inputs, data.columns)[0]:
        yield f"{text}; normalize them in load(), unless the model does"


TASK_LAWS: tuple[Law[Case[Task]], ...] = (
    Law(the_data_are_batches, decisive=True),
    Law(the_model_accepts_the_batches, decisive=True),
    Law(the_declaration_survives),
    Law(the_data_are_finite),
    Law(validation_rows_are_not_trained_on, skip=_without_rows),
    Law(batches_are_a_pure_function_of_seed_and_step),
    Law(the_data_have_a_fingerprint),
    Law(initial_weights_depend_on_the_seed_alone),
    Law(labels_are_classes_with_a_score, skip=_without_labels),
    Law(the_loss_fits_the_outputs),
    Law(the_loss_is_a_number_with_gradients),
    Law(the_loss_is_a_mean_over_targets),
    Law(metrics_are_means_over_all_validation_targets),
    Law(evaluation_repeats_and_leaves_the_model_training),
)
