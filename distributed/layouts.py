"""Layouts: the entries of a parameter that each rank holds, and the entries of a block that a rank's shard contains.

A `Layout` follows from the placements of a DTensor, without a message. A `Region` is a set of entries that a block and
a shard have in common, with views of both. Blocks are cut from the merged shape of a parameter, in which some axes are
merged or divided into groups. Shards are cut from the shape of the parameter itself. If k axes were merged, the entries
in a range of the merged axis form at most 2k - 1 boxes of the parameter. If an axis was divided into groups, the same
range of all groups is one box for each group. A region is a part of one of these boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.blocking.blocks import BlockGrid, Box, Numbers, Piece, axis_pairs, boxes_of_run
from eigengraft.errors import name_some
from eigengraft.numerics import any_dtensors, is_dtensor

from .rank_group import DistributedError, RankGroup

if TYPE_CHECKING:  # this import takes as long as that of all of this library
    from torch.distributed.tensor.placement_types import Placement


def chunk_length(length: int, ranks: int) -> int:
    """Return the length of the parts into which torch.chunk cuts an axis. The last parts may be shorter, or empty.

    length: length of the axis.
    ranks: number of parts.
    """
    return -(-length // ranks)


@dataclass(frozen=True)
class Layout:
    """The entries of one parameter that each of R ranks holds.

    shape: shape of the full parameter.
    boxes: `[R]`, entries that each rank holds; a box may be empty.
    replicas: `[R]`, index of the replica to which each rank belongs. The ranks of one replica together hold every entry
        exactly once.
    parts: a second layout, in which no entry is held twice. Ranks that hold the same entries in this layout hold
        different parts of them in the second one; a rank's part may be empty. None if the parameter is 0-d or has no
        entries, or if no entry is held twice.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]
    parts: Layout | None = field(default=None, repr=False)

    @classmethod
    @lru_cache(maxsize=1024)
    def replicate(cls, shape: tuple[int, ...], ranks: int) -> Layout:
        """Return the layout of a plain tensor (DDP): every rank holds all entries.

        shape: shape of the tensor.
        ranks: number of ranks.
        """
        parts = cls.by_rows(shape, ranks) if shape and 0 not in shape and ranks > 1 else None
        return cls(shape, (whole_box(shape),) * ranks, tuple(range(ranks)), parts)

    @classmethod
    @lru_cache(maxsize=1024)
    def by_rows(cls, shape: tuple[int, ...], ranks: int) -> Layout:
        """Return the layout of a tensor that is cut along its first axis, as by torch.chunk.

        shape: shape of the full tensor.
        ranks: number of ranks among which it is cut.
        """
        boxes = tuple(_cut(whole_box(shape), [(0, ranks, rank)]) for rank in range(ranks))
        return cls(shape, boxes, (0,) * ranks)

    @classmethod
    @lru_cache(maxsize=1024)
    def from_placements(
        cls, shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> Layout:
        """Return the layout of a DTensor. Ranks are in row-major order of its mesh.

        Raises ValueError for a placement other than Shard and Replicate.

        shape: shape of the full tensor.
        mesh: shape of the device mesh.
        placements: placement along each axis of the mesh.
        """
        for placement in placements:
            if placement.is_partial() or not (hasattr(placement, "dim") or placement.is_replicate()):
                raise ValueError(f"placement: must be Shard or Replicate on each mesh axis, got {placement}")
        order, cut = _order(mesh, placements), [getattr(placement, "dim", None) for placement in placements]
        copies = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
        boxes, replicas, whole = [], [], whole_box(shape)
        for coordinate in itertools.product(*map(range, mesh)):
            boxes.append(_cut(whole, [(cut[axis], mesh[axis], coordinate[axis]) for axis in order]))
            number = 0
            for axis in copies:
                number = number * mesh[axis] + coordinate[axis]
            replicas.append(number)
        if len(set(replicas)) == len(replicas):
            return cls(shape, tuple(boxes), tuple(replicas), cls.replicate(shape, len(boxes)).parts)
        parts = None
        if (free := divided(shape, mesh, placements)) is not None:
            parts = cls.from_placements(shape, mesh, free)
        elif (number := math.prod(mesh[axis] for axis in copies)) > 1 and 0 not in shape:
            # each box is divided by rows among the ranks that hold it; some ranks may get no row
            pairs = zip(boxes, replicas, strict=True)
            cuts = tuple(_cut(box, [(0, number, replica)]) for box, replica in pairs)
            parts = cls(shape, cuts, (0,) * len(boxes))
        return cls(shape, tuple(boxes), tuple(replicas), parts)

    def reordered(self, order: Sequence[int]) -> Layout:
        """Return the layout of the same parameter with the ranks in another order.

        order: `[R]`; rank r of the new layout holds the entries that rank `order[r]` of this layout holds.
        """
        boxes, replicas = [self.boxes[i] for i in order], [self.replicas[i] for i in order]
        parts = self.parts if self.parts is None or self.replicated else self.parts.reordered(order)
        return Layout(self.shape, tuple(boxes), tuple(replicas), parts)

    @cached_property
    def replicated(self) -> bool:
        """True if every rank holds all entries."""
        return len(set(self.replicas)) == len(self.replicas)

    @property
    def whole_rows(self) -> bool:
        """True if the tensor is not cut along any axis but the first."""
        return all(box.numel == 0 or box.shape[1:] == self.shape[1:] for box in self.boxes)

    @cached_property
    def copies(self) -> int:
        """Number of ranks that hold the same entries."""
        return len(set(self.replicas))

    @cached_property
    def fractions(self) -> list[float]:
        """Fraction of the parameter's entries that each rank holds, `[R]`."""
        return [box.numel / max(math.prod(self.shape), 1) for box in self.boxes]

    @cached_property
    def holders(self) -> list[tuple[int, ...]]:
        """For each of the R ranks, all ranks that hold the same entries, including the rank itself."""
        found: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.boxes):
            found.setdefault(box, []).append(rank)
        same = {box: tuple(ranks) for box, ranks in found.items()}
        return [same[box] for box in self.boxes]

    def gather(self, mine: Tensor, ranks: RankGroup, what: str) -> Tensor:
        """Return the full tensor, gathered from the shards of all ranks. All ranks must call this method.

        mine: this rank's shard, `[..., *shard]`. Its last axes are sharded in this layout; axes before them are not
            sharded.
        ranks: the R ranks of this layout.
        what: name of the collective in errors.
        """
        lead = tuple(mine.shape[: mine.ndim - len(self.shape)])
        flat = mine.new_zeros(math.prod(lead) * max(box.numel for box in self.boxes))
        flat[: mine.numel()] = mine.reshape(-1)
        ranks.synchronize(what, device=mine.device)
        full = mine.new_empty(*lead, *self.shape)
        for part, box in zip(ranks.all_gather(flat, what).wait(), self.boxes, strict=True):
            index: tuple[Any, ...] = (..., *map(slice, box.start, box.stop))
            full[index] = part[: math.prod(lead) * box.numel].view(*lead, *box.shape)
        return full


