"""Queries and keys whose logits stay below a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import Constraint, ConstraintContext, Slots


class QKClip(Constraint):
    """W_h <- W_h min(1, bound / S_h)^power  for every head h, the rows of W that make it, after the write

    QK-clip of MuonClip (Kimi K2, arXiv:2507.20534, section 2.1). S_h is the signal `max_logit`, the largest logit of
    the head in the step. Weights of queries and of keys have power 1/2; in multi-head latent attention the rotary part
    of queries has power 1, and the rotary key, which all heads share, none. Parameters without the signal are left
    alone, and so are outputs of a fused weight whose S is 0 or not finite; some parameter must have the signal.
    """

    kind: Literal["qk_clip"] = "qk_clip"
    bound: float = Field(default=100.0, gt=0, description="largest logit that changes nothing")
    power: float = Field(default=0.5, gt=0, le=1, description="share of the factor that this weight takes")
    requires_some: ClassVar[frozenset[str]] = frozenset({"max_logit"})

    def shardable(self, whole_rows: bool) -> bool:
        return True

    def retract(
        self,
        slots: Slots,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        moved: Sequence[Tensor],
        context: ConstraintContext,
    ) -> Sequence[Tensor]:
        largest = context.signals.get("max_logit", [None] * len(moved))
        return [w if s is None else w * self._factor(s).to(w.dtype) for w, s in zip(moved, largest, strict=True)]

    def _factor(self, largest: Tensor) -> Tensor:
        factor = (self.bound / largest.clamp_min(self.bound)) ** self.power
        return torch.where(largest.isfinite(), factor, 1.0)
