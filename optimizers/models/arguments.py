"""Checks of arguments to the functions that watch models or estimate curvature."""

from __future__ import annotations

from torch import nn

from ..optimizer import Optimizer


def require_optimizer(who: str, optimizer: object) -> None:
    """Raise TypeError if an argument is no `eigengraft.Optimizer`.

    who: name of the function that was called, for the error.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{who}: the first argument must be an eigengraft.Optimizer, got {described(optimizer)}")


def require_watchable(who: str, optimizer: object, model: object) -> None:
    """Raise TypeError unless `optimizer` is an `eigengraft.Optimizer` and `model` an `nn.Module`.

    who: name of the function that was called, for the error.
    """
    require_optimizer(who, optimizer)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: the model must be an nn.Module, got {described(model)}")


def described(value: object) -> str:
    """Return the text of a number or string, and the type of anything else."""
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
