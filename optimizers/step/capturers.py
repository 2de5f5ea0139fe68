"""Capturers: they record the operations that a function launches on a device as a graph, which is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Body = Callable[[], None]
"""Function that launches operations on a device."""


class Capturer(Protocol):
    """Records the operations that a function launches on a device."""

    def warm_up(self, body: Body) -> None:
        """Run the function once before its capture. This run allocates the memory that later runs use again."""

    def capture(self, body: Body) -> Body:
        """Record a graph of the operations that the function launches. They need not run during the capture.

        Return a function that replays the graph: it runs the recorded operations again, on the same addresses.

        Raises RuntimeError if the operations cannot be captured.
        """


class CudaCapturer:
    """Records CUDA graphs on a device, which need not be the current device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, body: Body) -> None:
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                body()
            torch.cuda.current_stream().wait_stream(side)

    def capture(self, body: Body) -> Body:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=side):
            body()
        return graph.replay


CAPTURERS: dict[str, Callable[[torch.device], Capturer]] = {"cuda": CudaCapturer}
"""By device type, the constructor of a capturer for a device. Other device types have no graphs."""
