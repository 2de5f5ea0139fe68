"""Averages of the iterates that never feed back: training goes on as without them, evaluation sees the average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.slots import Slot

from .averaging import Averaging, IterateBatch, blend
from .parameter_update import ParameterUpdate


def pushes(steps: NDArray[np.int64], every: int, start: int | None) -> NDArray[np.int64]:
    """Iterates that have been averaged after so many updates: one at `start` and one every nu updates after it."""
    first = every if start is None else start
    return np.where(steps >= first, (steps - first) // every + 1, 0)


def pushed(batch: IterateBatch, every: int, start: int | None) -> list[int]:
    """Indices of the parameters whose iterate enters the average with the update under way."""
    fresh = pushes(batch.steps, every, start) > pushes(batch.steps - 1, every, start)
    return [int(index) for index in np.flatnonzero(fresh)]


class EMA(Averaging):
    """Every nu updates  mean <- decay mean + (1 - decay) W;  evaluated: mean / (1 - decay^k) after k of them.

    Ajroldi, Orvieto & Geiping 2025 (ICML), section 2; bias correction as in SPlus (Frans et al. 2025). Without it the
    first average is the first iterate. Before `start` the parameter itself is evaluated. A horizon nu / (1 - decay) of
    about 1% of all updates is a good choice. With a `weight` below 1 the rest of what is evaluated is W: the tail
    average of the records of 2026 in track 3 of modded-nanogpt evaluates 0.6 of the mean and 0.4 of W. With an `inner`
    averaging, W is the iterate that it evaluates, and training is its own.
    """

    kind: Literal["ema"] = "ema"
    decay: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean, per averaged iterate")
    every: int = Field(default=1, ge=1, description="updates between averaged iterates, nu")
    start: int | None = Field(default=None, ge=1, description="update of the first averaged iterate; default: nu")
    bias_correction: bool = Field(default=True, description="start from zero and divide by the sum of the weights")
    weight: float = Field(default=1.0, gt=0, le=1, description="weight of the mean in what is evaluated")
    inner: Averaging | None = Field(default=None, description="iterates below, which are averaged; default: none")

    @model_validator(mode="after")
    def _inner_has_no_mean(self) -> Self:
        if self.inner is not None and "mean" in self.inner.slots((1,), True):
            raise ValueError(f"inner: an averaging without a mean of its own is required, got {self.inner!r}")
        return self

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        below = {} if self.inner is None else self.inner.slots(shape, low_precision)
        return {**below, "mean": Slot(shape, role="iterate")}

    def follows_peak(self) -> bool:
        return self.inner is not None and self.inner.follows_peak()

    def state_meaning(self) -> Mapping[str, Any]:
        counted = {"every": self.every, "start": self.start, "bias_correction": self.bias_correction}
        divided = {"decay": self.decay} if self.bias_correction else {}
        return {**counted, **divided}

    def begin(self, batch: IterateBatch) -> None:
        if self.inner is not None:
            self.inner.begin(batch)

    def decaying(self, batch: IterateBatch) -> Sequence[Tensor]:
        return batch.parameters if self.inner is None else self.inner.decaying(batch)

    def _below(self, batch: IterateBatch) -> Sequence[Tensor]:
        """W of each parameter."""
        return batch.parameters if self.inner is None else self.inner.evaluated(batch)

    def step(self, batch: IterateBatch, update: ParameterUpdate) -> None:
        if self.inner is None:
            update(batch.parameters)
        else:
            self.inner.step(batch, update)
        due = batch.slice_rows(pushed(batch, self.every, self.start))
        if not due.parameters:
            return
        first = (pushes(due.steps, self.every, self.start) == 1) & (not self.bias_correction)
        blend(due.slots["mean"], self._below(due), [1.0 if one else 1 - self.decay for one in first], due.mask)

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        counts = pushes(batch.steps, self.every, self.start)
        values = []
        for parameter, mean, count in zip(self._below(batch), batch.slots["mean"], counts.tolist(), strict=True):
            total = 1 - self.decay**count if self.bias_correction else 1.0
            value = mean / total if count else parameter
            values.append(value if self.weight == 1 else torch.lerp(parameter.to(value.dtype), value, self.weight))
        return values


class LAWA(Averaging):
    """Every nu updates W enters a circular queue of the last K; evaluated: the mean of the queue.

    Latest weight averaging (Kaddour 2022; Ajroldi, Orvieto & Geiping 2025, section 2). Before `start` the parameter
    itself is evaluated. A horizon nu K of about 1% of all updates is a good choice.
    """

    kind: Literal["lawa"] = "lawa"
    window: int = Field(default=5, ge=1, description="iterates in the queue, K; each takes a parameter's memory")
    every: int = Field(default=1, ge=1, description="updates between iterates of the queue, nu")
    start: int | None = Field(default=None, ge=1, description="update of the first one; default: nu")

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        return {"queue": Slot((self.window, *shape), role="iterate")}

    def state_meaning(self) -> Mapping[str, Any]:
        return {"every": self.every, "start": self.start}

    def step(self, batch: IterateBatch, update: ParameterUpdate) -> None:
        update(batch.parameters)
        due = batch.slice_rows(pushed(batch, self.every, self.start))
        places = (pushes(due.steps, self.every, self.start) - 1) % self.window
        targets = [queue[place] for queue, place in zip(due.slots["queue"], places.tolist(), strict=True)]
        blend(targets, due.parameters, [1.0] * len(targets), due.mask)

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        counts = np.minimum(pushes(batch.steps, self.every, self.start), self.window).tolist()
        queues = batch.slots["queue"]
        # one iterate after the other: how `mean` adds them up depends on the shape, which shards have their own of
        sums = [
            queue[0].clone() if count else x for x, queue, count in zip(batch.parameters, queues, counts, strict=True)
        ]
        for place in range(1, max(counts)):
            more = [at for at, count in enumerate(counts) if count > place]
            torch._foreach_add_([sums[at] for at in more], [queues[at][place] for at in more])
        return [total / count if count else total for total, count in zip(sums, counts, strict=True)]
