"""Which axes of a block have a factor, and whether that is a matrix or a diagonal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from eigengraft.component import Component


def _axes_by_order(value: Any) -> Any:
    if value in ("all", "left", "right", "smaller"):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("'all', 'left', 'right', 'smaller' or a list of axes for each order of block is required")
    if not all(str(key).isdigit() for key in value):
        raise ValueError("the keys are orders of blocks (1, 2, ...)")
    return {int(key): tuple(axes) if isinstance(axes, (list, tuple)) else axes for key, axes in value.items()}


AxesByOrder = dict[int, tuple[Annotated[int, Field(ge=0)], ...]]
Side = Annotated[
    Literal["all", "left", "right", "smaller"] | AxesByOrder,
    BeforeValidator(_axes_by_order, json_schema_input_type=str | dict[str, tuple[int, ...]]),
]


class Axes(Component):
    """Which axes of a block `[d_1, ..., d_k]` have a factor: a matrix d x d, its diagonal, or none.

    An axis of length d of a block of n entries is too long for a matrix if d > max_size or d^2 > max_skew n.
    """

    side: Side = Field(
        default="all",
        description="which axes have a factor: all, the first (left), the last (right), or the shortest (smaller); or "
        "a list of axes for each order of block, as {2: [0]}",
    )
    entries: Literal["full", "diagonal"] = Field(
        default="full",
        description="matrices, or their diagonals (of Gram matrices: row and column sums of squares)",
    )
    max_size: int | None = Field(default=None, ge=1, description="longest axis with a full factor; default: no bound")
    max_skew: float | None = Field(
        default=None,
        gt=0,
        description="axes longer than max_skew times the product of the others, d^2 > max_skew n, have no full factor; "
        "default: no bound",
    )
    oversize: Literal["none", "diagonal"] = Field(
        default="none", description="what axes that are too long for a full factor have: none, or its diagonal"
    )
    vectors: bool = Field(default=True, description="whether blocks with one axis have a factor")

    @model_validator(mode="after")
    def _options_matter(self) -> Self:
        bounded = self.max_size is not None or self.max_skew is not None
        if self.oversize == "diagonal" and not bounded:
            raise ValueError("oversize: 'none' is required without max_size and max_skew, got 'diagonal'")
        if self.oversize == "diagonal" and self.entries == "diagonal":
            raise ValueError("oversize: 'none' is required with entries 'diagonal', got 'diagonal'")
        if isinstance(self.side, dict):
            for order, axes in self.side.items():
                if any(axis >= order for axis in axes):
                    raise ValueError(f"side: axes of blocks of order {order} below {order} are required, got {[*axes]}")
            if 1 in self.side and not self.vectors:
                raise ValueError("vectors: true is required where `side` has axes of order 1, got false")
        return self

    @property
    def has_diagonals(self) -> bool:
        """Whether some axis may have a diagonal for a factor."""
        return "diagonal" in (self.entries, self.oversize)

    def of(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a block that have a factor."""
        if block not in self._known:  # asked several times a step, for each stack
            chosen = self._chosen(block)
            self._known[block] = tuple(a for a in chosen if self.oversize == "diagonal" or self._fits(block, a))
        return self._known[block]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """What `of` has answered."""
        return {}

    def _chosen(self, block: tuple[int, ...]) -> Sequence[int]:
        """The axes that have a factor unless they are too long for one."""
        order = len(block)
        if order < 2 and not self.vectors:
            return ()
        chosen: Sequence[int] = range(order)
        if isinstance(self.side, dict):
            chosen = [axis for axis in chosen if axis in self.side.get(order, chosen)]
        elif self.side == "smaller":
            chosen = sorted(chosen, key=lambda axis: block[axis])[:1]
        elif self.side != "all":
            chosen = chosen[:1] if self.side == "left" else chosen[-1:]
        return chosen

    def left_out(self, block: tuple[int, ...]) -> tuple[str, ...]:
        """Why axes of a block that `side` chooses have no factor: they are too long for one."""
        left = [axis for axis in self._chosen(block) if axis not in self.of(block)]
        return tuple(f"axis {axis} without a factor: {self._too_long(block, axis)}" for axis in left)

    def full(self, block: tuple[int, ...], axis: int) -> bool:
        """Whether the factor of an axis is a matrix; otherwise it is a diagonal."""
        return self.entries == "full" and self._fits(block, axis)

    def _fits(self, block: tuple[int, ...], axis: int) -> bool:
        return self._too_long(block, axis) is None

    def _too_long(self, block: tuple[int, ...], axis: int) -> str | None:
        """Which bound an axis exceeds, if any."""
        d, n = block[axis], math.prod(block)
        if self.max_size is not None and d > self.max_size:
            return f"{d} > max_size {self.max_size}"
        if self.max_skew is not None and d**2 > self.max_skew * n:
            return f"{d} > max_skew {self.max_skew:g} x {n // d}"
        return None
