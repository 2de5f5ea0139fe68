"""Averaging of the 2026 record of modded-nanogpt's track 3: a look-ahead along the mean of past steps."""

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

    W is the base iterate (the slot z) with its next value W', D the moving average of steps, and U(y) the update from
    the gradient at y. In training the parameter holds y, where gradients and decay are computed; in evaluation it holds
    W, as in the 2026 records of modded-nanogpt's track 3. A step starts from y without undoing the look-ahead, so that
    D includes the look-ahead. Outside of the updates `start` to `stop` there is no look-ahead, and y = W.
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
        """Change tensors y in place:  y <- y + scale drift.  Tensors with the mask False do not change."""
        if mask is None:
            accumulate(y, drift, scales)
            return
        for own, towards, scale, usable in zip(y, drift, scales, mask, strict=True):
            own.copy_(torch.where(usable, own + towards * scale, own))

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        return batch.slots["z"]
