"""Isolation of what an optimizer computes from the contexts that its caller is in.

A step under `torch.autocast`, `torch.inference_mode`, a `FakeTensorMode` or `torch.compile` is the step outside of
them: every public method that computes enters `isolation` or is `isolated`. Default dtype and default device are left
as they are, because the first belongs to all threads: every tensor in this package is made with both named, which a
test checks in the source. Global settings of accuracy (`torch.set_float32_matmul_precision`,
`torch.use_deterministic_algorithms`) are the user's wish and stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import unset_fake_temporarily

from eigengraft.numerics import active_fake_mode, fake_mode


class _Grouped(Protocol):
    """An optimizer, of which only the parameters are read."""

    param_groups: list[dict[str, Any]]


_O = TypeVar("_O", bound=_Grouped)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def kept_from_compiler(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep torch.compile from tracing a function and the functions that it calls.

    `torch.compiler.disable` does the same, and imports the compiler, which takes a second. Here nothing is imported:
    before somebody else has imported the compiler nothing can be traced.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call


def without_dynamo(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A bound method without `torch._disable_dynamo`, whose first call imports torch.compile, which takes a second.

    Where torch.compile is imported already, or something else has wrapped the method too, it stays as it is.
    """
    plain: Callable[..., _T] | None = getattr(method, "__wrapped__", None)
    if "torch._dynamo" in sys.modules or plain is None or hasattr(plain, "__wrapped__"):
        return method
    return partial(plain, method.__self__)  # type: ignore[attr-defined]


def isolated(method: Callable[Concatenate[_O, _P], _T]) -> Callable[Concatenate[_O, _P], _T]:
    """A method of an optimizer that runs in `isolation` and is kept from torch.compile."""

    @wraps(method)
    def run(optimizer: _O, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with isolation(optimizer):
            return method(optimizer, *args, **kwargs)

    return kept_from_compiler(run)


def isolation(optimizer: _Grouped) -> AbstractContextManager[Any]:
    """A context without gradients, autocast and inference mode, in the fake mode of the optimizer's parameters if any.

    What is off already is not entered: in ordinary surroundings this is `torch.no_grad()`.
    """
    contexts: list[AbstractContextManager[Any]] = []
    own = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    wanted, active = fake_mode(own), active_fake_mode()
    if wanted is not active:
        contexts.append(unset_fake_temporarily() if wanted is None else wanted)
    if torch.is_inference_mode_enabled():
        contexts.append(torch.inference_mode(False))
    if outside := _without_autocast():
        contexts += [_fresh_casts(), *outside]
    return _entered([*contexts, torch.no_grad()]) if contexts else torch.no_grad()


def without_autocast() -> AbstractContextManager[Any]:
    """A context without autocast, on devices of any type."""
    contexts = _without_autocast()
    return _entered(contexts) if contexts else nullcontext()


def in_surroundings(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function as it would run if it were called here: under the autocast and inference mode of this place.

    For a closure, which a step calls within its isolation. It runs with gradients, unless inference mode forbids them.
    """
    devices = {device: torch.get_autocast_dtype(device) for device in _autocast_devices()}
    inference, cached = torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        contexts: list[AbstractContextManager[Any]] = [torch.inference_mode()] if inference else []
        contexts += [torch.autocast(device, dtype=dtype, cache_enabled=cached) for device, dtype in devices.items()]
        with _entered(contexts):
            torch.clear_autocast_cache()  # a step has changed parameters since the last call
            return function(*args, **kwargs)

    return call if devices or inference else function


def _without_autocast() -> list[AbstractContextManager[Any]]:
    """Contexts that end the autocast of this place."""
    return [torch.autocast(device, enabled=False) for device in _autocast_devices()]


@contextmanager
def _fresh_casts() -> Iterator[None]:
    """Make autocast cast parameters anew after this context, which changes them: it keeps casts of the old values."""
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _autocast_devices() -> list[str]:
    """Types of devices under autocast now."""
    if not torch._C._is_any_autocast_enabled():
        return []
    accelerator = torch.accelerator.current_accelerator()
    types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return [device for device in types if torch.is_autocast_enabled(device)]


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """All of the contexts, entered in their order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
