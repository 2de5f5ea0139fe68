"""Work on a second stream of a device, beside the stream on which steps run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The order of work on a device without streams, where the host waits for every copy. Marks are None.

    concurrent: True if copies run beside the program.
    """

    concurrent = False

    def aside(self) -> Any:
        """Return a context in which operations run beside those of the caller's stream."""
        return nullcontext()

    def mark(self) -> Any:
        """Return a mark that stands for all work on the present stream so far."""

    def wait(self, mark: Any) -> None:
        """Let the present stream wait for a mark. The host does not wait."""

    def synchronize(self, mark: Any) -> None:
        """Let the host wait for a mark."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors that were made aside until the present stream has used them."""


class DeviceStreams(Streams):
    """Streams and events of a device whose module of torch has them, such as CUDA."""

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
    """Return the streams of a device, or an order without streams if the device has none."""
    module = torch.get_device_module(device)
    return DeviceStreams(device, module) if hasattr(module, "Stream") else Streams()
