"""The gradient of one batch: in one pass or in several, in full or in mixed precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .base import Batch, Task

Autocast = Literal["bfloat16"]


@dataclass(frozen=True)
class GradientPass:
    """How the gradient of a batch is computed; it is the same for every number of parts, but for rounding.

    task: whose loss it is.
    parts: pieces of the batch, one forward and one backward each; gradients add up.
    precision: of matrix products in forward passes (torch.autocast); None: that of the parameters.
    """

    task: Task
    parts: int = 1
    precision: Autocast | None = None

    def backward(self, module: nn.Module, batch: Batch, weight: float) -> Tensor:
        """The weighted mean loss of a batch, of which the parameters of a module get the gradient added to theirs."""
        rows, targets = len(batch.inputs), batch.targets.numel()
        if rows < self.parts:
            raise ValueError(f"accumulate: a row of the batch for each part is required, got {rows} for {self.parts}")
        total = torch.zeros((), device=batch.inputs.device)
        for part in range(self.parts):
            own = slice(part * rows // self.parts, (part + 1) * rows // self.parts)
            share = weight * batch.targets[own].numel() / targets if self.parts > 1 else weight
            with self._autocast(batch.inputs.device):
                outputs = module(batch.inputs[own])
            loss: Tensor = self.task.loss(outputs.float() if self.precision else outputs, batch.targets[own]) * share
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return total

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=getattr(torch, self.precision))
