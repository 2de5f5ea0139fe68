"""Constraints on parameters that the 2026 record of modded-nanogpt's track 3 uses."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import block_norm, over_stacks, per_block, safe_ratio

from ..constraints import Constraint, ConstraintContext, Slots, Tensors


class RadialBrake(Constraint):
    """U <- U - strength min(c, 0) W  with c = <U, W> / ||W||^2, over whole parameters.

    If c < 0, the step -lr U has a component along W that makes W longer. The fraction `strength` of this component is
    removed. The 2026 record of modded-nanogpt's track 3 uses strength 1/2. A parameter of zeros is not constrained.
    """

    kind: Literal["radial_brake"] = "radial_brake"
    strength: float = Field(default=0.5, gt=0, le=1, description="fraction of the outward component that is removed")

    def shardable(self, whole_rows: bool) -> bool:
        return True

    def adjust(self, slots: Slots, parameters: Tensors, updates: Tensors, context: ConstraintContext) -> Tensors:
        squares = context.squares(parameters)
        along = context.dots(updates, parameters) / squares
        cut = torch.where((squares > 0) & along.isfinite(), along.clamp_max(0), 0.0) * self.strength
        return over_stacks(lambda x, y, factor: x - y * factor, updates, parameters, cut.to(updates[0].dtype))


class RowFloor(Constraint):
    """U_i <- U_i max(1, ratio ||W_i|| / ||U_i||)  for every row i.

    Row i has the entries with index i on the first axis. The change lr ||U_i|| of a row is at least lr ratio ||W_i||.
    The 2026 record of modded-nanogpt's track 3 uses ratio 0.3825. A row of U that is 0 stays 0. Tensors with one axis
    are not constrained.
    """

    kind: Literal["row_floor"] = "row_floor"
    ratio: float = Field(default=0.3825, gt=0, description="least length of a row of U, in lengths of the row of W")

    def shardable(self, whole_rows: bool) -> bool:
        return whole_rows

    def adjust(self, slots: Slots, parameters: Tensors, updates: Tensors, context: ConstraintContext) -> Tensors:
        return over_stacks(self._floored, parameters, updates)

    def _floored(self, parameters: Tensor, updates: Tensor) -> Tensor:
        if updates.ndim < 3:  # [n, m]
            return updates
        rows = updates.flatten(0, 1)
        factors = safe_ratio(block_norm(parameters.flatten(0, 1)) * self.ratio, block_norm(rows)).clamp_min(1)
        return (rows * per_block(factors, rows)).view(updates.shape)


class RadiusPin(Constraint):
    """W' <- W' r / ||W'||  with r = <W', W> / ||W||.  W' = W - lr alpha W - lr U is the parameter after the step.

    Without decay r = ||W|| - lr <U, W> / ||W||: the component of U orthogonal to W rotates W but does not make it
    longer, as in the 2026 record of modded-nanogpt's track 3. A parameter with W = 0 or U = 0 is not constrained.
    """

    kind: Literal["radius_pin"] = "radius_pin"

    def shardable(self, whole_rows: bool) -> bool:
        return True

    def retract(
        self, slots: Slots, parameters: Tensors, updates: Tensors, moved: Tensors, context: ConstraintContext
    ) -> Tensors:
        lengths = context.squares(parameters).sqrt(), context.squares(moved).sqrt()
        scales = context.dots(moved, parameters) / (lengths[0] * lengths[1])
        free = (context.squares(updates) == 0) | ~scales.isfinite()
        return over_stacks(torch.mul, moved, scales.masked_fill(free, 1.0).to(moved[0].dtype))


class LateDecay(Constraint):
    """W' <- W' (1 - lr rate [U W > 0])  with the update U, and the parameter W before and W' after the step.

    [U W > 0] is 1 for entries that U moves towards zero and 0 for all others (cautious decay); if `cautious` is off, it
    is 1 for all entries. The decay runs at its position in the recipe's constraints: listed after `radius_pin`, it
    decays the pinned parameter, as in the 2026 record of modded-nanogpt's track 3 (rate 0.025). The decay of the param
    group is separate and comes before the step.
    """

    kind: Literal["late_decay"] = "late_decay"
    rate: float = Field(default=0.025, gt=0, description="decay rate, times the learning rate")
    cautious: bool = Field(default=True, description="decay only entries with U W > 0; false: all of them")

    def shardable(self, whole_rows: bool) -> bool:
        return True

    def retract(
        self, slots: Slots, parameters: Tensors, updates: Tensors, moved: Tensors, context: ConstraintContext
    ) -> Tensors:
        keep = 1 - context.lr * self.rate
        if not self.cautious:
            return torch._foreach_mul(list(moved), keep)
        return over_stacks(
            lambda old, update, new: torch.where(update * old > 0, new * keep, new), parameters, updates, moved
        )
