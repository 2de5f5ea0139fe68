"""Other divisions by a second moment: one that this gradient has not entered yet, and one that needs no eps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import in_registers, number_like
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Stage
from ..traits import Traits


class LaggedRMS(Stage):
    """clip(d / max(sqrt(v), eps), t^p);  then  v <- b v + (1 - b) g^2,  from  v = g^2  of a first gradient that moves
    nothing.

    ADOPT (Taniguchi et al. 2024, arXiv:2411.02853, Algorithm 2) is this stage before a momentum: the gradient is
    independent of what divides it, so that Adam converges with any b. t is the number of the update, from 1.
    """

    kind: Literal["lagged_rms"] = "lagged_rms"
    beta: float = Field(default=0.9999, ge=0, lt=1, description="decay of the second moment, per step")
    eps: float = Field(default=1e-6, gt=0, description="floor of the root, in units of the gradient")
    clip_power: float | None = Field(
        default=0.25, ge=0, description="entries are held to [-t^p, t^p] with this p; null: they are not clipped"
    )

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(lagged=True, entrywise=True, spectral_norm=math.sqrt(math.prod(block)))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"v": Slot(block, role="second_moment", frame="square")}

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        v = state["v"]
        weight = context.per_block(lambda step: 1 - self.beta * step.clamp_max(1), v)  # 1 while priming, at step 0
        state["v"] = v.add_((gradient.square() - v) * weight)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        out = direction / state["v"].sqrt().clamp_min_(self.eps)
        if self.clip_power is None:
            return out
        power = self.clip_power
        bound = number_like(context.per_block(lambda step: step**power, out), out)
        return torch.minimum(torch.maximum(out, -bound, out=out), bound, out=out)


class Atan2(Stage):
    """scale * atan2(d, width * sqrt(v / (1 - b^t)))  with  v <- b v + (1 - b) g^2

    Adam without an eps (Everett et al. 2024, arXiv:2407.05872, section 4.3, "Adam-atan2"): blind to the scale of the
    gradient however small, and no entry is larger than scale * pi / 2. For small ratios it is d / sqrt(v).
    """

    kind: Literal["atan2"] = "atan2"
    beta: float = Field(default=0.999, ge=0, lt=1, description="decay of the second moment, per step")
    scale: float = Field(default=1.27, gt=0, description="multiplies the angle; 4 / pi gives a ratio of 1 the size 1")
    width: float = Field(default=1.0, gt=0, description="multiplies the root: larger is closer to a plain division")
    constants: ClassVar[frozenset[str]] = frozenset({"beta"})

    def traits(self, block: tuple[int, ...]) -> Traits:
        most = self.scale * math.atan2(1, self.width) * math.sqrt(math.prod(block))
        return Traits(entrywise=True, spectral_norm=most)

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"v": Slot(block, role="second_moment", frame="square")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        v = state["v"].mul_(self.beta).addcmul_(gradient, gradient, value=1 - self.beta)
        state["v"] = v
        root = (v / context.correction(self.beta, v)).sqrt_().mul_(self.width)
        return in_registers(torch.atan2, direction, root).mul_(self.scale)
