"""SOAP as a loop over stacks, written by hand, with which the time of composing a recipe is compared.

eigengraft bench step --candidate '{peer: "tests/peers/soap_loop.py:SoapLoop",
    options: {lr: 1.0e-3, interval: "{interval}"}, maths: "soap, permuted"}'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eigengraft.blocking.stacks import max_blocks, split_ranges
from eigengraft.preconditioners import PowerQR
from eigengraft.preconditioners.algebra.products import add_symmetric, reordered, rotate, unfold

BETA, EPS, DECAY = 0.95, 1e-8, 0.01


@dataclass
class _Stack:
    """N equal parameters with their moments `[N, *shape]`, and by axis A_i and Q_i `[N, d_i, d_i]`."""

    parameters: list[Tensor]
    factors: dict[int, Tensor]
    bases: dict[int, Tensor]

    def __post_init__(self) -> None:
        shape = (len(self.parameters), *self.parameters[0].shape)
        self.m, self.v = torch.zeros(shape), torch.zeros(shape)


class SoapLoop(torch.optim.Optimizer):
    """The steps of `soap_fitted` on a CPU, its second moments permuted and all refreshes at once, as one function.

    A_i <- b A_i + (1 - b) G_i G_i^T;  Adam in the basis Q_1 x ... x Q_k, which follows the A_i by a power step and a
    QR at every multiple of `interval`, and is an eigendecomposition at step 2. Vectors and axes longer than `max_size`
    have no factor. Products, QR and the length of stacks are those of the recipe, so that what differs is composition:
    no stages, no declared state, no check of gradients, no ranks.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, interval: int = 10, max_size: int = 1024) -> None:
        super().__init__(params, {"lr": lr})
        self.interval, self.max_size, self.count, self.solver = interval, max_size, 0, PowerQR()
        self.stacks = list(self._stacks())
        for stack in self.stacks:
            parts = {"m": stack.m, "v": stack.v, "factors": stack.factors, "bases": stack.bases}
            self.state[stack.parameters[0]] = parts

    def _stacks(self) -> Iterator[_Stack]:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in self.param_groups[0]["params"]:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for shape, own in by_shape.items():
            axes = [axis for axis, d in enumerate(shape) if len(shape) > 1 and d <= self.max_size]
            largest = max([shape.numel(), *(shape[axis] ** 2 for axis in axes)])
            for start, stop in split_ranges(range(len(own)), max_blocks(largest, own[0].dtype, own[0].device), False):
                squares = {axis: torch.zeros(stop - start, shape[axis], shape[axis]) for axis in axes}
                bases = {axis: torch.eye(shape[axis]).repeat(stop - start, 1, 1) for axis in axes}
                yield _Stack(own[start:stop], squares, bases)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step. There is no closure."""
        self.count += 1
        lr, weight = self.param_groups[0]["lr"], 1 - BETA**self.count
        for stack in self.stacks:
            g = torch.empty_like(stack.m)
            torch._foreach_copy_(list(g.unbind()), [p.grad for p in stack.parameters if p.grad is not None])
            for axis, factor in stack.factors.items():
                y = unfold(g, axis)
                add_symmetric(factor, y, y, BETA, 1 - BETA)
            if self.count == 2 or (self.count > 2 and self.count % self.interval == 0):
                self._refresh(stack)
            g = rotate(g, {axis: q.mT for axis, q in stack.bases.items()})
            stack.m.lerp_(g, 1 - BETA)
            stack.v.mul_(BETA).addcmul_(g, g, value=1 - BETA)
            update = (stack.m / weight).div_(stack.v.sqrt().div_(math.sqrt(weight)).add_(EPS))
            update = rotate(update, stack.bases)
            torch._foreach_mul_(stack.parameters, 1 - lr * DECAY)
            torch._foreach_add_(stack.parameters, list(update.unbind()), alpha=-lr)

    def _refresh(self, stack: _Stack) -> None:
        for axis, factor in stack.factors.items():
            old = stack.bases[axis]
            new, order, _ = self.solver.basis(factor, old, self.count == 2)
            if order is not None:
                stack.v.copy_(reordered(stack.v, axis, order))
            stack.m.copy_(rotate(rotate(stack.m, {axis: old}), {axis: new.mT}))
            stack.bases[axis].copy_(new)
