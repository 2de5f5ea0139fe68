"""Parameters of constant norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import safe_ratio
from eigengraft.slots import Slot

from .base import Constraint, ConstraintContext, Slots


class Hyperball(Constraint):
    """U <- U ||W|| / ||U||;  W <- (W - lr U) ||W_0|| / ||W - lr U||,  Frobenius norms of whole parameters.

    Hyperball optimization: W keeps the norm of W_0, the parameter that its first update finds, and lr is the length of
    a step in units of it. A parameter with W_0 = 0 is left alone, and one with U = 0 stays. Weight decay comes before
    the retraction, which undoes its shrinking: what is left of it is a step longer by 1 / (1 - lr alpha), so that a
    rate of 0 says the same more clearly.
    """

    kind: Literal["hyperball"] = "hyperball"
    relative: bool = Field(default=True, description="scale U to the norm of W first; otherwise U is taken as it is")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"radius": Slot((), role="iterate")}

    def shardable(self, whole_rows: bool) -> bool:
        return True

    def sets_length(self) -> bool:
        return self.relative

    def begin(self, slots: Slots, parameters: Sequence[Tensor], context: ConstraintContext) -> None:
        torch._foreach_copy_(list(slots["radius"]), list(context.norms(parameters).unbind(0)))

    def adjust(
        self, slots: Slots, parameters: Sequence[Tensor], updates: Sequence[Tensor], context: ConstraintContext
    ) -> Sequence[Tensor]:
        if not self.relative:
            return updates
        free = torch.stack(list(slots["radius"])) == 0
        ratios = safe_ratio(context.norms(parameters), context.norms(updates))
        scales = torch.where(free, 1.0, ratios).unbind(0)
        return [update * scale for update, scale in zip(updates, scales, strict=True)]

    def retract(
        self,
        slots: Slots,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        moved: Sequence[Tensor],
        context: ConstraintContext,
    ) -> Sequence[Tensor]:
        radii, there = torch.stack(list(slots["radius"])), context.norms(moved)
        still = (context.norms(updates) == 0) | (there == 0)
        scales = torch.where(radii == 0, 1.0, safe_ratio(radii, there)).unbind(0)
        stays = (still & (radii != 0)).unbind(0)
        rows = zip(parameters, moved, scales, stays, strict=True)
        return [torch.where(stay, old, new * scale) for old, new, scale, stay in rows]
