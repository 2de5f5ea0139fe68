"""Grafting: the direction of one chain with the magnitude of another (Agarwal et al. 2020, arXiv:2002.11803)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import per_block, safe_ratio
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Inner, Stage, Stages, Traits, run_chain
from ..elementwise.scale import norm_over


class Graft(Stage):
    """D ||M|| / ||D||  with D = direction(d), M = magnitude(d);  both chains receive the same gradient and direction d.

    Before step `start` the result is M, but the statistics of the chain `direction` already accumulate (Shi et al.
    2023, section 3.5.2). In every step the chain `after` is applied twice, with separate states: to the grafted
    direction, and to M. If `after` is a momentum, these two states are the two momenta of Distributed Shampoo in JAX
    (Anil et al. 2020).
    """

    kind: Literal["graft"] = "graft"
    direction: Stages = Field(description="the chain that gives the direction")
    magnitude: Stages = Field(description="the chain that gives the norm")
    start: int = Field(
        default=1, ge=1, description="first update with the grafted direction; earlier updates are those of `magnitude`"
    )
    per: Literal["block", "parameter"] = Field(default="block", description="entries over which norms are computed")
    after: Stages = Field(
        default=(),
        description="stages applied to the grafted direction and, with a second state, to the result of `magnitude`",
    )

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        magnitude = Inner(self.magnitude, block, sensitive=True)
        after = {f"after_{name}": Inner(self.after, block) for name in ("direction", "magnitude") if self.after}
        return {"direction": Inner(self.direction, block), "magnitude": magnitude, **after}

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(sums=self.per == "parameter")

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        began = context.holds(lambda steps: steps >= self.start)
        magnitude = run_chain(self.magnitude, state.scope("magnitude"), gradient, direction, context)
        norm = norm_over(magnitude, self.per, context)
        if began is True and not self.after:
            # Only the norm is used in this case. The tensor is freed before the other chain allocates its own.
            magnitude = norm
        mapped = run_chain(self.direction, state.scope("direction"), gradient, direction, context)
        grafted = mapped * per_block(safe_ratio(norm, norm_over(mapped, self.per, context)), mapped)
        if self.after:
            grafted = run_chain(self.after, state.scope("after_direction"), gradient, grafted, context)
            magnitude = run_chain(self.after, state.scope("after_magnitude"), gradient, magnitude, context)
        if isinstance(began, bool):
            return grafted if began else magnitude
        return torch.where(per_block(context.step >= self.start, mapped), grafted, magnitude)
