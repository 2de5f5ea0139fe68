"""Updates that move every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.numerics import block_norm, per_block, safe_ratio

from .base import Constraint, ConstraintContext, Slots


class RowFloor(Constraint):
    """U_i <- U_i max(1, ratio ||W_i|| / ||U_i||)  for every row i, all that has one index of the first axis.

    No row moves by less than lr times ratio of its length (the record of 2026 in track 3 of modded-nanogpt, with ratio
    0.3825). A row of U that is 0 stays 0, and tensors with one axis are left alone.
    """

    kind: Literal["row_floor"] = "row_floor"
    ratio: float = Field(default=0.3825, gt=0, description="least length of a row of U, in lengths of the row of W")

    def shardable(self, whole_rows: bool) -> bool:
        return whole_rows

    def adjust(
        self, slots: Slots, parameters: Sequence[Tensor], updates: Sequence[Tensor], context: ConstraintContext
    ) -> Sequence[Tensor]:
        return [self._floored(w, u) if u.ndim > 1 else u for w, u in zip(parameters, updates, strict=True)]

    def _floored(self, parameter: Tensor, update: Tensor) -> Tensor:
        factor = safe_ratio(block_norm(parameter) * self.ratio, block_norm(update)).clamp_min(1)
        return update * per_block(factor, update)
