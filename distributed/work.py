"""Collectives and copies under way, how messages of unequal lengths are gathered, and tensors as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from eigengraft.numerics import HostCopy as HostCopy

Received = TypeVar("Received")
PADDING = 1.1
"""Factor by which padding may lengthen the messages of an all-gather of uneven lengths."""


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


def pads(lengths: Sequence[int]) -> bool:
    """Whether messages of these lengths, one of each rank, are padded to the longest and gathered at once.

    Where padding would lengthen them by more than a tenth, each rank broadcasts its own.
    """
    return max(lengths) * len(lengths) <= PADDING * sum(lengths)


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor, `[n]` uint8; a view if it is dense."""
    # `view(-1)` would keep the stride of a single entry, which may be any number
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)
