"""Norms of layers during a run: columns of the metrics, and a table of all layers at the end.

A layer is one parameter. Norms are computed in the first step and in steps with a row of metrics. Each such step
reads all norms from the device at once. Other steps have no additional operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import eigengraft
from eigengraft.optimizers.inspect.norms import NormWatch

from .outcome import finite_or_none
from .parallel import Ranks

LAYER_MEASURES = ("weight_norm", "gradient_norm", "update_ratio", "weight_growth")
"""Measures of layers.

A row of metrics has five columns for each measure: its value over all layers together, the largest and the smallest
value of a layer, and the names of these two layers.
"""


@dataclass(frozen=True)
class Norms:
    """Norms of one layer, or of all layers together.

    weight: norm of the weight before the step.
    gradient: norm of the gradient of the step; None: there was no gradient.
    update: norm of the change of the weight in the step.
    first: norm of the weight before the first step.
    """

    weight: float
    gradient: float | None
    update: float
    first: float

    def measures(self) -> dict[str, float]:
        """Return norms and ratios by name. Ratios to a weight of norm 0 are left out; NaN counts as infinity."""
        ratio = self.update / self.weight if self.weight else None
        growth = self.weight / self.first if 0 < self.first < math.inf else None
        values = zip(LAYER_MEASURES, (self.weight, self.gradient, ratio, growth), strict=True)
        return {name: math.inf if math.isnan(value) else value for name, value in values if value is not None}


@dataclass
class LayerRecord:
    """The history of the norms of all layers, which checkpoints contain. All mappings are by layer.

    first: norm of the weight before the first step.
    peak: largest ratio |update| / |weight| of a measured step.
    initial: ratio |update| / |weight| of the first measured step.
    zeros: number of measured steps in which the gradient was missing or 0.
    steps: number of measured steps.
    """

    first: dict[str, float] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    initial: dict[str, float] = field(default_factory=dict)
    zeros: dict[str, int] = field(default_factory=dict)
    steps: int = 0

    def add(self, norms: dict[str, Norms]) -> None:
        """Add the norms of a measured step to the record."""
        self.steps += 1
        for name, own in norms.items():
            self.zeros[name] = self.zeros.get(name, 0) + (not own.gradient)
            measures = own.measures()
            self.peak[name] = max(self.peak.get(name, 0.0), measures.get("update_ratio", 0.0))
            if self.steps == 1 and "update_ratio" in measures:
                self.initial[name] = measures["update_ratio"]


class Layers:
    """The layers of a model in training, on one rank.

    record: history of the norms, which a checkpoint contains.
    last: norms of the last measured step by layer; empty before the first.
    failed_roots: number of roots and bases whose latest refresh had failed, at the time of the last measured step.
    """

    def __init__(self, model: nn.Module, optimizer: eigengraft.Optimizer, ranks: Ranks) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
        self.names = [name for name, _ in named]
        self.parameters: Sequence[Tensor] = [p for _, p in named]
        self.optimizer, self.ranks = optimizer, ranks
        self.record, self.last, self.failed_roots = LayerRecord(), dict[str, Norms](), 0
        self._watch: NormWatch | None = None

    def before(self) -> None:
        """Keep the present weights, so that `after` can measure the norm of each layer's update in the next step."""
        self._watch = NormWatch(self.parameters) if self.parameters else None

    def after(self) -> None:
        """Compute the norms of weights, gradients and updates of the step since the last call of `before`. Do nothing
        if `before` was not called for this step.

        All ranks must call this.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return
        squares = watch.squares(self.ranks.size)
        counts = [state.tensors[key] for state in self.optimizer.stack_states() for key in state.failure_counts]
        failed = torch.cat([(count > 0).flatten() for count in counts]).sum() if counts else squares.new_zeros(())
        numbers = torch.cat([squares.flatten(), failed.to(squares).view(1)])
        if self.ranks.size > 1:
            dist.all_reduce(numbers)
        *flat, failures = numbers.tolist()
        size = len(self.names)
        roots = [math.sqrt(value) if value >= 0 else math.nan for value in flat]
        weights, gradients, updates = (roots[place * size : (place + 1) * size] for place in range(3))
        for name, weight in zip(self.names, weights, strict=True):
            self.record.first.setdefault(name, weight)
        rows = zip(self.names, weights, gradients, updates, watch.with_gradient, strict=True)
        self.last = {
            name: Norms(weight, gradient if given else None, update, self.record.first[name])
            for name, weight, gradient, update, given in rows
        }
        self.failed_roots = int(failures)
        self.record.add(self.last)

    def row(self, measured: bool) -> dict[str, Any]:
        """Return the columns of a row of metrics. Measures of layers are None if the step was not measured."""
        columns: dict[str, Any] = {"failed_roots": self.failed_roots}
        layers = {name: own.measures() for name, own in self.last.items()} if measured else {}
        whole = _together(self.last.values()).measures() if layers else {}
        for measure in LAYER_MEASURES:
            own = {name: measures[measure] for name, measures in layers.items() if measure in measures}
            columns[measure] = finite_or_none(whole.get(measure))
            for end, pick in _ENDS.items():
                layer = pick(own, key=own.__getitem__) if own else None
                columns[f"{measure}_{end}"] = None if layer is None else finite_or_none(own[layer])
                columns[f"{measure}_{end}_layer"] = layer
        return columns

    def table(self) -> Iterator[dict[str, Any]]:
        """Yield rows of diagnostics for each layer: LAYER_MEASURES in the last measured step, and three measures of the
        whole run.

        update_ratio_peak: largest update_ratio of a measured step.
        update_ratio_first: update_ratio of the first measured step, if the weight was not 0.
        zero_gradients: fraction of measured steps in which the gradient was missing or 0.
        """
        for name, own in self.last.items():
            zeros = self.record.zeros[name] / self.record.steps
            over_run = {"update_ratio_peak": self.record.peak[name], "zero_gradients": zeros}
            if name in self.record.initial:
                over_run["update_ratio_first"] = self.record.initial[name]
            for measure, value in {**own.measures(), **over_run}.items():
                fields = {"parameter": name, "stage": "", "slot": "", "measure": measure}
                yield {**fields, "value": finite_or_none(value)}


_ENDS: dict[str, Callable[..., str]] = {"largest": max, "smallest": min}


def _together(norms: Collection[Norms]) -> Norms:
    """Return the norms of one vector that has the entries of all layers."""
    fields = ([one.weight for one in norms], [one.update for one in norms], [one.first for one in norms])
    weight, update, first = (math.hypot(*values) for values in fields)
    return Norms(weight, math.hypot(*(one.gradient or 0.0 for one in norms)), update, first)
