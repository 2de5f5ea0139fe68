"""Division by the diagonal of the Hessian, clipped (Sophia, arXiv:2305.14342)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.signals import Request
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Stage, Traits


class DiagonalNewton(Stage):
    """clip(d / max(gamma h, eps), -bound, bound)  with  h <- b h + (1 - b) H  in steps in which H is provided

    d is the direction, and b is `beta`. H is an estimate of the diagonal of the Hessian, the signal `hessian_diagonal`,
    and h is the running mean of H. Provide H in the first step and then about every 10 steps, by Hutchinson's method or
    by Gauss-Newton-Bartlett (squared gradients of a loss with labels that are drawn from the model).

    After a momentum without bias correction this is Sophia (Liu et al. 2023, arXiv:2305.14342, Algorithm 3). Where h is
    not positive the result is `bound` with the sign of d, unless |d| is below eps * bound.
    """

    kind: Literal["diagonal_newton"] = "diagonal_newton"
    beta: float = Field(default=0.99, ge=0, lt=1, description="decay of h, per step in which H is provided")
    gamma: float = Field(default=0.01, gt=0, description="factor of h: with a smaller one more entries are clipped")
    eps: float = Field(default=1e-12, gt=0, description="lower bound of the divisor, in units of the Hessian")
    bound: float = Field(default=1.0, gt=0, description="largest entry of the result")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request("hessian_diagonal", when="first"),), entrywise=True)

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"h": Slot(block, role="second_moment", frame="square")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        h = state["h"]
        if "hessian_diagonal" in context.signals:
            h = torch.lerp(h, context.tensor("hessian_diagonal", h), 1 - self.beta)
            state["h"] = h
        return (direction / (h * self.gamma).clamp_min_(self.eps)).clamp_(-self.bound, self.bound)