def divided(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Placement]
) -> tuple[Placement, ...] | None:
    """Return placements in which ranks that hold the same entries of a tensor each hold a different part of them.

    The mesh axes that replicate the tensor cut an axis of the tensor in the new placements. This is the first axis that
    no mesh axis cuts yet and that is at least as long as the number of copies. Returns None if there are no copies or
    no such axis.

    shape: shape of the full tensor.
    mesh: shape of the device mesh.
    placements: placement along each axis of the mesh.
    """
    copies = math.prod(length for length, placement in zip(mesh, placements, strict=True) if placement.is_replicate())
    used = {getattr(placement, "dim", None) for placement in placements}
    free = [axis for axis, length in enumerate(shape) if axis not in used and 1 < copies <= length]
    if not free or 0 in shape:
        return None
    from torch.distributed.tensor import Shard

    return tuple(Shard(free[0]) if placement.is_replicate() else placement for placement in placements)


def _order(mesh: tuple[int, ...], placements: Sequence[Placement]) -> list[int]:
    """Return the mesh axes in the order in which they cut the tensor.

    Usually this is the order of the mesh. A mesh axis with a strided shard is an exception: all mesh axes with a larger
    index that cut the same axis of the tensor cut before it. For example, with fully_shard over tensor parallelism, the
    tensor-parallel axis is the last mesh axis and cuts first.

    mesh: shape of the device mesh.
    placements: placement of the tensor along each axis of the mesh.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    order = list(range(len(mesh)))
    for axis, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, _StridedShard):
            continue
        right = [a for a in order if a > axis and getattr(placements[a], "dim", None) == placement.dim]
        if placement.split_factor != math.prod(mesh[a] for a in right):
            raise ValueError(
                f"placement: the split_factor of a strided shard must be the number of ranks of the mesh axes on its "
                f"right that shard the same axis of the tensor, got {placements} on a mesh of shape {mesh}"
            )
        order.remove(axis)
        order.insert(max((order.index(a) for a in right), default=axis - 1) + 1, axis)
    return order


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box of all entries of a tensor."""
    return Box((0,) * len(shape), shape)


