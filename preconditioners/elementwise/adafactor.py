"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235): a rank-one second moment and the relative step size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.signals import Request
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Stage, Traits


class Adafactor(Stage):
    """Divide by the root of a factored second moment, for blocks `[..., m, n]`.

    r <- b r + (1 - b) mean_n(g^2);  c <- b c + (1 - b) mean_m(g^2);  v = r c^T / mean(r);  d / max(sqrt(v), eps)

    g is the gradient, d the direction, and t the step. mean_n is the mean over the last axis, and mean_m the mean over
    the last but one. The decay b is 1 - t^-decay_power, which needs no bias correction. With a constant `beta`, b is
    `beta`, and the means are divided by 1 - beta^t. Blocks with fewer than two axes store the full v.

    The update clipping of section 6 of the paper is the stage `clip_rms`, and the paper's relative step size is the
    stage `relative_step`.
    """

    kind: Literal["adafactor"] = "adafactor"
    beta: float | None = Field(
        default=None, ge=0, lt=1, description="constant decay per step; default: 1 - t^-decay_power"
    )
    decay_power: float = Field(default=0.8, gt=0, le=1, description="the decay is 1 - t^-decay_power")
    eps: float = Field(default=1e-15, gt=0, description="lower bound of sqrt(v), in units of the gradient")
    constants: ClassVar[frozenset[str]] = frozenset({"beta"})

    @model_validator(mode="after")
    def _one_decay(self) -> Self:
        if self.beta is not None and self.decay_power != type(self).model_fields["decay_power"].default:
            raise ValueError(
                f"decay_power: cannot be combined with a constant beta, {self.beta}; remove one of the two"
            )
        return self

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        if len(block) < 2:
            return {"v": Slot(block, role="second_moment", frame="square", decay=self.beta)}
        return {
            "row": Slot(block[:-1], role="second_moment", frame="row", decay=self.beta),
            "column": Slot((*block[:-2], block[-1]), role="second_moment", frame="column", decay=self.beta),
        }

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        square = gradient.square()
        if gradient.ndim < 3:
            return direction / self._floored(self._track(state, "v", square, context))
        row = self._track(state, "row", square.mean(-1), context)  # [N, ..., m]
        column = self._track(state, "column", square.mean(-2), context)  # [N, ..., n]
        mean = row.mean(-1, keepdim=True).clamp_min_(self._floor(row))
        # Entries of v that are smaller than squared rounding errors of the gradient have no information. They are
        # raised to this size, `rounding`.
        rounding = mean.unsqueeze(-1) * (4 * gradient[0].numel() * torch.finfo(row.dtype).eps ** 2)
        v = (row / mean).unsqueeze(-1) * column.unsqueeze(-2)
        return direction / self._floored(torch.maximum(v, rounding))

    def _track(self, state: State, name: str, square: Tensor, context: StepContext) -> Tensor:
        """Update the running mean of squares in a slot. Return the mean, with bias correction if `beta` is set.

        name: name of the slot.
        square: the squared gradient, or its mean over an axis, in the shape of the slot.
        """
        v = state[name]
        if self.beta is not None:
            v.lerp_(square, 1 - self.beta)
            state[name] = v
            return v / context.correction(self.beta, v)
        v.add_((square - v) * context.per_block(lambda step: step**-self.decay_power, v))
        state[name] = v
        return v

    def _floor(self, like: Tensor) -> float:
        """Return the floor of second moments: eps^2, but at least the smallest normal number of the dtype of `like`."""
        return max(self.eps**2, torch.finfo(like.dtype).tiny)

    def _floored(self, v: Tensor) -> Tensor:
        """Return sqrt(v) for second moments v, after entries below `_floor` are raised to it."""
        return v.clamp_min(self._floor(v)).sqrt_()


class RelativeStep(Stage):
    """d * max(floor, RMS(parameter)) * min(1, 1 / (lr sqrt(t))) (relative step size, section 8 of the paper).

    d is the direction, and t the step. The optimizer multiplies the result by the learning rate lr, so that d is
    multiplied by max(floor, RMS) * min(lr, 1 / sqrt(t)), as in torch.optim.Adafactor.
    """

    kind: Literal["relative_step"] = "relative_step"
    floor: float = Field(default=1e-3, gt=0, description="lower bound of RMS(parameter), in units of the parameter")
    decay: bool = Field(default=True, description="bound the step by 1 / sqrt(t) as well as by lr")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request("lr"), Request("parameter_rms")))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        rms = context.tensor("parameter_rms", direction)
        scale = rms.clamp_min(self.floor).reshape(-1, *[1] * (direction.ndim - 1))
        if self.decay:
            root = context.per_block(torch.sqrt, scale)
            scale = scale * (1 / (context.signal("lr") * root)).clamp_max(1.0)
        return direction * scale
