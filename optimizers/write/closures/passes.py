"""The calls of the closure of one step, all of which see one function and leave what the first leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from eigengraft.distributed.layouts import local

BufferName = tuple[nn.Module, str]
"""A module, and the name of one of its buffers in it."""


class Passes:
    """The calls of one closure, each of which begins with the buffers and the random numbers of the first.

    So dropout draws the same masks, and `spectral_norm` iterates from the same vectors. Afterwards buffers and random
    numbers are as the first call left them: BatchNorm's statistics advance once for each step, from the forward at W,
    as in the official code of SAM (google-research/sam, `get_sam_gradient`). Buffers that no call writes into are not
    copied back.

    closure: returns the loss and leaves gradients. model: whose buffers are kept; None: of no model. parameters: on
    whose devices random numbers are kept, beside those of the CPU; none: the closure is called once.
    """

    def __init__(self, closure: Callable[[], Any], model: nn.Module | None, parameters: Iterable[Tensor]) -> None:
        self._closure, self._model = closure, model
        self._devices = {parameter.device for parameter in parameters}
        self._start: _Start | None = None

    def first(self) -> Any:
        """What the closure returns where the parameters are."""
        self._start = _Start(self._model, self._devices) if self._devices else None
        return self._call()

    def again(self) -> Any:
        """What the closure returns where the parameters are now."""
        assert self._start is not None
        with self._start.repeated():
            return self._call()

    def _call(self) -> Any:
        with torch.enable_grad():
            return self._closure()


def require_closure(closure: object, repeated_by: str | None) -> None:
    """Raises RuntimeError for a closure that is missing where a part of the recipe calls it again, TypeError for one
    that is no function."""
    if closure is None and repeated_by is not None:
        times = "twice" if repeated_by == "sam" else "again"
        raise RuntimeError(
            f"Optimizer.step: a closure is required by `{repeated_by}`, which calls it {times}, got none"
        )
    if closure is not None and not callable(closure):
        raise TypeError(f"Optimizer.step: a function that returns the loss is required as closure, got {closure!r:.60}")


class _Start:
    """Buffers and states of random numbers before the first call."""

    def __init__(self, model: nn.Module | None, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if _has_generator(device)]
        self._random = _random_states(self._devices)
        self._buffers = Buffers.of(model)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Inside everything is as it was before the first call, afterwards as it is now."""
        written = self._buffers.written()
        random, after = _random_states(self._devices), Buffers(written)
        self._buffers.restore(written)
        self._set_random(self._random)
        try:
            yield
        finally:
            after.restore(written)
            self._set_random(random)

    def _set_random(self, random: Sequence[Tensor]) -> None:
        torch.set_rng_state(random[0])
        for device, state in zip(self._devices, random[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, *_at(device))


class Buffers:
    """Buffers of modules, by module and name: which tensor each is, and a copy of its values."""

    def __init__(self, names: Sequence[BufferName]) -> None:
        self._tensors = {(module, name): module._buffers[name] for module, name in names}
        self._versions = {key: _version(tensor) for key, tensor in self._tensors.items()}
        self._values = {key: None if x is None else torch.empty_like(x) for key, x in self._tensors.items()}
        _copy((self._values[key], self._tensors[key]) for key in self._tensors)

    @classmethod
    def of(cls, model: nn.Module | None) -> Self:
        """Return the buffers of all modules of a model; none if the model is None."""
        modules = () if model is None else model.modules()
        return cls([(module, name) for module in modules for name, kept in module._buffers.items() if kept is not None])

    def written(self) -> list[BufferName]:
        """Return the buffers whose values may have changed.

        Kernels of norms write without raising a version, so that buffers of norms always count as changed.
        """
        return [key for key in self._tensors if _may_differ(*key, self._tensors[key], self._versions[key])]

    def restore(self, names: Iterable[BufferName]) -> None:
        """Makes modules hold the same tensors with the same values again."""
        for key in (names := list(names)):
            key[0]._buffers[key[1]] = self._tensors[key]
        _copy((self._tensors[key], self._values[key]) for key in names)


def _may_differ(module: nn.Module, name: str, tensor: Tensor | None, version: int | None) -> bool:
    """Whether a buffer may be another one, or have other values, than at that version of that tensor."""
    now = module._buffers.get(name)
    return isinstance(module, _NormBase) or now is not tensor or _version(now) != version


def _copy(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> None:
    """Copies the second of each pair into the first, by few launches, and counts no version.

    Autograd keeps the statistics of norms for backward and reads them in evaluation alone, where they stay as they are.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for to, values in pairs:
        if to is not None and values is not None:
            kinds.setdefault((to.device, to.dtype), []).append((local(to).data, local(values)))
    for kind in kinds.values():
        torch._foreach_copy_([x for x, _ in kind], [y for _, y in kind])


def _version(tensor: Tensor | None) -> int | None:
    """How often was written into a tensor, as far as torch counts; None for tensors of inference mode."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def _random_states(devices: Sequence[torch.device]) -> list[Tensor]:
    """The states of the CPU's generator and of the default generator of each device."""
    states = [torch.get_device_module(device).get_rng_state(*_at(device)) for device in devices]
    return [torch.get_rng_state(), *states]


def _has_generator(device: torch.device) -> bool:
    """Whether a device draws random numbers of its own here; that of a fake tensor may be another machine's."""
    return device.type not in ("cpu", "meta") and bool(torch.get_device_module(device).is_available())


def _at(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is one