def _cut(box: Box, cuts: Sequence[tuple[int | None, int, int]]) -> Box:
    """Return the part of a box that one rank holds, if each mesh axis divides the box among its ranks as torch.chunk
    does.

    cuts: (axis of the tensor, length of the mesh axis, the rank's index along the mesh axis) for each mesh axis, in the
        order in which the mesh axes cut. The first number is None if the mesh axis does not cut the tensor.
    """
    start, stop = list(box.start), list(box.stop)
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
    """Return this rank's entries of each parameter's gradient, in the layout of the parameter. None: the parameter has
    no gradient.

    A DTensor gradient with placements that differ from its parameter's, such as a partial sum, is redistributed by all
    ranks of its mesh. `parameter.grad` is not changed. Raises ValueError for a gradient that cannot get the layout of
    its parameter, and DistributedError if ranks fail to redistribute.

    names: names of the parameters in errors.
    parameters: the parameters.
    rank_group: the ranks that share the parameters; None: this process shares no parameters.
    """
    gradients = [parameter.grad for parameter in parameters]
    if not any_dtensors(gradients) and not any_dtensors(parameters):
        return gradients
    pairs = list(zip(names, parameters, strict=True))
    misplaced = [at for at, (name, parameter) in enumerate(pairs) if _needs_redistribution(name, parameter)]
    if misplaced and rank_group is not None:
        none = [name for name, parameter in pairs if parameter.grad is None]
        none_of = f"; none of {', '.join(none[:3])}" if none else ""
        what = f"redistribution of gradients ({name_some([names[at] for at in misplaced], 1)}{none_of})"
        rank_group.synchronize(what, device=parameters[0].device)
    for at in misplaced:
        parameter: Any = parameters[at]
        try:
            gradients[at] = parameter.grad.redistribute(placements=parameter.placements)
        except Exception as error:
            raise DistributedError(
                f"{names[at]}: the gradient could not be redistributed from {parameter.grad.placements} to the "
                f"parameter's placements {parameter.placements}; all ranks must redistribute together. This rank's "
                f"error is {type(error).__name__}: {error}"
            ) from error
    return [gradient.to_local() if is_dtensor(gradient) else gradient for gradient in gradients]


