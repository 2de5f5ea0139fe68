"""Gradients of a neighbourhood: the closure of a step is called again where the loss is higher."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.component import Component
from eigengraft.distributed.layouts import is_dtensor, local


class SharpnessAware(Component):
    """g <- gradient at W + E,  E = rho G / ||G||,  G the gradient at W; norms over all parameters.

    SAM (Foret et al. 2021, arXiv:2010.01412, equation 2), around any update: chain, decay and write see g and W alone.
    Both gradients are of one function: dropout has the same masks, and buffers, such as BatchNorm's statistics, are
    those of the first forward, where the optimizer was composed with the model.
    adaptive: E = rho W^2 G / ||W G||, entry by entry (ASAM, Kwon et al. 2021, arXiv:2102.11600, algorithm 1), which is
    blind to the scale of parameters. Where G has entries that are not finite E is 0.
    """

    rho: float = Field(default=0.05, gt=0, description="length of E; of E / |W|, if adaptive")
    adaptive: bool = Field(default=False, description="measure E in units of the parameters")

    @contextmanager
    def perturbed(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """W + E in the parameters inside, without gradients; W again afterwards, bit for bit."""
        moved = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [like(parameter) for parameter in moved]
        saved = [parameter.detach().clone() for parameter in moved]
        scaled = [g * w.abs() for g, w in zip(gradients, saved, strict=True)] if self.adaptive else gradients
        norm = _norm(scaled)
        scale = torch.where(norm.isfinite() & (norm > 0), self.rho / norm, 0.0)
        try:
            for parameter, own, start in zip(moved, scaled, saved, strict=True):
                towards = local(own * start.abs() if self.adaptive else own)
                step = towards * scale.to(towards.device, towards.dtype)
                local(parameter.detach()).add_(torch.where(step.isfinite(), step, 0.0))
                parameter.grad = None
            yield
        finally:
            for parameter, start in zip(moved, saved, strict=True):
                local(parameter.detach()).copy_(local(start))


def like(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, laid out as the parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    if is_dtensor(gradient) and is_dtensor(parameter):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Frobenius norm of all tensors together, 0-d float64, on however many ranks they lie."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
        groups.setdefault((key, tensor.device, tensor.dtype), []).append(tensor)
    squares = []
    for own in groups.values():
        norm = torch.nn.utils.get_total_norm(own)
        squares.append((norm.full_tensor() if is_dtensor(norm) else norm).double().square())
    return (
        torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
        if squares
        else torch.zeros((), dtype=torch.float64, device="cpu")
    )
