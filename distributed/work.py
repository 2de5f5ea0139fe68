"""Collectives under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

Received = TypeVar("Received")


@dataclass
class Work(Generic[Received]):
    """A collective under way.

    handles: what torch gave to wait for; none: the collective is finished.
    result: what the collective writes.
    finish: waits for a handle; raises DistributedError.
    inputs: tensors that must live until the collective is finished.
    """

    handles: Sequence[Any]
    result: Received
    finish: Callable[[Any], None]
    inputs: Sequence[Tensor] = ()

    def done(self) -> bool:
        """Whether the collective has finished or failed, so that `wait` returns or raises at once."""
        return all(handle.is_completed() for handle in self.handles)

    def wait(self) -> Received:
        """The result, after the collective has finished. Raises DistributedError."""
        for handle in self.handles:
            self.finish(handle)
        self.handles, self.inputs = (), ()
        return self.result
