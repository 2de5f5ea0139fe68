"""Layouts: which entries of a parameter each rank holds, as DTensor placements say it; a pure function."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from eigengraft.blocking.boxes import Box
from eigengraft.errors import name_some

from .rank_group import DistributedError, RankGroup

if TYPE_CHECKING:  # importing it takes as long as all of this library
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs


def are_dtensors_known() -> bool:
    """Whether there can be DTensors: their module is imported."""
    return "torch.distributed.tensor" in sys.modules


def is_dtensor(x: object) -> TypeIs[DTensor]:
    """Whether x is a DTensor; nothing is while their module is not imported."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(x, known.DTensor)


def local(x: Tensor) -> Tensor:
    """The tensor that this rank holds of a DTensor, as a view; any other tensor as it is."""
    return x.to_local() if is_dtensor(x) else x


def chunk_length(length: int, ranks: int) -> int:
    """The length of each rank's part of an axis as torch.chunk cuts it; the last parts may be shorter, or empty."""
    return -(-length // ranks)


@dataclass(frozen=True)
class Layout:
    """Where the entries of one parameter lie among R ranks.

    shape: shape of the full parameter.
    boxes: `[R]`, entries that each rank holds; a box may be empty.
    replicas: `[R]`, number of the replica that each rank belongs to: ranks of one replica hold every entry once.
    parts: layout in which ranks that hold the same entries have a part of them each; None: they cannot be divided so,
        or no entry is held twice.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]
    parts: Layout | None = field(default=None, repr=False)

    @classmethod
    @lru_cache(maxsize=1024)
    def replicate(cls, shape: tuple[int, ...], ranks: int) -> Layout:
        """The layout of a plain tensor (DDP): every rank holds all entries."""
        fits = bool(shape) and 0 not in shape and 1 < ranks <= shape[0]
        parts = cls.by_rows(shape, ranks) if fits else None
        return cls(shape, (Box((0,) * len(shape), shape),) * ranks, tuple(range(ranks)), parts)

    @classmethod
    @lru_cache(maxsize=1024)
    def by_rows(cls, shape: tuple[int, ...], ranks: int) -> Layout:
        """The layout of a tensor that is cut along its first axis, as torch.chunk cuts."""
        boxes = tuple(_box(shape, [(0, ranks, rank)]) for rank in range(ranks))
        return cls(shape, boxes, (0,) * ranks)

    @classmethod
    @lru_cache(maxsize=1024)
    def from_placements(
        cls, shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> Layout:
        """The layout of a DTensor with these placements on a mesh of that shape; ranks in row-major order of the mesh.

        Raises ValueError for a placement other than Shard and Replicate.
        """
        for placement in placements:
            if placement.is_partial() or not (_cut(placement) is not None or placement.is_replicate()):
                raise ValueError(f"placement: Shard or Replicate on each mesh axis is required, got {placement}")
        order = _order(mesh, placements)
        copies = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
        boxes, replicas = [], []
        for coordinate in itertools.product(*map(range, mesh)):
            boxes.append(_box(shape, [(_cut(placements[axis]), mesh[axis], coordinate[axis]) for axis in order]))
            number = 0
            for axis in copies:
                number = number * mesh[axis] + coordinate[axis]
            replicas.append(number)
        if len(set(replicas)) == len(replicas):
            return cls(shape, tuple(boxes), tuple(replicas), cls.replicate(shape, len(boxes)).parts)
        cut = divided(shape, mesh, placements)
        parts = None if cut is None else cls.from_placements(shape, mesh, cut)
        return cls(shape, tuple(boxes), tuple(replicas), parts)

    def reordered(self, order: Sequence[int]) -> Layout:
        """The layout with the ranks in another order."""
        boxes, replicas = [self.boxes[i] for i in order], [self.replicas[i] for i in order]
        parts = self.parts if self.parts is None or self.replicated else self.parts.reordered(order)
        return Layout(self.shape, tuple(boxes), tuple(replicas), parts)

    @cached_property
    def replicated(self) -> bool:
        """Whether every rank holds all entries."""
        return len(set(self.replicas)) == len(self.replicas)

    @property
    def whole_rows(self) -> bool:
        """Whether the tensor is cut along its first axis alone, if at all."""
        return all(box.numel == 0 or box.shape[1:] == self.shape[1:] for box in self.boxes)

    @cached_property
    def copies(self) -> int:
        """Number of replicas."""
        return len(set(self.replicas))

    @cached_property
    def fractions(self) -> list[float]:
        """`[R]`, fraction of the parameter that each rank holds."""
        return [box.numel / max(math.prod(self.shape), 1) for box in self.boxes]

    @cached_property
    def holders(self) -> list[tuple[int, ...]]:
        """`[R]`, ranks that hold the same entries as each rank, the rank itself among them."""
        found: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.boxes):
            found.setdefault(box, []).append(rank)
        same = {box: tuple(ranks) for box, ranks in found.items()}
        return [same[box] for box in self.boxes]


def divided(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Placement]
) -> tuple[Placement, ...] | None:
    """Placements in which mesh axes with copies cut an axis of the tensor that no other mesh axis cuts, the first that
    is long enough; None: there is none, or there are no copies."""
    copies = math.prod(length for length, placement in zip(mesh, placements, strict=True) if placement.is_replicate())
    used = {getattr(placement, "dim", None) for placement in placements}
    free = [axis for axis, length in enumerate(shape) if axis not in used and 1 < copies <= length]
    if not free or 0 in shape:
        return None
    from torch.distributed.tensor import Shard

    return tuple(Shard(free[0]) if placement.is_replicate() else placement for placement in placements)


def _order(mesh: tuple[int, ...], placements: Sequence[Placement]) -> list[int]:
    """Mesh axes in the order in which they cut. A strided shard is cut after the axes on its right.

    With fully_shard over tensor parallelism, the tensor-parallel axis stands on the right and cuts first.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

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


def _cut(placement: Placement) -> int | None:
    """The axis of the tensor that a placement cuts, if it does."""
    return getattr(placement, "dim", None)


def _box(shape: tuple[int, ...], cuts: Sequence[tuple[int | None, int, int]]) -> Box:
    """The box of one rank. cuts: (axis or None, ranks, own rank) of each mesh axis in order; cut by torch.chunk."""
    start, stop = [0] * len(shape), list(shape)
    for axis, ranks, rank in cuts:
        if axis is None:
            continue
        length = stop[axis] - start[axis]
        size = chunk_length(length, ranks)
        first = start[axis]
        start[axis] = first + min(rank * size, length)
        stop[axis] = first + min((rank + 1) * size, length)
    return Box(tuple(start), tuple(stop))


def local_gradients(
    names: Sequence[str], parameters: Sequence[Tensor], rank_group: RankGroup | None
) -> list[Tensor | None]:
    """What this rank holds of the gradient of each parameter, laid out as the parameter is; None: it has no gradient.

    A DTensor with other placements, as a partial sum, is redistributed by all ranks of its mesh; `parameter.grad` stays
    as it is. Raises ValueError for a gradient that cannot be laid out so, DistributedError where ranks fail to do it.
    """
    if not are_dtensors_known():
        return [parameter.grad for parameter in parameters]
    pairs = list(zip(names, parameters, strict=True))
    moved = [name for name, parameter in pairs if _lies_elsewhere(name, parameter)]
    if moved and rank_group is not None:
        none = [name for name, parameter in pairs if parameter.grad is None]
        none_of = f"; none of {', '.join(none[:3])}" if none else ""
        what = f"redistribution of gradients ({name_some(moved, 1)}{none_of})"
        rank_group.synchronize(what, device=parameters[0].device)
    return [_local_gradient(name, parameter) for name, parameter in pairs]


def _lies_elsewhere(name: str, parameter: Tensor) -> bool:
    """Whether a gradient has other placements than its parameter; ValueError if it cannot get the same."""
    gradient = parameter.grad
    if gradient is None or not (is_dtensor(gradient) or is_dtensor(parameter)):
        return False
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        kinds = ["a DTensor" if is_dtensor(x) else "a plain tensor" for x in (parameter, gradient)]
        raise ValueError(f"{name}: the gradient of {kinds[0]} must be one too, got {kinds[1]}")
    if gradient.device_mesh != parameter.device_mesh:
        raise ValueError(
            f"{name}: a gradient on the parameter's mesh {parameter.device_mesh} is required, got one on "
            f"{gradient.device_mesh}"
        )
    return gradient.placements != parameter.placements


def _local_gradient(name: str, parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient.to_local()
    try:
        return gradient.redistribute(placements=parameter.placements).to_local()
    except Exception as error:
        raise DistributedError(
            f"{name}: the gradient could not be redistributed from {gradient.placements} to the parameter's placements "
            f"{parameter.placements}; ranks must do it together. Here: {type(error).__name__}: {error}"
        ) from error
