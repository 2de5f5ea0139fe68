"""Work on a second stream of a device, beside the stream on which steps run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class Streams:
    """A second stream of a device whose torch module, such as `torch.cuda`, has streams.

    Marks are events of this module, such as `torch.cuda.Event`. On a CPU, and on devices without streams, operations
    run in the order of the program and nothing needs to wait: all methods do nothing, and `mark` returns None.

    concurrent: True if work on the second stream runs at the same time as work on the present stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self.concurrent = device.type != "cpu" and hasattr(self._module, "Stream")
        self._stream = self._module.Stream(device) if self.concurrent else None

    def aside(self) -> Any:
        """Return a context in which operations run on the second stream."""
        return self._module.stream(self._stream) if self.concurrent else nullcontext()

    def mark(self) -> Any:
        """Return a mark, such as a CUDA event, placed after all work that the present stream has received so far."""
        if not self.concurrent:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def wait(self, mark: Any) -> None:
        """Let the present stream wait for the work before a mark, which `mark` returned. The host does not wait."""
        if self.concurrent:
            self._module.current_stream(self._device).wait_event(mark)

    def synchronize(self, mark: Any) -> None:
        """Let the host wait until the work before a mark is done. `mark` returned the mark."""
        if self.concurrent:
            mark.synchronize()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors that were made on the second stream until the present stream has used them."""
        if self.concurrent:
            for x in tensors:
                x.record_stream(self._module.current_stream(self._device))
