"""Averaging of the record of 2026 in track 3 of modded-nanogpt: a look-ahead along the mean of past steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.slots import Slot

from ..averaging import Averaging, IterateBatch, accumulate, blend
from ..constraints import ParameterUpdate
from ..write import nonzero_peak


class EMANesterov(Averaging):
    """y = W + ahead D;  W' = y - lr U(y);  D <- beta D + (1 - beta) (W' - W)

    The parameter is y in training, so that gradients and decay are taken there, and the base iterate W (the slot z) in
    evaluation (the records of 2026 in track 3 of modded-nanogpt). Steps start from y and the look-ahead is not undone
    before a step, so that D includes it. Outside of the updates `start` to `stop` there is no look-ahead, and y = W.
    """

    kind: Literal["ema_nesterov"] = "ema_nesterov"
    beta: float = Field(default=0.99, ge=0, lt=1, description="decay of the mean D of steps, per update")
    ahead: float = Field(default=0.3, gt=0, le=1, description="how far y is ahead of W, in units of D")
    follow_lr: bool = Field(default=False, description="multiply `ahead` by the learning rate over its peak")
    start: int = Field(default=0, ge=0, description="updates before the first look-ahead")
    stop: int | None = Field(default=None, ge=1, description="updates before the last one; default: it never ends")

    @model_validator(mode="after")
    def _some_look_ahead(self) -> Self:
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"stop: must be greater than start, which is {self.start}, got {self.stop}")
        return self

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        names = ("z", "drift", "y") if low_precision else ("z", "drift")
        return {name: Slot(shape, role="iterate") for name in names}

    def begin(self, batch: IterateBatch) -> None:
        batch.begin()

    def follows_peak(self) -> bool:
        return self.follow_lr

    def decaying(self, batch: IterateBatch) -> Sequence[Tensor]:
        return batch.y

    def step(self, batch: IterateBatch, update: ParameterUpdate) -> None:
        y, z, drift, count = batch.y, batch.slots["z"], batch.slots["drift"], len(batch.parameters)
        update(y)
        blend(drift, torch._foreach_sub(list(y), list(z)), [1 - self.beta] * count, batch.mask)
        blend(z, y, [1.0] * count, batch.mask)
        scale: float | Tensor = self.ahead
        if self.follow_lr:
            scale = self.ahead * (batch.lr / nonzero_peak(batch.lr, batch.peak_lr))
        open_now = (batch.steps >= self.start) & (batch.steps < (np.inf if self.stop is None else self.stop))
        self._look_ahead(y, drift, [scale if one else 0.0 for one in open_now], batch.mask)
        batch.show_y()

    def _look_ahead(
        self,
        y: Sequence[Tensor],
        drift: Sequence[Tensor],
        scales: Sequence[float | Tensor],
        mask: Sequence[Tensor] | None,
    ) -> None:
        """Change y in place:  y <- y + scale drift, for tensors whose mask is True or None."""
        if mask is None:
            accumulate(y, drift, scales)
            return
        for own, towards, scale, usable in zip(y, drift, scales, mask, strict=True):
            own.copy_(torch.where(usable, own + towards * scale, own))

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        return batch.slots["z"]
