"""Averages that feed back: gradients are taken between the base iterate z and its average x.

    y = mu_y x + (1 - mu_y) z      the parameter in training: gradients are taken here
    z <- z - lr U - lr alpha z     the step of the recipe without averaging
    x <- (1 - c) x + c z           the parameter in evaluation

Only z is stored: with D the step of z, the same sequences are  y <- y + c (z - y) + (1 - mu_y (1 - c)) D,  z <- z + D,
and x = y + (1 / mu_y - 1) (y - z). A step D = 0 from z = y then changes nothing, bit for bit. Parameters stored with
less precision than they are computed in also keep y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import may_branch_on_values, safe_ratio
from eigengraft.slots import Slot

from .averaging import Averaging, IterateBatch, accumulate, blend
from .parameter_update import ParameterUpdate

Decay = Literal["z", "y", "z_apart"]
"""Where weight decay is taken. z: as part of the base step (the three sequences as above). y: z <- z - lr U - lr alpha
y (Defazio et al. 2024, algorithm 1). z_apart: z decays first and y follows only the rest of the step, which is what
Distributed Shampoo and GPA-AdamW do; y and x decay less than the three sequences say. The `placed` of a decay matters
for z alone."""
_DECAY = "where weight decay is taken: z, y, or z_apart (z decays, y and x do not follow it, as Distributed Shampoo)"


class ScheduleFree(Averaging):
    """Schedule-free learning: the module's sequences with mu_y = beta and c_t = w_t / (w_1 + ... + w_t).

    w_t = lr_t^p t^r (Defazio et al. 2024, arXiv:2405.15682, equations 3-5 and section 3; arXiv:2512.17131 for r). With
    beta = 1 gradients are taken at the average itself. While all weights are 0, as at lr 0, c = 0.
    """

    kind: Literal["schedule_free"] = "schedule_free"
    beta: float = Field(default=0.9, gt=0, le=1, description="weight of x in y")
    lr_power: float = Field(default=2.0, ge=0, le=32, description="power p of the learning rate in the weights")
    step_power: float = Field(default=0.0, ge=0, le=32, description="power r of the update's number in the weights")
    decay_at: Decay = Field(default="y", description=_DECAY)

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        return {**_slots(shape, low_precision), "weight_sum": Slot((), role="iterate", dtype=torch.float64)}

    def state_meaning(self) -> Mapping[str, Any]:
        weights = {"lr_power": self.lr_power, "step_power": self.step_power}
        return {**weights, "beta": self.beta}

    def begin(self, batch: IterateBatch) -> None:
        batch.begin()

    def decaying(self, batch: IterateBatch) -> Sequence[Tensor]:
        return _decaying(batch, self.decay_at)

    def step(self, batch: IterateBatch, update: ParameterUpdate) -> None:
        _advance(batch, update, self.beta, self._mixing(batch), self.decay_at)

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        return _average(batch, self.beta)

    def _mixing(self, batch: IterateBatch) -> Sequence[float | Tensor]:
        """The weight c of each parameter; adds w_t to its sum of weights."""
        sums = batch.slots["weight_sum"]
        before = torch.stack(list(sums))
        same = (batch.steps == batch.steps[0]).all()
        steps = float(batch.steps[0]) if same else torch.from_numpy(batch.steps).to(before)
        weight = torch.ones_like(before) * steps**self.step_power * batch.lr**self.lr_power
        after = before + weight
        if batch.mask is not None:
            after = torch.where(torch.stack(list(batch.mask)), after, before)
        torch._foreach_copy_(list(sums), list(after.unbind(0)))
        mixing = safe_ratio(weight, after)
        return mixing.tolist() if may_branch_on_values(mixing) else mixing.unbind(0)


class PrimalAveraging(Averaging):
    """Generalized primal averaging (GPA): the module's sequences with a constant c = 1 - mu_x.

    Defazio et al. 2025, arXiv:2512.17131. With mu_x = 0 it is the base method; over plain gradient descent with mu_y =
    1 it is heavy-ball momentum mu_x.
    """

    kind: Literal["primal_averaging"] = "primal_averaging"
    mu_x: float = Field(default=0.9967, ge=0, lt=1, description="weight that the average x keeps in a step")
    mu_y: float = Field(default=0.7, gt=0, le=1, description="weight of x in y")
    decay_at: Decay = Field(default="z", description=_DECAY)

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        return _slots(shape, low_precision)

    def state_meaning(self) -> Mapping[str, Any]:
        return {"mu_y": self.mu_y}

    def begin(self, batch: IterateBatch) -> None:
        batch.begin()

    def decaying(self, batch: IterateBatch) -> Sequence[Tensor]:
        return _decaying(batch, self.decay_at)

    def step(self, batch: IterateBatch, update: ParameterUpdate) -> None:
        _advance(batch, update, self.mu_y, [1 - self.mu_x] * len(batch.parameters), self.decay_at)

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        return _average(batch, self.mu_y)


def _slots(shape: tuple[int, ...], low_precision: bool) -> dict[str, Slot]:
    return {name: Slot(shape, role="iterate") for name in (("z", "y") if low_precision else ("z",))}


def _decaying(batch: IterateBatch, decay_at: Decay) -> Sequence[Tensor]:
    return batch.y if decay_at == "y" else batch.slots["z"]


def _advance(
    batch: IterateBatch, update: ParameterUpdate, mu_y: float, mixing: Sequence[float | Tensor], decay_at: Decay
) -> None:
    y, z = batch.y, batch.slots["z"]
    if decay_at == "z_apart":
        update = update.decay(z)
    elif decay_at == "y":
        update = update.decayed_at(y)
    old = torch._foreach_mul(list(z), 1.0)  # a copy, in one kernel
    update(z)
    blend(y, old, mixing, batch.mask)
    accumulate(y, torch._foreach_sub(list(z), old), [1 - mu_y * (1 - c) for c in mixing])
    batch.show_y()


def _average(batch: IterateBatch, mu_y: float) -> Sequence[Tensor]:
    return torch._foreach_lerp(list(batch.slots["z"]), list(batch.y), 1 / mu_y)
