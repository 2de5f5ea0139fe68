"""Weight decay after the step and after what constraints before it have done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from .base import Constraint, ConstraintContext, Slots


class LateDecay(Constraint):
    """W' <- W' (1 - lr rate [U W > 0])  with W from before the step and W' after it (cautious: where U points to zero).

    In the order of the recipe's constraints: after `radius_pin` it acts on the pinned parameter (the record of 2026 in
    track 3 of modded-nanogpt, with rate 0.025). The decay of the param group comes before the step.
    """

    kind: Literal["late_decay"] = "late_decay"
    rate: float = Field(default=0.025, gt=0, description="decay rate, times the learning rate")
    cautious: bool = Field(default=True, description="decay only entries with U W > 0; false: all of them")

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
        keep = 1 - context.lr * self.rate
        if not self.cautious:
            return [tensor * keep for tensor in moved]
        rows = zip(parameters, updates, moved, strict=True)
        return [torch.where(update * parameter > 0, tensor * keep, tensor) for parameter, update, tensor in rows]
