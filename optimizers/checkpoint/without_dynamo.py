"""Methods of torch's `Optimizer` without the import of torch.compile that they begin with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def without_dynamo(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A bound method without `torch._disable_dynamo`, whose first call imports torch.compile, which takes a second.

    Where torch.compile is imported already, or something else has wrapped the method too, it stays as it is.
    """
    plain: Callable[..., _T] | None = getattr(method, "__wrapped__", None)
    if "torch._dynamo" in sys.modules or plain is None or hasattr(plain, "__wrapped__"):
        return method
    return partial(plain, method.__self__)  # type: ignore[attr-defined]
