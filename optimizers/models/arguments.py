"""Checks of arguments to the functions that watch models or estimate curvature."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn

from ..optimizer import Optimizer


def require_optimizer(who: str, optimizer: object) -> None:
    """Raise TypeError if an argument is no `eigengraft.Optimizer`."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{who}: the first argument must be an eigengraft.Optimizer, got {_described(optimizer)}")


def require_watchable(who: str, optimizer: object, model: object) -> None:
    """Raise TypeError if the arguments are no `eigengraft.Optimizer` and no `nn.Module`."""
    require_optimizer(who, optimizer)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: the model must be an nn.Module, got {_described(model)}")


def require_function(who: str, loss: object) -> None:
    """Raise TypeError if `loss` is not callable."""
    if not callable(loss):
        raise TypeError(f"{who}: loss must be a function that returns the loss, got {_described(loss)}")


def require_integer(who: str, name: str, value: Any) -> None:
    """Raise TypeError if a value is no integer."""
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{who}: {name} must be an integer, got {_described(value)}") from None


def require_loss(who: str, loss: object) -> None:
    """Raise TypeError or ValueError if the result of a loss function is no differentiable number."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"{who}: the function loss must return a tensor, got {_described(loss)}")
    if loss.numel() != 1:
        raise ValueError(f"{who}: the function loss must return one number, got shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError(
            f"{who}: the loss has no gradient; the function loss must run a forward of its own, without `no_grad` or "
            "`detach`"
        )


def _described(value: object) -> str:
    """Return the text of a number or string, and the type of anything else."""
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
