"""The diagnosis of a run that diverged or got worse: the first value that went wrong, its place and its usual cause.

When a loss or a gradient is not finite, the run searches batch, state, weights, loss, validation and gradients for the
first such value. Without such a loss or gradient nothing is searched, so that healthy steps cost nothing. `eigengraft
doctor` reads the result.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

import eigengraft
from eigengraft.errors import with_notes
from eigengraft.numerics import local
from eigengraft.optimizers.state.shown_state import own_state
from eigengraft.slots import StateKey

from ..tasks import Batch, Dataset, LabelError, data_fault, label_fault, validation_fault
from ..tasks.base import GradientPass
from .parallel import Ranks

WORSE = 1.5
"""Ratio of the last to the first training loss above which a run counts as having got worse.

A cross-entropy that starts at the loss of a uniform guess rises by half only if something is wrong. The noise of small
batches is far smaller.
"""

HUGE = 1e6
"""Absolute value of a number from which a later value that is not finite counts as an overflow. A product of two such
numbers is far above all usual numbers. Weights of models that train are below 1000."""

FaultPlace = Literal["batch", "state", "weight", "loss", "evaluation", "gradient", "error"]
"""The kind of value that went wrong first; "error": no wrong value was detected, but an error ended the run."""
FaultCause = Literal[
    "data",
    "validation data",
    "labels",
    "initialization",
    "learning rate",
    "precision",
    "failed root",
    "model",
    "error",
    "loss not finite",
]
"""The usual cause of a fault. "loss not finite" stands for all causes in a run that another training loop logged."""


@dataclass(frozen=True)
class Fault:
    """The first thing that went wrong in a run, as fault.json has it.

    place: kind of the value that went wrong, such as "gradient".
    cause: usual cause of such a fault.
    step: number of the step, from 1.
    layer: name of the parameter, or "<parameter>: <slot>" for state; "" for none.
    text: a sentence about value, place and cause.
    """

    place: FaultPlace
    cause: FaultCause
    step: int
    layer: str
    text: str

    @classmethod
    def of_error(cls, error: Exception, step: int) -> Fault:
        """Return the fault of an exception for which no inf or nan was found as the cause.

        step: number of the step, from 1.
        """
        text = "; ".join(with_notes(error).splitlines())
        return cls("error", "error", step, "", f"{type(error).__name__}: {text}")


@dataclass(frozen=True)
class Divergence:
    """A run at the step at which it diverged, with everything that the search for the first wrong value needs.

    batch: batch of that step, the rows of all ranks.
    rows: position of each row of the batch in the training data; None: unknown.
    step: number of that step, from 1.
    loss: training loss of that step; None: the step was not finished.
    val_loss: validation loss after that step; None: there was no evaluation.
    """

    model: nn.Module
    optimizer: eigengraft.Optimizer
    gradients: GradientPass
    dataset: Dataset
    batch: Batch
    rows: Sequence[int] | None
    step: int
    loss: float | None
    val_loss: float | None
    ranks: Ranks

    def fault(self) -> Fault:
        """Return the fault of the first value that is not finite, in the order batch, state, weight, loss, validation,
        gradient. A weight of size HUGE counts as not finite, because the numbers computed from it overflow.

        State is checked before weights: if both are wrong, a step wrote the state first and computed the weights from
        it. All ranks must call this, and all receive the same fault.
        """
        if text := data_fault(self.batch, self.rows):
            text = f"the batch of step {self.step}, `batch(seed, {self.step - 1})`, has {text}; the data are at fault"
            text += ", another learning rate cannot help"
            return Fault("batch", "data", self.step, "", text)
        if slot := self._first(self._state()):
            text = f"the state {slot} is not finite, while the batch is; a step wrote it before the weights"
            return Fault("state", "learning rate", self.step, slot, f"{text}; a smaller lr or a larger eps may help")
        if fault := self._of_weights():
            return fault
        if self.loss is not None and not math.isfinite(self.loss):
            return self._of_loss()
        if self.val_loss is not None and not math.isfinite(self.val_loss):
            return self._of_evaluation(self.val_loss)
        return self._of_gradient()

    def of_error(self, error: Exception, tolerated: int) -> Fault:
        """Return the fault that caused an error. The error has ended a step or an evaluation of a run on one process.
        An error about labels gets a note that names the rows.

        tolerated: number of consecutive refreshes of a root that may fail before the recipe raises an error.
        """
        if isinstance(error, LabelError):
            wrong = partial(label_fault, classes=error.classes)
            text = wrong(self.batch, self.rows)
            if place := f"the batch has {text}" if text else validation_fault(self.dataset, wrong):
                error.add_note(place)
            return Fault("batch", "labels", self.step, "", "; ".join(with_notes(error).splitlines()))
        if slot := next((key for key, x in self._state("failures") if bool((x > tolerated).any())), ""):
            return Fault("state", "failed root", self.step, slot, str(error))
        if isinstance(error, FloatingPointError):
            return self.fault()
        found = Fault.of_error(error, self.step)
        cause = self._of_weights()  # some losses raise an error if the outputs are not finite
        return found if cause is None else replace(cause, text=f"{cause.text}; {found.text}")

    def _of_weights(self) -> Fault | None:
        """Return the fault of a weight that is not finite or has the size HUGE; None if there is no such weight.

        The loss of a step is computed before its update. So if this loss is finite, the update of the step is at fault,
        else the update before it, or the initial weights.
        """
        size, name = self._largest_weight()
        if size < HUGE:
            return None
        text = f"the weight {name} " + (f"has numbers up to {size:.3g}" if size < math.inf else "is not finite")
        before = self.loss is None or not math.isfinite(self.loss)
        if before and self.step == 1:
            text += " before the first update; the initial weights are at fault"
            return Fault("weight", "initialization", 1, name, text)
        text += ", while the batch is finite; an update was too large, a smaller lr may help"
        return Fault("weight", "learning rate", self.step - before, name, text)

    def _of_gradient(self) -> Fault:
        named = ((name, parameter.grad) for name, parameter in self.model.named_parameters())
        name = self._first((name, own) for name, own in named if own is not None)
        if name is not None:
            text = (
                f"the loss is finite, but the gradient of {name} is not; an operation of the model has no finite "
                "derivative there, as a root of 0, or overflows"
            )
            return Fault("gradient", "model", self.step, name, text)
        sets = self.optimizer.param_sets
        name = next((name for own in sets for name in own.names if sets.skip_counts[name]), "")
        text = f"the gradient of {name} is finite, but its squares overflow; a smaller lr or a scaled loss may help"
        return Fault("gradient", "learning rate", self.step, name, text)

    def _of_evaluation(self, val_loss: float) -> Fault:
        if text := validation_fault(self.dataset):
            text = f"the evaluation read {text}; the validation data are at fault, not the training"
            return Fault("evaluation", "validation data", self.step, "", text)
        text = f"the validation loss is {val_loss} and the training loss {self.loss:.4g}"
        if fault := self._of_forward("evaluation", text):
            return fault
        text += (
            ": outputs overflow on validation data, which are finite; compare their range with that of the training "
            "data"
        )
        return Fault("evaluation", "validation data", self.step, "", text)

    def _of_loss(self) -> Fault:
        in_float32 = self._loss_in_float32()
        if in_float32 is not None:
            text = (
                f"the loss is {self.loss}, while batch and weights are finite and the same loss in float32 is "
                f"{in_float32:.4g}: a number overflows in low precision; compute that part of the model in float32"
            )
            return Fault("loss", "precision", self.step, "", text)
        when = " before the first update" if self.step == 1 else ""
        text = f"the loss is not finite{when}, while the batch and all weights are"
        return self._of_forward("loss", text) or self._of_overflow("loss", text)

    def _of_forward(self, place: FaultPlace, text: str) -> Fault | None:
        """Return the fault of the first number that is not finite in a forward pass with the batch. Return None if
        there is none, or on several ranks, where the numbers are not searched.

        The cause is an operation of the model or of the loss function that has no finite value, such as a log of 0, if
        all numbers up to this operation are below HUGE. Otherwise numbers overflow.

        place: the loss that is not finite.
        text: a clause about this loss, with which the text of the fault begins.
        """
        layer, seen, largest = ("", "", 0.0) if self.ranks.distributed else self._first_overflow()
        if largest >= HUGE:
            return self._of_overflow(place, text)
        if not seen:
            return None
        text += f"; {seen}; an operation there has no finite value, as a log of 0 or the exponential of a large number"
        return Fault(place, "model", self.step, layer, text)

    def _of_overflow(self, place: FaultPlace, text: str) -> Fault:
        """Return the fault of numbers that overflow: the learning rate, or the initial weights before the first update.
        The arguments are those of `_of_forward`.
        """
        if place == "loss" and self.step == 1:
            text += "; the initial weights or the loss are at fault, or numbers overflow"
            return Fault(place, "initialization", 1, "", text)
        size, name = self._largest_weight()
        text += f"; numbers overflow, and the largest weight is {size:.3g}, in {name}; a smaller lr may help"
        return Fault(place, "learning rate", self.step, name, text)

    def _first_overflow(self) -> tuple[str, str, float]:
        """Find the first place in a forward pass at which numbers are not finite. Return three values: the name of the
        layer, a clause about its outputs, and the largest absolute value of the finite numbers before it.

        The name is "" if the outputs of all layers are finite, so that the place is the model itself or the loss. Name
        and clause are "" if the loss is finite.
        """
        inputs, targets = self.batch.to(self.ranks.device)
        found, largest = list[tuple[str, str]](), [_size(inputs), self._largest_weight()[0]]

        def watch(name: str, layer: nn.Module, received: Sequence[Any], outputs: Any) -> None:
            if name and not found and isinstance(outputs, Tensor):
                largest.extend(_size(x) for x in received if isinstance(x, Tensor))
                if _size(outputs) == math.inf:
                    kind = type(layer).__name__
                    found.append((name, f"the outputs of {name} ({kind}) are the first that are not finite"))

        with torch.no_grad(), watched_layers(self.model, watch):
            outputs = self.model(inputs)
        largest.append(_size(outputs) if isinstance(outputs, Tensor) else 0.0)
        if largest[-1] == math.inf:
            found.append(("", "the outputs of the model are not finite"))
        elif math.isfinite(self.gradients.task.loss(outputs, targets).item()):
            found = [("", "")]  # an infinite number in a layer, as in a mask, does no harm
        else:
            found.append(("", "the outputs of the model are finite too, and their loss is not"))
        return *found[0], max(filter(math.isfinite, largest))

    def _largest_weight(self) -> tuple[float, str]:
        """Return the largest absolute value of a weight over all ranks, and the name of the parameter that has it.

        A number that is not finite counts as infinity. Frozen parameters count only if they have such a number, because
        they may be constants, such as a mask of large negative numbers.
        """
        sizes = [(_size(local(own)), name, own.requires_grad) for name, own in self.model.named_parameters()]
        trained = [(size, name) for size, name, trains in sizes if trains or size == math.inf]
        largest = max(trained, key=itemgetter(0), default=(0.0, ""))
        return max(self.ranks.all_gather(largest), key=itemgetter(0))

    def _loss_in_float32(self) -> float | None:
        """Return the loss of the batch in float32 if the run uses a lower precision and this loss is finite, else None.

        Returns None on several processes too, because the parameters of a layer may be sharded over all of them.
        """
        low = [p for p in self.model.parameters() if p.is_floating_point() and p.element_size() < 4]
        if self.ranks.distributed or (self.gradients.precision is None and not low):
            return None
        model = copy.deepcopy(self.model).float() if low else self.model
        inputs, targets = self.batch.to(self.ranks.device)
        with torch.no_grad():
            loss = self.gradients.task.loss(model(inputs.float() if low else inputs), targets).item()
        return loss if math.isfinite(loss) else None

    def _state(self, role: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each slot, which is a state tensor of a stage. A name is "<parameter>: <slot>".

        Averaged iterates are left out, because they hold weights.

        role: declared role of the slots to yield, such as "failures"; None: all slots.
        """
        for param_set in self.optimizer.param_sets:
            roles = {str(key): slot.role for own in param_set.stack_states for key, slot in own.slots()}
            for name, parameter in zip(param_set.names, param_set.parameters, strict=True):
                for text, x in own_state(self.optimizer.state[parameter]).items():
                    key = StateKey.parse(text)
                    declared = roles.get(str(key._replace(block=None, part="")))
                    if key.block is not None and role in (None, declared):
                        yield f"{name}: {text}", x.float() if x.element_size() < 2 else x  # 8 bits lack isfinite

    def _first(self, named: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first tensor with an entry that is not finite on any rank, None if all are finite."""
        found = next((name for name, own in named if not bool(torch.isfinite(local(own)).all())), None)
        return next((name for name in self.ranks.all_gather(found) if name is not None), None)


def _size(x: Tensor) -> float:
    """Return the largest absolute number of a tensor; 0 for a tensor of integers or without entries. NaN counts as
    infinity.
    """
    size = float(x.detach().abs().max()) if x.numel() and (x.is_floating_point() or x.is_complex()) else 0.0
    return math.inf if math.isnan(size) else size


@contextmanager
def watched_layers(
    model: nn.Module, watch: Callable[[str, nn.Module, Sequence[Any], Any], None]
) -> Iterator[Collection[str]]:
    """Call `watch(name, layer, inputs, outputs)` after each call of a layer in the `with` block. Yield the names of
    all layers.

    A layer is a module without children. Its name is "" if it is the model itself.
    """

    def hook(name: str) -> Callable[[nn.Module, Sequence[Any], Any], None]:
        return lambda layer, inputs, outputs: watch(name, layer, inputs, outputs)

    layers = {name: layer for name, layer in model.named_modules() if not list(layer.children())}
    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def worse_than_at_first(
    first: float | None, last: float | None, usual: float | None, name: str = "training loss"
) -> str:
    """Return a sentence about a loss that ended above WORSE times its first value, else an empty text.

    The text is also empty if one of the losses is None, that is unknown.

    first: loss of the first step.
    last: loss of the last row of metrics.
    usual: median of several losses at the end of the run. It must exceed the limit too, so that a single spike does not
        count.
    name: name of the loss in the sentence.
    """
    if first is None or last is None or usual is None or not 0 < WORSE * first < min(last, usual):
        return ""
    return f"the {name} rose from {first:.4g} at first to {last:.4g} at the end; a smaller lr may help"