def _needs_redistribution(name: str, parameter: Tensor) -> bool:
    """Return True if a parameter's gradient is a DTensor whose placements differ from those of the parameter.

    Raises ValueError if the gradient cannot be redistributed to the placements of the parameter.

    name: name of the parameter, for the error.
    """
    gradient = parameter.grad
    if gradient is None or not (is_dtensor(gradient) or is_dtensor(parameter)):
        return False
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        kinds = ["a DTensor" if is_dtensor(x) else "a plain tensor" for x in (parameter, gradient)]
        raise ValueError(
            f"{name}: the parameter is {kinds[0]} and its gradient {kinds[1]}; make the gradient {kinds[0]} too"
        )
    if gradient.device_mesh != parameter.device_mesh:
        raise ValueError(
            f"{name}: the gradient must be on the parameter's mesh {parameter.device_mesh}, but is on "
            f"{gradient.device_mesh}"
        )
    return gradient.placements != parameter.placements


Counts = NDArray[np.int64]


class Stride(NamedTuple):
    """The step in a block between two entries that are neighbors along one axis of the parameter.

    axis: axis of the block along which the two entries are apart.
    places: difference of their indices along this axis of the block.
    """

    axis: int
    places: int


@dataclass(frozen=True)
class Region:
    """Entries that a block and a shard have in common.

    box: the entries as a box in the parameter.
    corner: index in the block of the first entry of the region.
    strides: for each axis of the parameter, the step in the block between entries that are neighbors along this axis.
    """

    box: Box
    corner: Numbers
    strides: tuple[Stride, ...]

    def in_block(self, block: Tensor) -> Tensor:
        """Return the region's entries as a view of `block`, in the shape that they have as a box in the parameter."""
        own = block.stride()
        first = block.storage_offset() + sum(at * stride for at, stride in zip(self.corner, own, strict=True))
        return torch.as_strided(block, self.box.shape, [own[s.axis] * s.places for s in self.strides], first)


class _Run(NamedTuple):
    """A range of indices along a few consecutive axes of the parameter, which is also a range along axes of a block.

    Blocks are cut from the parameter in its merged shape: a kernel [64, 3, 3, 3] is cut as [64, 27], for example. A box
    in the merged shape may consist of several boxes of the parameter itself, as the columns 5 to 20 of these 27 do.
    Each box of the parameter is a product of runs. Axes that were merged into one axis have one run together, and an
    axis that was divided has one run.

    start, stop: first index, and index after the last one, along each of these axes of the parameter.
    moves: by axis of the merged shape, the distance along this axis from the start of the `Piece` (a box of the block)
        to the first entry of the run.
    strides: for each of these axes of the parameter, the step in the block between neighbors along the axis.
    """

    start: Numbers
    stop: Numbers
    moves: Mapping[int, int]
    strides: tuple[Stride, ...]


def regions(shape: tuple[int, ...], block: BlockGrid, held: Box) -> Iterator[Region]:
    """Yield the regions that a block and a rank's shard of the parameter have in common, in a fixed order.

    shape: shape of the parameter.
    block: the block, as a grid that contains only this block.
    held: the entries of the parameter that the rank holds.
    """
    pairs = list(axis_pairs(shape, block.merged))
    for piece in block.pieces:
        strides = _strides(block, piece)
        options = [list(_runs([shape[a] for a in own], merged, piece, strides, block.merged)) for own, merged in pairs]
        for runs in itertools.product(*options):
            outer = Box(sum((run.start for run in runs), ()), sum((run.stop for run in runs), ()))
            box = outer.common(held)
            if box is not None:
                yield _region(box, outer, piece, runs, strides)


def holding(layout: Layout, block: BlockGrid) -> Counts:
    """Return the number of entries of a block that each of the R ranks holds, `[R]`.

    layout: layout of the block's parameter.
    block: the block, as a grid that contains only this block.
    """
    start = np.array([box.start for box in layout.boxes]).reshape(len(layout.boxes), -1)  # [R, axes]
    stop = np.array([box.stop for box in layout.boxes]).reshape(len(layout.boxes), -1)
    found = np.zeros(len(layout.boxes), dtype=np.int64)
    for region in regions(layout.shape, block, whole_box(layout.shape)):
        common = np.minimum(stop, region.box.stop) - np.maximum(start, region.box.start)
        found += common.clip(min=0).prod(1).astype(np.int64)
    return found


