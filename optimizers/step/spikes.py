"""Spikes: steps whose loss or gradient norm is far above that of the steps before, found on the device without a wait.

The window of values, the counts and the decision are tensors on the device of the parameters. On a CPU the host reads
the decision, so that a step without a spike has the bits of a step without this check. On a device the host reads
nothing in the step: the decision is a mask, or a factor that is 1 without a spike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eigengraft.distributed.rank_group import RankGroup
from eigengraft.numerics import has_values, kept_on_device, may_branch_on_values, number_like

from ..write.failure import Spike
from .gradients import multiply_gradients
from .inputs import StepInputs
from .step import ParamSet, ReadySteps


class SpikeCounts(NamedTuple):
    """The present numbers of a spike check.

    spikes: number of spikes so far.
    entered: number of values that have entered the window so far.
    mean, deviation: mean and standard deviation of the values in the window.
    bound: the largest value that is no spike; inf if the window has too few values.
    """

    spikes: int
    entered: int
    mean: float
    deviation: float
    bound: float


class SpikeCheck:
    """Finds the steps of an optimizer that are spikes, and changes these steps.

    A spike is a step in which a measure, the loss or the gradient norm, is far above its last finite values. These
    values are called the window.

    rule: the rule of the recipe. It says which values are spikes and how their steps change.
    values: `[window]` float64 on the device, a ring buffer. Places without a value are 0.
    entered: 0-d int64 on the device, number of values that have entered. The next place is `entered` mod `window`.
    spikes: 0-d int64 on the device, number of spikes.
    """

    def __init__(self, rule: Spike) -> None:
        self.rule = rule
        self._place(torch.zeros(rule.window, dtype=torch.float64, device="cpu"), 0, 0)

    def _place(self, values: Tensor, entered: int, spikes: int) -> None:
        self.values, self._places = values, torch.arange(self.rule.window, dtype=torch.int64, device="cpu")
        self.entered, self.spikes = (torch.full((), n, dtype=torch.int64, device="cpu") for n in (entered, spikes))

    def to(self, device: torch.device) -> None:
        """Move the window to a device, if it is on another device."""
        if self.values.device != device:
            for name in ("values", "_places", "entered", "spikes"):
                setattr(self, name, getattr(self, name).to(device))

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (mean, standard deviation, bound) of the values in the window, 0-d each.

        Values above the bound are spikes. The bound is inf if the window has too few values. The numbers are computed
        relative to one of the values, so that equal values have exactly the deviation 0.
        """
        count = self.entered.clamp(max=self.rule.window)
        held, base = self._places < count, self.values[0]
        gaps = torch.where(held, self.values - base, 0.0)
        mean = gaps.sum() / count.clamp(min=1)
        squares = torch.where(held, (gaps - mean).square(), 0.0).sum()
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        bound = base + (mean + self.rule.sigmas * deviation)
        return base + mean, deviation, torch.where(count >= self.rule.needed, bound, torch.inf)

    def observe(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a value to the window. Return two 0-d tensors: True if the value is a spike, and a factor.

        The factor is bound / value for a spike, and 1 for any other value.

        value: 0-d float64. nan: there is no value in this step. inf is a spike, with the factor 0.
        """
        mean, deviation, bound = self.statistics()
        spike = value > bound
        entering = torch.where(spike, mean + min(self.rule.sigmas, self.rule.entering) * deviation, value)
        here = (self._places == self.entered % self.rule.window) & entering.isfinite()
        self.values.copy_(torch.where(here, entering, self.values))
        self.entered.add_(entering.isfinite())
        self.spikes.add_(spike)
        return spike, torch.where(spike, bound / value, 1.0).clamp(0.0, 1.0)

    def counts(self) -> SpikeCounts:
        """Return the counts of spikes and values, and the statistics of the window. The host waits for the device."""
        mean, deviation, bound = torch.stack(self.statistics()).tolist()
        return SpikeCounts(int(self.spikes), int(self.entered), mean, deviation, bound)

    def to_text(self) -> str:
        """Return the window and the counts as JSON, for a checkpoint. The host waits for the device."""
        entered, spikes = int(self.entered), int(self.spikes)
        numbers = {"measure": self.rule.measure, "entered": entered, "spikes": spikes}
        return json.dumps({**numbers, "values": self.values[:entered].tolist()})

    def read(self, text: str | None) -> None:
        """Replace the window by that of a checkpoint. If that window has another length, its last values are used.

        The window becomes empty if `text` is None, or if the checkpoint's values are losses and this window is for
        gradient norms, or the reverse.

        text: result of `to_text`.
        """
        saved = {} if text is None else json.loads(text)
        if saved.get("measure") != self.rule.measure:
            saved = {"values": [], "entered": 0, "spikes": 0}
        kept, entered, window = saved["values"], saved["entered"], self.rule.window
        if len(kept) != min(entered, window):
            oldest = entered % len(kept)
            kept = [*kept[oldest:], *kept[:oldest]][-window:]
            entered = len(kept)
        values = torch.tensor(kept + [0.0] * (window - len(kept)), dtype=torch.float64, device="cpu")
        self._place(values, entered, saved["spikes"])

    def apply(self, ready: ReadySteps, loss: Tensor | float | None) -> ReadySteps:
        """Check if this step is a spike. Return the steps of all parameter sets, changed by the rule if it is a spike.

        All ranks call this method. A step that updates no parameter is not checked.

        ready: pairs of a parameter set and the inputs of its step, None for a set that makes no step.
        loss: the loss of this step. None: this rank has no loss.

        Raises ValueError if the rule compares losses and a rank has no loss. On an accelerator only the rank without a
        loss raises it.
        """
        given = [inputs for _, inputs in ready if inputs is not None]
        if not given or not has_values(ready[0][0].parameters[0]):
            return ready
        device = given[0].survey.device
        self.to(device)
        value = self._loss(ready, loss, device) if self.rule.measure == "loss" else gradient_norm(given)
        masks = [_of_active(inputs, inputs.mask) for inputs in given if inputs.mask is not None]
        # in a step without a usable gradient, no loss and no norm enters the window
        if len(masks) == len(given):
            used = torch.stack([mask.any().to(device) for mask in masks]).any()
            value = torch.where(used, value, torch.nan)
        spike, factor = self.observe(value)
        if not may_branch_on_values(spike):
            return self._all_changed(ready, spike, factor)
        if not spike:
            return ready
        if self.rule.then == "skip":
            return [(param_set, None) for param_set, _ in ready]
        return self._all_changed(ready, spike, float(factor))

    def _loss(self, ready: ReadySteps, loss: Tensor | float | None, device: torch.device) -> Tensor:
        """Return the mean of the loss over the ranks that share parameters, 0-d float64.

        ready, loss: as in `apply`.
        device: device of the result.
        """
        zero, ranks = (
            torch.zeros((), dtype=torch.float64, device=device),
            ranks_of([param_set for param_set, _ in ready]),
        )
        value = zero if loss is None else number_like(loss, zero).detach().reshape(())
        both = torch.stack([value, zero if loss is not None else zero + 1])
        if ranks is not None:
            both = ranks.mean(both, "loss of the spike check")
        value, absent = both.unbind()
        if loss is None or (may_branch_on_values(absent) and bool(absent)):
            where = "" if loss is None else " on another rank"
            raise ValueError(
                f"failure.spike: the signal 'loss' is required in every step, got none{where}; provide it with "
                "optimizer.provide('loss', loss) before the step, or with a closure that returns it, or compare "
                "gradients with failure.spike.measure=gradient_norm"
            )
        return torch.where(absent == 0, value, torch.nan)

    def _all_changed(self, ready: ReadySteps, spike: Tensor, factor: float | Tensor) -> ReadySteps:
        """Return the steps of all parameter sets, each changed by `_changed`."""
        return [
            (param_set, None if inputs is None else self._changed(param_set, inputs, spike, factor))
            for param_set, inputs in ready
        ]

    def _changed(self, param_set: ParamSet, inputs: StepInputs, spike: Tensor, factor: float | Tensor) -> StepInputs:
        """Return the step of a parameter set, changed as the recipe says in `failure.spike.then`: skipped, with a
        scaled update, or with clipped gradients.

        spike: True if the step is a spike; on a device a 0-d tensor that the host does not read.
        factor: factor of the update or of the gradients; 1 if the step is no spike.

        The tensors may be on the device of another parameter set.
        """
        device = param_set.parameters[0].device
        spike, factor = spike.to(device), factor.to(device) if isinstance(factor, Tensor) else factor
        if self.rule.then == "skip":
            return replace(inputs, mask=param_set.finite_check.stop(inputs.active, inputs.mask, ~spike))
        if self.rule.then == "scale":
            return replace(inputs, rates=replace(inputs.rates, factor=factor))
        multiply_gradients(inputs.gradients, factor)
        return replace(inputs, survey=inputs.survey.scaled(factor))


def gradient_norm(steps: Sequence[StepInputs]) -> Tensor:
    """Return the norm of all gradients that several parameter sets use in one step, 0-d float64.

    steps: the inputs of the step of each parameter set.
    """
    squares = [_used_squares(inputs) for inputs in steps]
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()


def _used_squares(inputs: StepInputs) -> Tensor:
    """Return the sum of squares of the usable gradients of all parameters that the step updates."""
    squares = inputs.survey.squares
    squares = squares if inputs.mask is None else torch.where(inputs.mask, squares, 0.0)
    if not inputs.active.all():
        squares = squares.index_fill(0, kept_on_device(np.flatnonzero(~inputs.active), squares.device), 0.0)
    return squares.sum()


def _of_active(inputs: StepInputs, values: Tensor) -> Tensor:
    """Return the values of the parameters that the step updates, from the values `[P]` of all parameters."""
    return values if inputs.active.all() else values[kept_on_device(np.flatnonzero(inputs.active), values.device)]


def ranks_of(param_sets: Iterable[ParamSet]) -> RankGroup | None:
    """Return the largest group of ranks that share parameters, or None if this process shares no parameters."""
    groups = [x.rank_group.all_ranks for x in param_sets if x.rank_group is not None]
    return max(groups, key=lambda group: group.size, default=None)


def require_same_ranks(param_sets: Sequence[ParamSet]) -> None:
    """Raise ValueError unless all parameter sets are shared by the same ranks.

    Different groups of ranks could decide differently about a spike.
    """
    groups = {None if x.rank_group is None else x.rank_group.all_ranks.members: x for x in param_sets}
    if len(groups) > 1:
        names = " and ".join(param_set.names[0] for param_set in [*groups.values()][:2])
        raise ValueError(
            f"failure.spike: {names} are shared by different ranks, which could decide differently about a step; "
            "remove failure.spike, or make one optimizer for each group of ranks"
        )
