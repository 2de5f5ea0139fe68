"""Layouts: which rank holds which part of a parameter, as DTensor placements say it. No process is asked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def local(x: Tensor) -> Tensor:
    """The tensor that this rank holds of a DTensor, as a view; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass(frozen=True)
class Box:
    """The entries of a tensor with start <= index < stop on every axis."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths, none below 0."""
        return tuple(max(b - a, 0) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """How many entries it has."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """What two boxes share, or None."""
        box = Box(tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop)))
        return box if box.numel else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        corners = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(a - origin, b - origin) for a, b, origin in corners)


@dataclass(frozen=True)
class Layout:
    """Of one parameter over R ranks. boxes: what each rank holds, empty boxes included.

    replicas: ranks with the same number hold the parameter exactly once between them.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...], ranks: int) -> Layout:
        """Every rank holds all of it (plain tensors, DDP)."""
        return cls(shape, (Box((0,) * len(shape), shape),) * ranks, tuple(range(ranks)))

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> Layout:
        """By the placements on a device mesh of that shape; ranks are the mesh's, in row-major order."""
        for placement in placements:
            if isinstance(placement, Partial) or not isinstance(placement, (Shard, _StridedShard, Replicate)):
                raise ValueError(f"placement: Shard or Replicate on each mesh axis is required, got {placement}")
        order = _order(mesh, placements)
        copies = [axis for axis, placement in enumerate(placements) if isinstance(placement, Replicate)]
        boxes, replicas = [], []
        for coordinate in itertools.product(*map(range, mesh)):
            boxes.append(_box(shape, [(placements[axis], mesh[axis], coordinate[axis]) for axis in order]))
            number = 0
            for axis in copies:
                number = number * mesh[axis] + coordinate[axis]
            replicas.append(number)
        return cls(shape, tuple(boxes), tuple(replicas))

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return len(set(self.replicas)) == len(self.replicas)

    @cached_property
    def copies(self) -> int:
        """How often the parameter is held."""
        return len(set(self.replicas))

    @cached_property
    def fractions(self) -> list[float]:
        """How much of the parameter each rank holds."""
        return [box.numel / max(math.prod(self.shape), 1) for box in self.boxes]

    def sources(self, rank: int) -> list[int]:
        """The ranks that a rank gets the parameter from, itself among them: each entry from one."""
        return [r for r, own in enumerate(self.replicas) if own == self.replicas[rank] and self.boxes[r].numel]


def _order(mesh: tuple[int, ...], placements: Sequence[Placement]) -> list[int]:
    """The mesh axes in the order in which they cut. A strided shard is cut after the axes on its right.

    (Tensor parallelism cuts first although fully_shard's axis stands on its left.)
    """
    order = list(range(len(mesh)))
    for axis, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, _StridedShard):
            continue
        right = [a for a in order if a > axis and getattr(placements[a], "dim", None) == placement.dim]
        if placement.split_factor != math.prod(mesh[a] for a in right):
            raise ValueError(
                f"placement: a strided shard that later mesh axes make contiguous is required, got {placements} "
                f"on a mesh of shape {mesh}"
            )
        order.remove(axis)
        order.insert(max((order.index(a) for a in right), default=axis - 1) + 1, axis)
    return order


def _box(shape: tuple[int, ...], cuts: Sequence[tuple[Placement, int, int]]) -> Box:
    """What is left of a tensor after (placement, ranks, own rank) of each mesh axis; torch.chunk on each."""
    start, stop = [0] * len(shape), list(shape)
    for placement, ranks, rank in cuts:
        if isinstance(placement, Replicate):
            continue
        axis: int = placement.dim  # type: ignore[attr-defined]
        length = stop[axis] - start[axis]
        size = -(-length // ranks)
        first = start[axis]
        start[axis] = first + min(rank * size, length)
        stop[axis] = first + min((rank + 1) * size, length)
    return Box(tuple(start), tuple(stop))
