"""Work on a second stream of a device, beside the stream on which steps run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class Streams:
    """Interface to a second stream of a device. This base class is for devices without streams.

    On such a device operations run in the order of the program and nothing needs to wait. All methods do nothing, and
    `mark` returns None. `DeviceStreams` overrides them.

    concurrent: True if work on the second stream runs at the same time as work on the present stream.
    """

    concurrent = False

    def aside(self) -> Any:
        """Return a context in which operations run on the second stream."""
        return nullcontext()

    def mark(self) -> Any:
        """Return a mark, such as a CUDA event, placed after all work that the present stream has received so far."""

    def wait(self, mark: Any) -> None:
        """Let the present stream wait for the work before a mark, which `mark` returned. The host does not wait."""

    def synchronize(self, mark: Any) -> None:
        """Let the host wait until the work before a mark is done. `mark` returned the mark."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors that were made on the second stream until the present stream has used them."""


class DeviceStreams(Streams):
    """A second stream of a device whose torch module, such as `torch.cuda`, has streams.

    Marks are events of this module, such as `torch.cuda.Event`.
    """

    concurrent = True

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module, self._stream = device, module, module.Stream(device)

    def aside(self) -> Any:
        return self._module.stream(self._stream)

    def mark(self) -> Any:
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def wait(self, mark: Any) -> None:
        self._module.current_stream(self._device).wait_event(mark)

    def synchronize(self, mark: Any) -> None:
        mark.synchronize()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            x.record_stream(self._module.current_stream(self._device))


def streams_of(device: torch.device) -> Streams:
    """Return a `DeviceStreams` for a device with streams, and the base class `Streams` for any other device."""
    module = torch.get_device_module(device)
    return DeviceStreams(device, module) if hasattr(module, "Stream") else Streams()
