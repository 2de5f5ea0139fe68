"""Isolation of an optimizer's computations from the contexts of its caller.

A step under `torch.autocast`, `torch.inference_mode`, a `FakeTensorMode` or `torch.compile` computes the same as a step
without these contexts. To ensure this, every public method that computes enters `isolation` or is decorated with
`isolated`. The default dtype of torch is shared by all threads and is not changed; instead, every tensor in this
package is made with an explicit dtype and device, which a test checks in the source. Global settings of accuracy
(`torch.set_float32_matmul_precision`, `torch.use_deterministic_algorithms`) are the user's choice and are not changed.
The one exception are refreshes of roots and bases, whose products are never in TF32 (`full_products`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import unset_fake_temporarily

from eigengraft.numerics import active_fake_mode, fake_mode


class _Grouped(Protocol):
    """An object with param groups, as every torch optimizer has them."""

    param_groups: list[dict[str, Any]]


_O = TypeVar("_O", bound=_Grouped)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def kept_from_compiler(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep torch.compile from tracing a function and the functions that it calls.

    `torch.compiler.disable` does the same but imports the compiler, which takes a second. This function does not: as
    long as no other code has imported the compiler, nothing can be traced, and the function is called directly.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call


def without_dynamo(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Undo the decorator `torch._disable_dynamo` of a bound method, and return the method.

    The first call of the decorated method would import the compiler, which takes a second. The decorator stays if the
    compiler is already imported, or if the method has a second decorator.
    """
    plain: Callable[..., _T] | None = getattr(method, "__wrapped__", None)
    if "torch._dynamo" in sys.modules or plain is None or hasattr(plain, "__wrapped__"):
        return method
    return partial(plain, method.__self__)  # type: ignore[attr-defined]


def isolated(method: Callable[Concatenate[_O, _P], _T]) -> Callable[Concatenate[_O, _P], _T]:
    """Decorate a method of an optimizer, so that modes of its caller such as autocast do not change its result.

    The method runs in the context `isolation`, and torch.compile does not trace it.
    """

    @wraps(method)
    def run(optimizer: _O, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with isolation(optimizer):
            return method(optimizer, *args, **kwargs)

    return kept_from_compiler(run)


def isolation(optimizer: _Grouped) -> AbstractContextManager[Any]:
    """Return a context without gradients, autocast and inference mode.

    If the parameters are fake tensors, their `FakeTensorMode` is active in the context; otherwise none is.
    """
    contexts: list[AbstractContextManager[Any]] = []
    own = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    wanted, active = fake_mode(own), active_fake_mode()
    if wanted is not active:
        contexts.append(unset_fake_temporarily() if wanted is None else wanted)
    if torch.is_inference_mode_enabled():
        contexts.append(torch.inference_mode(False))
    if outside := _without_autocast():
        fresh = ExitStack()
        fresh.callback(torch.clear_autocast_cache)  # its casts are of parameters from before the step
        contexts += [fresh, *outside]
    return _entered([*contexts, torch.no_grad()]) if contexts else torch.no_grad()


def without_autocast() -> AbstractContextManager[Any]:
    """Return a context without autocast, for all types of devices."""
    return _entered(_without_autocast())


def in_surroundings(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function so that it always runs under the autocast and inference mode that are active now.

    A step wraps the user's closure by this function before the step enters `isolation`.
    """
    devices = {device: torch.get_autocast_dtype(device) for device in _autocast_devices()}
    inference, cached = torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        contexts: list[AbstractContextManager[Any]] = [torch.inference_mode()] if inference else []
        contexts += [torch.autocast(device, dtype=dtype, cache_enabled=cached) for device, dtype in devices.items()]
        with _entered(contexts):
            torch.clear_autocast_cache()  # the cache may have casts of parameters from before the last step
            return function(*args, **kwargs)

    return call if devices or inference else function


def _without_autocast() -> list[AbstractContextManager[Any]]:
    """Return contexts that disable the active autocast."""
    return [torch.autocast(device, enabled=False) for device in _autocast_devices()]


def _autocast_devices() -> list[str]:
    """Return the types of devices for which autocast is active."""
    if not torch._C._is_any_autocast_enabled():
        return []
    accelerator = torch.accelerator.current_accelerator()
    types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return [device for device in types if torch.is_autocast_enabled(device)]


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Return one context that enters several contexts in order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
