"""A task whose parameters are stored in a chosen dtype, while the model computes in float32."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from eigengraft.experiments.tasks import Dataset, Task


class ParametersIn(Task):
    """A task with parameters and gradients in a chosen dtype, and products in float32.

    Only writes to parameters are rounded.
    """

    kind: Literal["parameters_in"] = "parameters_in"
    task: Task = Field(description="what is trained")
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="of parameters and gradients")

    def load(self) -> Dataset:
        return self.task.load()

    def build(self) -> nn.Module:
        return InFloat32(self.task.build().to(getattr(torch, self.dtype)))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(outputs, targets)


class InFloat32(nn.Module):
    """A model that computes in float32, whatever the dtype of its parameters is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        seen = {name: parameter.float() for name, parameter in self.model.named_parameters()}
        outputs: Tensor = torch.func.functional_call(self.model, seen, (inputs,))
        return outputs
