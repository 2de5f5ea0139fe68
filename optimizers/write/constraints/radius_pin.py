"""Steps along a sphere: a parameter is as long as its radial step alone would make it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .base import Constraint, ConstraintContext, Slots


class RadiusPin(Constraint):
    """W' <- W' r / ||W'||  with r = <W', W> / ||W||,  W' = W - lr alpha W - lr U where the step has led from W.

    Without decay r = ||W|| - lr <U, W> / ||W||: what is across W turns it and makes it no longer (the record of 2026 in
    track 3 of modded-nanogpt). A parameter of zeros, or one whose U is 0, is where the step has led it.
    """

    kind: Literal["radius_pin"] = "radius_pin"

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
        lengths = context.dots(parameters, parameters).sqrt(), context.dots(moved, moved).sqrt()
        scales = context.dots(moved, parameters) / (lengths[0] * lengths[1])
        free = (context.dots(updates, updates) == 0) | ~scales.isfinite()
        rows = zip(moved, torch.where(free, 1.0, scales).unbind(0), strict=True)
        return [tensor * scale.to(tensor.dtype) for tensor, scale in rows]
