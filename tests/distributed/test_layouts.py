"""Layouts and regions: which rank holds what, and that blocks are made of parts and parts of blocks, entry by entry."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from eigengraft.blocking import BlockGrid, Blocking
from eigengraft.blocking.blocks import Box, axis_pairs
from eigengraft.distributed.layouts import Layout, regions

from ..refusals import refused

pytestmark = pytest.mark.slow

lengths = st.integers(0, 7) | st.sampled_from([8, 12, 24])  # the longer ones come out even on many meshes
shapes = st.one_of([st.tuples(*[lengths] * ndim) for ndim in (2, 3, 1, 4, 0)]).filter(lambda x: math.prod(x) <= 600)

meshes = st.sampled_from(
    [m for k in (3, 2, 1) for m in itertools.product(range(5, 0, -1), repeat=k) if math.prod(m) <= 12]
)
sizes = st.none() | st.integers(1, 6)
blockings = st.builds(Blocking, size=sizes) | st.builds(
    Blocking,
    size=sizes,
    merge=st.integers(1, 40),
    merge_from=st.sampled_from(["last", "first"]),
    min_axes=st.integers(1, 3),
)


@cache
def all_placements(ndim: int, mesh: tuple[int, ...]) -> tuple[tuple[Placement, ...], ...]:
    """Every way to lay a tensor out; a shard may be strided if a later mesh axis divides the same tensor axis."""
    return tuple(_placements(ndim, mesh))


def _placements(ndim: int, mesh: tuple[int, ...]) -> Iterator[tuple[Placement, ...]]:
    kinds = [None, *((axis, strided) for axis in range(ndim) for strided in (False, True))]
    for choice in itertools.product(kinds, repeat=len(mesh)):
        found: list[Placement] = []
        for place, kind in enumerate(choice):
            if kind is None:
                found.append(Replicate())
                continue
            axis, strided = kind
            later = [mesh[k] for k in range(place + 1, len(mesh)) if choice[k] and choice[k][0] == axis]
            if strided and not later:
                break
            found.append(_StridedShard(axis, split_factor=math.prod(later)) if strided else Shard(axis))
        else:
            yield tuple(found)


@cache
def chunked(length: int, cuts: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """Which indices of an axis a rank gets: (order, ranks, own rank), torch.chunk in that order, none for the last."""
    x = torch.arange(length)
    for _, ranks, rank in sorted(cuts):
        x = dict(enumerate(x.chunk(ranks))).get(rank, x[:0]) if len(x) else x
    return tuple(x.tolist())


def held_indices(
    axis: int, length: int, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """As tensor parallelism and `fully_shard` leave them: mesh axes cut from left to right, then strided ones, the last
    of them first, as a model is first divided by the mesh axes on the right."""
    cuts = [
        (
            len(mesh) - place if isinstance(placement, _StridedShard) else place - len(mesh),
            mesh[place],
            coordinate[place],
        )
        for place, placement in enumerate(placements)
        if getattr(placement, "dim", None) == axis
    ]
    return chunked(length, tuple(cuts))


@cache
def held_by_torch(
    length: int, mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[int, int]:
    """Length and offset on an axis that is cut so, by torch's own arithmetic; axes know nothing of each other."""
    (own,), (offset,) = _compute_local_shape_and_global_offset((length,), mesh, list(coordinate), placements)
    return own, offset


