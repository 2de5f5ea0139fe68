"""Numbers of the host on a device, and of a device on the host, with as few waits of the host as possible.

A copy from ordinary memory of the host waits until the device has done all that it was asked before. Numbers that every
step needs again are therefore copied once and kept; others are copied from pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .fake_tensors import cached_tensors, has_values


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting for the device. On the CPU it stays what it is."""
    if device.type == "cuda" and values.is_cpu and has_values(values):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def kept_on_device(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return int64 numbers as a tensor on a device that is made once for equal numbers: do not write to it."""
    if device.type == "cpu":
        return torch.from_numpy(values)
    return _kept(values.tobytes(), device)


@cached_tensors(maxsize=4096)
def _kept(values: bytes, device: torch.device) -> Tensor:
    return upload(torch.from_numpy(np.frombuffer(values, dtype=np.int64).copy()), device)


def number_like(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a number or a tensor as a tensor of the dtype and on the device of `like`.

    A number of the host, which a 0-d tensor on the CPU is too, is filled in there by a kernel instead of copied.
    """
    copied = isinstance(value, Tensor) and (value.ndim or not value.is_cpu or like.is_cpu or not has_values(value))
    if isinstance(value, Tensor) and copied:
        return value.to(device=like.device, dtype=like.dtype)
    return torch.full((), float(value), dtype=like.dtype, device=like.device)


class HostCopy:
    """A copy of a tensor on the host, or on its way there, so that the host does not wait for a CUDA device."""

    def __init__(self, x: Tensor) -> None:
        self._copy, self._event = x.to("cpu", non_blocking=x.device.type == "cuda"), None
        if x.device.type == "cuda" and has_values(x):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> Tensor:
        """The copy, after it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def on_host(function: Callable[..., tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """Return `function` of a copy of x on the host, its results copied to the device of x.

    The host waits once, for the copy; results are copied without waiting. On the CPU x is given as it is.
    """
    if x.is_cpu or not has_values(x):
        return function(x)
    return tuple(upload(found, x.device) for found in function(HostCopy(x).wait()))
