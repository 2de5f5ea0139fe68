"""Norms of parameters, gradients and updates in one step: a few kernels for all parameters, and no wait for the device.

`inspect` shows the norms of a step after `watch_next_step`, and a training run writes norms into its metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eigengraft.numerics import is_dtensor, local, squares_of

from ..step.step import as_pairs


class NormWatch:
    """The norms of parameters, gradients and updates in one step. The parameters are copied before the step.

    with_gradient: True for each parameter that had a gradient in the step; empty before `squares` was called.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Copy the parameters before the step.

        parameters: at least one parameter; all are on one device.
        """
        self.parameters, self.with_gradient = list(parameters), list[bool]()
        held = [_real(parameter) for parameter in self.parameters]
        self._before = [torch.empty_like(own) for own in held]
        torch._foreach_copy_(self._before, held)

    def squares(self, ranks: int = 1) -> Tensor:
        """Return sums of squares `[3, P]` in float64, on the device: of weights before the step, gradients, updates.

        A parameter without a gradient has 0 in the row of gradients. If ranks share the parameters, the results of all
        ranks must be added. Call this once, after the step and before gradients are cleared.

        ranks: number of ranks that share the parameters.
        """
        weights = squares_of(self._before)
        torch._foreach_sub_(self._before, [_real(parameter) for parameter in self.parameters])
        none = torch.zeros((), dtype=weights.dtype, device=weights.device)
        given = [p.grad for p in self.parameters if p.grad is not None]
        found = iter(squares_of([_real(gradient) for gradient in given]).unbind() if given else ())
        self.with_gradient = [p.grad is not None for p in self.parameters]
        gradients = torch.stack([next(found) if there else none for there in self.with_gradient])
        sums = torch.stack([weights, gradients, squares_of(self._before)])
        self._before = []
        if ranks == 1:
            return sums
        copies = [_copies(parameter, ranks) for parameter in self.parameters]
        return sums / torch.tensor(copies, dtype=sums.dtype, device="cpu").to(sums.device)


def _real(tensor: Tensor) -> Tensor:
    """Return this rank's entries of a tensor. Complex entries are returned as pairs of real numbers."""
    return as_pairs(local(tensor.detach()))


def _copies(parameter: Tensor, ranks: int) -> int:
    """Return the number of ranks, including this one, that hold the same entries of a parameter as this rank.

    ranks: number of ranks that share the parameter.
    """
    if not is_dtensor(parameter):
        return ranks
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
