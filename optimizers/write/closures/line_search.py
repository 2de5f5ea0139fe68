"""Step sizes by backtracking: the closure of a step is called again where the step would lead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.component import Component
from eigengraft.distributed.layouts import is_dtensor, local
from eigengraft.numerics import fake_mode

from .passes import Passes
from .sharpness import like

SCALE = "step_scale"
"""Key of param groups: the part of the last step that was taken."""
Average = Callable[[Tensor], Tensor]
"""A number of this rank -> its mean over all ranks."""


class LineSearch(Component):
    """W <- W - s D  with the first s of s_0, shrink s_0, shrink^2 s_0, ... for which
    f(W - s D) <= f(W) - sufficient s max(<G, D>, 0)

    Armijo's condition with backtracking, on the batch of the step (Vaswani et al. 2019, arXiv:1905.09997, equation 1
    and Algorithm 1). D is the whole step of the recipe at its learning rate, decay included, G the gradient and f the
    loss that the closure returns, its mean over ranks. s_0 = min(1, grow s') with the s' of the step before: the
    learning rate is the largest step, which schedules may move. A loss that is not finite is too high; after `trials`
    the last s is taken. Every trial is a call of the closure, whose gradients are dropped. All calls are of one
    function: dropout has the same masks, and buffers, such as BatchNorm's statistics, are those of the first forward,
    where the optimizer was composed with the model.
    """

    sufficient: float = Field(default=0.1, ge=0, lt=1, description="share of the decrease along G that is required")
    shrink: float = Field(default=0.5, gt=0, lt=1, description="factor from one trial to the next")
    grow: float = Field(default=2.0, ge=1, description="factor from the last step's s to the first trial")
    trials: int = Field(default=10, ge=1, description="most calls of the closure after the step")

    def require_line(self, recipe: Any) -> None:
        """Raises ValueError for a part of a recipe that takes parameters off the line from W to W - D."""
        bent = any(update.constraints for update in recipe.updates().values())
        found = {"sam": recipe.sam is not None, "averaging": recipe.averaging is not None, "constraints": bent}
        what = next((name for name, there in found.items() if there), None)
        if what is not None:
            raise ValueError(f"line_search: steps along a line are required, got a recipe with `{what}`")

    def begin(self, parameters: Iterable[Tensor]) -> Search:
        """Remembers where the parameters are, before the step."""
        moved = [parameter for parameter in parameters if parameter.grad is not None]
        return Search(self, moved, [local(parameter.detach()).clone() for parameter in moved])


@dataclass(frozen=True)
class Search:
    """One step under way: parameters with gradients, and what this rank held of each before the step."""

    rule: LineSearch
    parameters: Sequence[Tensor]
    start: Sequence[Tensor]

    def finish(
        self,
        passes: Passes,
        loss: Any,
        groups: Sequence[MutableMapping[str, Any]],
        average: Average,
    ) -> None:
        """Takes back the part of the step that the condition does not allow; loss: that of the start, of this rank.

        Of fake tensors, which have no numbers, the whole step is taken.
        """
        if any(fake_mode(parameter) is not None for parameter in self.parameters):
            return
        ends = [local(parameter.detach()).clone() for parameter in self.parameters]
        gradients = [parameter.grad for parameter in self.parameters]
        slope, length = self._products(ends)
        highest = average(_number(loss, ends))
        if not (length > 0 and bool(highest.isfinite())):
            return
        scale = min(1.0, self.rule.grow * float(groups[0].get(SCALE, 1.0)))
        for trial in range(self.rule.trials):
            scale *= self.rule.shrink if trial else 1.0
            for parameter, start, end in zip(self.parameters, self.start, ends, strict=True):
                local(parameter.detach()).copy_(torch.lerp(start, end, scale))
            found = average(_number(passes.again(), ends))
            if bool(found <= highest - self.rule.sufficient * scale * max(slope, 0.0)):
                break
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in groups:
            group[SCALE] = scale

    def _products(self, ends: Sequence[Tensor]) -> tuple[float, float]:
        """<G, D> and <D, D> over all entries of all parameters, on however many ranks they lie."""
        sums: dict[Any, Tensor] = {}
        for parameter, start, end in zip(self.parameters, self.start, ends, strict=True):
            step, gradient = (start - end).double(), local(like(parameter)).double()
            own = torch.stack([(gradient * step).sum(), step.square().sum()])
            key = (parameter.device_mesh, parameter.placements) if is_dtensor(parameter) else None
            sums[key] = sums[key] + own.to(sums[key].device) if key in sums else own
        wholes = [own if key is None else _whole(own, *key) for key, own in sums.items()]
        if not wholes:
            return 0.0, 0.0
        slope, square = torch.stack([own.to(wholes[0].device) for own in wholes]).sum(0).tolist()
        return slope, square


def _whole(own: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """The sums over all shards of tensors that lie like that."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    parts = [Partial() if isinstance(placement, Shard) else Replicate() for placement in placements]
    return DTensor.from_local(own, mesh, parts).full_tensor()


def _number(loss: Any, like_these: Sequence[Tensor]) -> Tensor:
    """A loss as float64, where the parameters are."""
    if not isinstance(loss, (Tensor, float)):
        raise TypeError(f"line_search: a closure that returns the loss is required, got {type(loss).__name__}")
    device = like_these[0].device if like_these else torch.device("cpu")
    return torch.as_tensor(loss, dtype=torch.float64, device=device).detach().reshape(())