def along(axis: int, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """What is done to one axis of a tensor, as if it were the only one."""
    return tuple(_alone(axis, placement) for placement in placements)


def _alone(axis: int, placement: Placement) -> Placement:
    if getattr(placement, "dim", None) != axis:
        return Replicate()
    return _StridedShard(0, split_factor=placement.split_factor) if isinstance(placement, _StridedShard) else Shard(0)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def check_layout(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> Layout:
    """Against chunks and torch's own arithmetic, that each set of replicas holds every entry once, and that every entry
    is in the part of one rank that holds it, where ranks that hold the same have parts.

    torch's arithmetic is meant for what it can say: not for the offset of an empty part, nor for strided shards that do
    not come out even, where its answer is not what `fully_shard` leaves on a rank (the test on real ranks has those).
    """
    layout = Layout.from_placements(shape, mesh, placements)
    ways = [along(axis, placements) for axis in range(len(shape))]
    even = all(length % math.prod(mesh) == 0 for length in shape)
    held = {replica: np.zeros(shape, dtype=np.int64) for replica in layout.replicas}
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        box = layout.boxes[rank]
        for axis, length in enumerate(shape):
            own = held_indices(axis, length, mesh, coordinate, placements)
            assert own == tuple(range(box.start[axis], box.stop[axis]))
        if even or not any(isinstance(placement, _StridedShard) for placement in placements):
            theirs = [held_by_torch(n, mesh, coordinate, ways[axis]) for axis, n in enumerate(shape)]
            assert box.shape == tuple(own for own, _ in theirs)
            assert not box.numel or box.start == tuple(offset for _, offset in theirs)
        held[layout.replicas[rank]][slices(box)] += 1
    copies = math.prod(ranks for ranks, p in zip(mesh, placements, strict=True) if isinstance(p, Replicate))
    assert len(held) == layout.copies == copies
    assert all((count == 1).all() for count in held.values())
    if layout.parts is not None:
        pairs = list(zip(layout.parts.boxes, layout.boxes, strict=True))
        assert copies > 1 and all(part.common(box) == part for part, box in pairs if part.numel)
        updated = np.zeros(shape, dtype=np.int64)
        for part, _ in pairs:
            updated[slices(part)] += 1
        assert (updated == 1).all()
    return layout


def gathered(block: BlockGrid, x: Tensor) -> Tensor:
    """One block of x as a tensor of its own."""
    out = torch.empty(block.shape, dtype=x.dtype)
    pieces = zip(block.in_blocks(out.unsqueeze(0)), block.in_parameter(x.reshape(block.merged)), strict=True)
    for target, source in pieces:
        target.copy_(source)
    return out


def check_box(ids: NDArray[np.int64], blocks: Sequence[BlockGrid], box: Box) -> None:
    """Every entry of a box lies in one region of one block, and is the same entry there."""
    x = torch.from_numpy(ids)
    part, seen = x[slices(box)], torch.zeros(box.shape, dtype=torch.int64)
    for block in blocks:
        own = gathered(block, x)
        for region in regions(ids.shape, block, box):
            view = region.in_block(own)
            assert own.data_ptr() <= view.data_ptr() < own.data_ptr() + own.nbytes  # a view into the block
            assert torch.equal(view, part[region.box.within(box)])
            seen[region.box.within(box)].add_(1)
    assert bool((seen == 1).all())


def test_layouts_and_regions_hold_every_entry_once() -> None:
    """At least 6,000 (shape, blocking, mesh, placements); what blocks and a part have in common depends on the part
    alone, so that it is looked at once for each part and not once for each way to lay the tensor out."""
    cases = 0

    @settings(max_examples=360)
    @given(shape=shapes, blocking=blockings, mesh=meshes, start=st.integers(0, 1000))
    def check(shape: tuple[int, ...], blocking: Blocking, mesh: tuple[int, ...], start: int) -> None:
        nonlocal cases
        grids = list(blocking.grids(shape))
        assume(sum(len(grid.keys) for grid in grids) <= 40)
        ids = np.arange(math.prod(shape)).reshape(shape)
        blocks = [grid.block(index) for grid in grids for index in range(len(grid.keys))]
        merged = torch.from_numpy(ids).reshape(blocking.merged(shape))
        owned = [gathered(block, merged).flatten() for block in blocks]
        assert sorted(torch.cat([torch.empty(0, dtype=torch.int64), *owned]).tolist()) == list(range(ids.size))
        found = all_placements(len(shape), mesh)
        parts: set[Box] = set()
        for placements in (found[start % len(found) :] + found[: start % len(found)])[:25]:
            parts.update(check_layout(shape, mesh, placements).boxes)
            cases += 1
        for part in parts:
            check_box(ids, blocks, part)

    check()
    assert cases >= 6_000


def test_meshes_of_four_axes() -> None:
    """Every way to lay a matrix of odd sides out on 2 x 2 x 2 x 2 ranks."""
    for placements in all_placements(2, (2, 2, 2, 2)):
        check_layout((7, 12), (2, 2, 2, 2), placements)


def test_ranks_in_another_order_hold_and_update_what_they_did() -> None:
    layout = Layout.from_placements((8, 6), (2, 2), (Replicate(), Shard(0)))
    order = (2, 0, 3, 1)
    found = layout.reordered(order)
    assert layout.parts is not None and found.parts is not None
    for own, other in ((found, layout), (found.parts, layout.parts)):
        assert list(own.boxes) == [other.boxes[rank] for rank in order]
        assert list(own.replicas) == [other.replicas[rank] for rank in order]


def test_copies_divide_a_free_axis_or_else_the_rows_of_each_shard() -> None:
    parts = Layout.from_placements((8, 2), (2, 2), (Replicate(), Shard(0))).parts
    assert parts is not None and {box.shape for box in parts.boxes} == {(4, 1)}
    parts = Layout.from_placements((8, 1), (2, 2), (Replicate(), Shard(0))).parts
    assert parts is not None and [box.start for box in parts.boxes] == [(0, 0), (4, 0), (2, 0), (6, 0)]
    parts = Layout.from_placements((2,), (2, 2), (Replicate(), Shard(0))).parts
    assert parts is not None and [box.numel for box in parts.boxes] == [1, 1, 0, 0]
    assert Layout.from_placements((), (2, 2), (Replicate(), Replicate())).parts is None


def test_placements_that_nobody_owns_are_refused() -> None:
    with refused(ValueError, "placement"):
        Layout.from_placements((4,), (2,), (Partial(),))
    with refused(ValueError, "placement"):
        Layout.from_placements((8,), (2, 2), (_StridedShard(0, split_factor=4), Shard(0)))
    with refused(ValueError, "placement"):
        Layout.from_placements((8, 8), (2, 2), (_StridedShard(0, split_factor=2), Shard(1)))


@given(shape=shapes, blocking=blockings)
def test_a_merged_axis_is_the_product_of_its_group(shape: tuple[int, ...], blocking: Blocking) -> None:
    merged = blocking.merged(shape)
    assume(0 not in merged)
    groups = [own for own, _ in axis_pairs(shape, merged)]
    assert len(groups) == len(merged) and [axis for own in groups for axis in own] == list(range(len(shape)))
    assert tuple(math.prod(shape[axis] for axis in own) for own in groups) == merged