def _region(box: Box, outer: Box, piece: Piece, runs: tuple[_Run, ...], strides: Mapping[int, Stride]) -> Region:
    """Return the `Region` of the entries in `box`: their box in the parameter, and their place in the block.

    box: the entries, as a box of the parameter. It is a part of `outer`.
    outer: the box of the parameter whose range along each group of axes is one of `runs`. All of its entries are in
        `piece`.
    piece: the piece of the block, a box both in the block and in the merged shape.
    runs: ranges along the axes of the parameter (`_Run`), in the order of the axes.
    strides: for each axis of the merged shape, the step in the block between neighbors along it, as `_strides` returns
        it.
    """
    own, corner = sum((run.strides for run in runs), ()), list(piece.offset)
    moves = [(strides.get(axis, ALONE), distance) for run in runs for axis, distance in run.moves.items()]
    inside = [first - start for first, start in zip(box.start, outer.start, strict=True)]
    for stride, distance in [*moves, *zip(own, inside, strict=True)]:
        corner[stride.axis] += distance * stride.places
    return Region(box, tuple(corner), own)


ALONE = Stride(0, 0)
"""Stride for an axis of the parameter along which the block has only one entry, and therefore no neighbors."""


def _strides(block: BlockGrid, piece: Piece) -> dict[int, Stride]:
    """Return for each axis of the merged shape the step in the block between two entries that are neighbors along this
    axis.

    block: the block, as a grid that contains only this block.
    piece: the piece of the block in which the entries are, a box in the merged shape of the parameter. Several of its
        axes may be flattened into one axis of the block.
    """
    found = {}
    for axis, joined in enumerate(block.joined):
        places = 1
        for own in reversed(joined):
            found[own] = Stride(axis, places)
            places *= piece.lengths[own]
    return found


def _runs(
    lengths: list[int], merged: range, piece: Piece, strides: Mapping[int, Stride], merged_shape: Numbers
) -> Iterator[_Run]:
    """Yield the ranges (`_Run`) that a piece of a block covers along a group of consecutive axes of the parameter.

    Blocks are cut from the parameter in its merged shape. There are two kinds of groups. The axes of the first are
    merged into one axis of the merged shape. For example, if axes of lengths 3 and 3 are merged, the indices 2 to 4 of
    the merged axis are the two ranges (0, 2) and (1, 0:2). A group of the second kind is one axis that is divided into
    several axes of the merged shape, and perhaps axes of length 1 beside it.

    lengths: lengths of the axes of the group in the parameter.
    merged: the axes of the merged shape that correspond to the group.
    piece: the piece, a box in the merged shape.
    strides: for each axis of the merged shape, the step in the block between neighbors along it, as `_strides` returns
        it.
    merged_shape: the merged shape of the parameter.
    """
    *groups, axis = merged
    stride, start = strides.get(axis, ALONE), piece.start[axis]
    if not groups:
        inner = [math.prod(lengths[k + 1 :]) for k in range(len(lengths))]
        own = tuple(Stride(stride.axis, stride.places * length) for length in inner)
        for first, low, high in boxes_of_run(start, start + piece.lengths[axis], tuple(lengths)):
            yield _Run(low, high, {axis: first - start}, own)
        return
    wide = next((k for k, length in enumerate(lengths) if length > 1), 0)  # the divided axis; the others have length 1
    for index in itertools.product(*(range(piece.start[a], piece.start[a] + piece.lengths[a]) for a in groups)):
        first = start + sum(i * math.prod(merged_shape[a + 1 : axis + 1]) for a, i in zip(groups, index, strict=True))
        lows = tuple(first if k == wide else 0 for k in range(len(lengths)))
        highs = tuple(first + piece.lengths[axis] if k == wide else 1 for k in range(len(lengths)))
        moves = {a: i - piece.start[a] for a, i in zip(groups, index, strict=True)}
        yield _Run(lows, highs, moves, tuple(stride if k == wide else ALONE for k in range(len(lengths))))
