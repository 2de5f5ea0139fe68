"""Fake tensors: shapes, dtypes and devices without numbers, by which torch and its tools estimate the memory of a run.

`torch._subclasses.fake_tensor.FakeTensorMode` makes every new tensor one. A decision that reads numbers takes the
branch of a step in which all is well. What is made once and kept must not be fake, or a real step would be given it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_P = ParamSpec("_P")
_T = TypeVar("_T")
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def fake_mode(x: object) -> FakeTensorMode | None:
    """The mode of a fake tensor, or of a DTensor of fake tensors; None: x is anything else."""
    if type(x) is nn.Parameter:
        return None
    own = getattr(x, "_local_tensor", x)
    return own.fake_mode if isinstance(own, FakeTensor) else None


def has_values(x: Tensor) -> bool:
    """Whether a tensor has numbers, as all have but fake tensors and those of a program that is being traced."""
    return not isinstance(x, FakeTensor) and active_fake_mode() is None


def active_fake_mode() -> FakeTensorMode | None:
    """The mode in which every new tensor is fake; None: new tensors have numbers."""
    found: FakeTensorMode | None = torch._C._get_dispatch_mode(_FAKE)
    return found


def cached_tensors(maxsize: int) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """`functools.lru_cache` for functions that make tensors. A fake mode and a traced graph get new ones, not kept."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        kept = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if torch.compiler.is_compiling() or active_fake_mode() is not None:
                return function(*args, **kwargs)
            return kept(*args, **kwargs)  # type: ignore[arg-type]

        return call

    return decorate
