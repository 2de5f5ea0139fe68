"""ADOPT, written outside the package: Adam whose second moment does not contain the gradient that it divides."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft import Slot, Stage, State, StepContext, Traits


class Adopt(Stage):
    """Divide by the root of the second moment of earlier gradients (Taniguchi et al. 2024).

    d <- d / max(sqrt(v), eps);  then v <- beta v + (1 - beta) g^2;  v starts as the first g^2, which moves nothing.
    """

    kind: Literal["adopt"] = "adopt"
    beta: float = Field(default=0.9999, ge=0, lt=1, description="decay of the second moment, per step")
    eps: float = Field(default=1e-6, gt=0, description="the least root divided by, in units of the gradient")

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"v": Slot(block, role="second_moment", frame="square")}

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(lagged=True)

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        v = state["v"]
        first = context.per_block(lambda step: (step == 0).double(), v)
        v.mul_(self.beta * (1 - first)).add_(gradient.square().mul_(1 - self.beta * (1 - first)))
        state["v"] = v

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction / state["v"].sqrt().clamp_min(self.eps)
