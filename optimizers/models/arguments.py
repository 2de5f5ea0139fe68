"""Errors of arguments to what watches models and estimates curvature, by name."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn

from ..optimizer import Optimizer


def require_optimizer(who: str, optimizer: object) -> None:
    """Raises TypeError for what is no optimizer of a recipe."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{who}: an eigengraft.Optimizer is required first, got {_described(optimizer)}")


def require_watchable(who: str, optimizer: object, model: object) -> None:
    """Raises TypeError for what is no optimizer of a recipe, or no model."""
    require_optimizer(who, optimizer)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: a model, an nn.Module, is required, got {_described(model)}")


def require_function(who: str, loss: object) -> None:
    """Raises TypeError for a loss that is no function."""
    if not callable(loss):
        raise TypeError(f"{who}: a function that returns the loss is required as loss, got {_described(loss)}")


def require_integer(who: str, name: str, value: Any) -> None:
    """Raises TypeError for a number that is no integer."""
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{who}: an integer is required as {name}, got {_described(value)}") from None


def require_loss(who: str, loss: object) -> None:
    """Raises TypeError or ValueError for what is no differentiable number."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"{who}: a tensor is required from the function loss, got {_described(loss)}")
    if loss.numel() != 1:
        raise ValueError(f"{who}: one number is required from the function loss, got shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError(
            f"{who}: a loss that depends on parameters is required, got one without a gradient; the function loss "
            "makes a forward of its own, without `no_grad` or `detach`"
        )


def _described(value: object) -> str:
    """A number or a text as it is, anything else by its type."""
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
