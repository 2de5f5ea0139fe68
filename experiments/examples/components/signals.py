"""A signal of your own: a measured sharpness, and a stage that takes shorter steps where it is high.

A training loop calls `optimizer.provide("sharpness", {parameter: number, ...})` before a step. In place of the mapping,
it can pass a function without arguments that returns such a mapping. The optimizer calls this function in every step.

In an experiment:

    imports: [signals.py]
    recipe: {update: [{kind: momentum}, {kind: sharp, bound: 10.0}]}
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft import Request, Signal, Stage, State, StepContext, Traits, register_signal
from eigengraft.numerics import per_block

register_signal(Signal("sharpness", "parameter", "the largest eigenvalue of the Hessian", reduce="max"))


class Sharp(Stage):
    """d / max(1, sharpness / bound),  d the direction, `sharpness` the signal of each block's parameter"""

    kind: Literal["sharp"] = "sharp"
    bound: float = Field(default=10.0, gt=0, description="largest sharpness with which the direction does not change")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request("sharpness"),))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        sharpness = context.tensor("sharpness", direction)  # [N], in the dtype and on the device of the direction
        return direction / per_block((sharpness / self.bound).clamp_min(1), direction)


if __name__ == "__main__":
    import torch

    import eigengraft
    from eigengraft.testing import check_stage

    print(check_stage(Sharp()))
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = eigengraft.Optimizer([weight], [Sharp()], lr=1.0)
    weight.grad = torch.ones(4, 3)
    optimizer.provide("sharpness", {weight: 20.0})
    optimizer.step()
    assert torch.allclose(weight, torch.tensor(0.5))
