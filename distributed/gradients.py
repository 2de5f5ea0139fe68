"""Gradients as their parameters lie: a gradient is what its placements say, never its local values alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from .rank_group import DistributedError, RankGroup


def local_gradients(
    names: Sequence[str], parameters: Sequence[Tensor], rank_group: RankGroup | None
) -> list[Tensor | None]:
    """What this rank holds of the gradient of each parameter, laid out as the parameter is; None: it has no gradient.

    A DTensor with other placements, as a partial sum, is redistributed by all ranks of its mesh; `parameter.grad` stays
    as it is. Raises ValueError for a gradient that cannot be laid out so, DistributedError where ranks fail to do it.
    """
    pairs = list(zip(names, parameters, strict=True))
    moved = [name for name, parameter in pairs if _lies_elsewhere(name, parameter)]
    if moved and rank_group is not None:
        none = [name for name, parameter in pairs if parameter.grad is None]
        told = f"; none of {', '.join(none[:3])}" if none else ""
        rank_group.meet(f"redistribution of gradients ({moved[0]} and {len(moved) - 1} more{told})")
    return [_local_gradient(name, parameter) for name, parameter in pairs]


def _lies_elsewhere(name: str, parameter: Tensor) -> bool:
    """Whether a gradient has other placements than its parameter; ValueError if it cannot get the same."""
    gradient = parameter.grad
    if gradient is None or not (isinstance(gradient, DTensor) or isinstance(parameter, DTensor)):
        return False
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        kinds = ["a DTensor" if isinstance(x, DTensor) else "a plain tensor" for x in (parameter, gradient)]
        raise ValueError(f"{name}: the gradient of {kinds[0]} must be one too, got {kinds[1]}")
    if gradient.device_mesh != parameter.device_mesh:
        raise ValueError(
            f"{name}: a gradient on the parameter's mesh {parameter.device_mesh} is required, got one on "
            f"{gradient.device_mesh}"
        )
    return gradient.placements != parameter.placements


def _local_gradient(name: str, parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient.to_local()
    try:
        return gradient.redistribute(placements=parameter.placements).to_local()
    except Exception as error:
        raise DistributedError(
            f"{name}: the gradient could not be redistributed from {gradient.placements} to the parameter's placements "
            f"{parameter.placements}; ranks must do it together. Here: {type(error).__name__}: {error}"
        ) from error
