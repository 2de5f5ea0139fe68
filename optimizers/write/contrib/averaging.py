"""The average `LAWA`, and two averagings of the 2026 records of modded-nanogpt's track 3, `EMANesterov` and `Anchored`.

With `LAWA`, training is the same as without averaging. The other two compute gradients at a point y ahead of the base
iterate W. `EMANesterov` moves y along the mean of past steps. `Anchored` moves y away from a running mean of W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import copies
from eigengraft.slots import Slot

from ..averaging import EMA, Averaging, IterateBatch, accumulate, blend, pushed, pushes
from ..constraints import ParameterUpdate
from ..write import nonzero_peak


class LAWA(Averaging):
    """After every nu = `every` updates, W enters a queue of the last K = `window` copies of W; evaluated: their mean.

    Latest weight averaging of the parameter W (Kaddour 2022; Ajroldi, Orvieto & Geiping 2025, section 2). Before
    `start` the parameter itself is evaluated. A horizon nu K of about 1% of all updates is a good choice.
    """

    kind: Literal["lawa"] = "lawa"
    window: int = Field(
        default=5, ge=1, description="number K of iterates in the queue; each takes a parameter's memory"
    )
    every: int = Field(default=1, ge=1, description="number nu of updates from one iterate in the queue to the next")
    start: int | None = Field(
        default=None,
        ge=1,
        description="number of the update after which the first iterate enters the queue; default: nu",
    )

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        return {"queue": Slot((self.window, *shape), role="iterate")}

    def state_meaning(self) -> Mapping[str, Any]:
        return {"every": self.every, "start": self.start}

    def step(self, batch: IterateBatch, write: ParameterUpdate) -> None:
        write(batch.parameters)
        due = batch.slice_rows(pushed(batch, self.every, self.start))
        places = (pushes(due.steps, self.every, self.start) - 1) % self.window
        targets = [queue[place] for queue, place in zip(due.slots["queue"], places.tolist(), strict=True)]
        blend(targets, due.parameters, [1.0] * len(targets), due.mask)

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        counts = np.minimum(pushes(batch.steps, self.every, self.start), self.window).tolist()
        queues = batch.slots["queue"]
        # summed in a fixed order: `mean` adds in an order that depends on the shape, which differs between shards
        sums = copies([queue[0] for queue in queues], queues[0].dtype)
        for place in range(1, max(counts)):
            more = [at for at, count in enumerate(counts) if count > place]
            torch._foreach_add_([sums[at] for at in more], [queues[at][place] for at in more])
        torch._foreach_div_(sums, [max(count, 1.0) for count in counts])
        return [total if count else x for x, total, count in zip(batch.parameters, sums, counts, strict=True)]


class EMANesterov(Averaging):
    """y = W + ahead D;  W' = y - lr U(y);  D <- beta D + (1 - beta) (W' - W)

    W is the base iterate (the slot z) with its next value W', D the moving average of steps, and U(y) the update from
    the gradient at y. In training the parameter holds y, where gradients and decay are computed; in evaluation it holds
    W, as in the 2026 records of modded-nanogpt's track 3. A step starts from y without undoing the look-ahead, so that
    D includes the look-ahead. Outside of the updates `start` to `stop` there is no look-ahead, and y = W.
    """

    kind: Literal["ema_nesterov"] = "ema_nesterov"
    beta: float = Field(default=0.99, ge=0, lt=1, description="decay of the mean D of steps, per update")
    ahead: float = Field(default=0.3, gt=0, le=1, description="length of the look-ahead y - W, in units of D")
    follow_lr: bool = Field(
        default=False, description="multiply `ahead` by lr / peak, with the peak of the learning rate"
    )
    start: int = Field(default=0, ge=0, description="number of updates before the first look-ahead")
    stop: int | None = Field(
        default=None,
        ge=1,
        description="number of the last update whose gradient is computed at a look-ahead; none: no last one",
    )

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

    def step(self, batch: IterateBatch, write: ParameterUpdate) -> None:
        y, z, drift, count = batch.y, batch.slots["z"], batch.slots["drift"], len(batch.parameters)
        write(y)
        blend(drift, torch._foreach_sub(list(y), list(z)), [1 - self.beta] * count, batch.mask)
        blend(z, y, [1.0] * count, batch.mask)
        scale: float | Tensor = self.ahead
        if self.follow_lr:
            scale = self.ahead * (batch.lr / nonzero_peak(batch.lr, batch.peak_lr))
        open_now = (batch.steps >= self.start) & (batch.steps < (np.inf if self.stop is None else self.stop))
        accumulate(y, drift, [scale if one else 0.0 for one in open_now], batch.mask)
        batch.show_y()

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        return batch.slots["z"]


class Anchored(Averaging):
    """y = W + a_t (W - M);  W' = W - lr U(y);  M the mean of W by the inner `ema`;  evaluated: as by the inner `ema`

    W is the base iterate with its next value W', and U(y) the update from the gradient at y. In training the parameter
    holds y, which is ahead of W on the line from the mean M through W. Weight decay is computed at W, or at y if stages
    follow the decay. The factor a_t is 0 up to the update `start`, then it grows linearly, and from the update `full`
    on it is `ahead`. This is the anchor gradient of modded-nanogpt's track 3 (2026, record #377, with `ahead` 0.45,
    `start` 2100 and `full` 2200).

    The inner `ema` may itself be a mean over an `ema_nesterov`. Then the base iterate of `ema_nesterov` is W, and the
    parameter holds its look-ahead plus a_t (W - M). W is computed from y and M, so that no further memory is
    needed, except for parameters of 16 bits, for which y is stored.
    """

    kind: Literal["anchored"] = "anchored"
    ahead: float = Field(
        default=0.45, gt=0, le=4, description="final length of the look-ahead y - W, in units of W - M"
    )
    start: int = Field(ge=1, examples=[2100], description="number t of the last update with a_t = 0")
    full: int = Field(ge=2, examples=[2200], description="number t of the first update with a_t = `ahead`")
    inner: EMA = Field(default=EMA(), description="the mean, over W or over an `ema_nesterov`")

    @model_validator(mode="after")
    def _ahead_of_a_mean(self) -> Self:
        first = self.inner.every if self.inner.start is None else self.inner.start
        if self.start < first:
            raise ValueError(
                f"start: must be at least {first}, the first update in which `inner` has a mean, got {self.start}; "
                "raise start"
            )
        if self.full <= self.start:
            raise ValueError(f"full: must be greater than start, which is {self.start}, got {self.full}")
        if not isinstance(self.inner.inner, (EMANesterov, type(None))):
            raise ValueError(
                "inner.inner: must be null, for the mean of the parameters, or an `ema_nesterov`, got "
                f"{self.inner.inner!r}"
            )
        return self

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        own = {"y": Slot(shape, role="iterate")} if low_precision else {}
        return {**own, **self.inner.slots(shape, low_precision)}

    def state_meaning(self) -> Mapping[str, Any]:
        ramp = {"ahead": self.ahead, "start": self.start, "full": self.full}
        return {**ramp, **{f"inner.{name}": value for name, value in self.inner.state_meaning().items()}}

    def follows_peak(self) -> bool:
        return self.inner.follows_peak()

    def begin(self, batch: IterateBatch) -> None:
        batch.begin()

    def decaying(self, batch: IterateBatch) -> Sequence[Tensor]:
        return batch.y

    def step(self, batch: IterateBatch, write: ParameterUpdate) -> None:
        below = replace(batch, parameters=batch.y)
        self._shift(replace(below, steps=batch.steps - 1), back=True)
        self.inner.step(below, write)
        self._shift(below, back=False)
        batch.show_y()

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        below = replace(batch, parameters=copies(batch.y, batch.y[0].dtype), mask=None)
        self._shift(below, back=True)
        return self.inner.evaluated(below)

    def _shift(self, batch: IterateBatch, back: bool) -> None:
        """Add the look-ahead a_t (W - M) to the parameters of a batch in place, or subtract it.

        M is the mean of W by the inner `ema`. The factor a_t grows from 0 to `ahead`.

        back: False: the parameters hold W, and become y = W + a_t (W - M). True: they hold y, and become W.
        """
        ahead = self.ahead * ((batch.steps - self.start) / (self.full - self.start)).clip(0.0, 1.0)
        own, factors = batch.slice_rows(np.flatnonzero(ahead > 0).tolist()), ahead[ahead > 0].tolist()
        if not factors:
            return
        means = self.inner.means(own)
        if self.inner.inner is None:  # from y = W + a (W - M) follows  W = y + a / (1 + a) (M - y)
            blend(own.parameters, means, [a / (1 + a) if back else -a for a in factors], own.mask)
            return
        apart = torch._foreach_sub(list(self.inner.inner.evaluated(own)), list(means))
        accumulate(own.parameters, apart, [-a if back else a for a in factors], own.mask)
