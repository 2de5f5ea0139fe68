"""Where tests of devices run: on the simulated accelerator, and on the CUDA device of a machine that has one."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pytest
import torch

from eigengraft.testing import accelerator
from eigengraft.testing.accelerator import SimulatedTensor

PLACES = ["simulated", pytest.param("real", marks=pytest.mark.gpu)]


@contextmanager
def on_device(place: str) -> Iterator[torch.device]:
    """Give the device of a place."""
    if place == "real":
        yield torch.device("cuda", 0)
        return
    with accelerator("cuda") as run:
        yield run.device


class Waits(Protocol):
    """Counts of a block: how often the host waited for the device, and copies to the device that it waited for."""

    waits: int
    uploads: int
    kernels: int

    def by_line(self, *names: str) -> Any: ...


@dataclass
class RealWaits:
    """Waits of the host for a real device, by the line that asked. Kernels and copies are not counted."""

    lines: Counter[str] = field(default_factory=Counter)
    uploads: int = 0
    kernels: int = 1

    @property
    def waits(self) -> int:
        return self.lines.total()

    def by_line(self, *names: str) -> Any:
        return dict(self.lines)


MANY = 10
"""Tolerance on a real device, in units of the error of rounding on a CPU: one draw of errors does not bound another."""


@contextmanager
def waits() -> Iterator[RealWaits]:
    """Count how often the host waits for the device inside the `with` block.

    The count includes waits that torch's synchronization debug mode reports, and waits for events that were recorded
    inside the `with` block. A wait for an event that was recorded earlier is not counted, because the event counts as
    reached.
    """
    found, new = RealWaits(), list[torch.cuda.Event]()
    record, wait = torch.cuda.Event.record, torch.cuda.Event.synchronize

    def recorded(event: torch.cuda.Event, *stream: Any) -> None:
        new.append(event)
        record(event, *stream)  # type: ignore[no-untyped-call]

    def waited(event: torch.cuda.Event) -> None:
        if any(event is one for one in new):
            caller = sys._getframe(1)
            found.lines[_place(caller.f_code.co_filename, caller.f_lineno)] += 1
        wait(event)  # type: ignore[no-untyped-call]

    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.multiple(torch.cuda.Event, record=recorded, synchronize=waited),
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    asked = [one for one in caught if "called a synchronizing" in str(one.message)]
    found.lines.update(_place(one.filename, one.lineno) for one in asked)


def _place(file: str, line: int) -> str:
    return f"{'/'.join(Path(file).parts[-3:])}:{line}"


def simulated() -> bool:
    """Return True if the CUDA device of this process is the simulated accelerator."""
    return isinstance(torch.empty(0, device="cuda"), SimulatedTensor)


def counting() -> AbstractContextManager[Waits]:
    """Count what a block asks the device for."""
    return accelerator("cuda") if simulated() else waits()
