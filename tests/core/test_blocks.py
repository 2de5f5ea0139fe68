"""Blocks cover a parameter exactly once, and stacks bring gradients in and updates out."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eigengraft import RecipeError
from eigengraft.blocking import BlockGrid, Blocking
from eigengraft.blocking.stacks import Stack
from eigengraft.component import validated

from ..refusals import refused

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)
sizes = st.none() | st.integers(1, 6)
blockings = st.builds(Blocking, size=sizes) | st.builds(
    Blocking, size=sizes, merge=st.integers(1, 40), min_axes=st.integers(1, 3), drop_ones=st.booleans()
)


def reference_merge(shape: tuple[int, ...], threshold: int, target: int) -> tuple[int, ...]:
    """Distributed Shampoo's rule, as its notes state it: drop axes of length 1, go from the last axis to the first, and
    multiply while more axes than `target` are left and the product is at most `threshold`."""
    axes = [d for d in shape if d != 1] or [1]
    out, rest = [axes[-1]], axes[:-1]
    while rest:
        axis, left = rest[-1], len(out) + len(rest)
        rest = rest[:-1]
        if left > target and out[-1] * axis <= threshold:
            out[-1] *= axis
        else:
            out.append(axis)
    return tuple(out[::-1])


@given(shape=full_shapes, threshold=st.integers(1, 60), target=st.integers(1, 4))
def test_merging_follows_distributed_shampoo(shape: tuple[int, ...], threshold: int, target: int) -> None:
    assert Blocking(merge=threshold, min_axes=target).merged(shape) == reference_merge(shape, threshold, target)


@pytest.mark.parametrize(
    ("shape", "merge", "keep", "expected"),
    [
        ((), 8, 1, (1,)),
        ((1, 1, 1), 8, 1, (1,)),
        ((3, 1, 4), 16, 1, (12,)),
        ((3, 1, 4), 16, 2, (3, 4)),
        ((2, 3, 4), 12, 1, (2, 12)),
        ((2, 3, 4), 24, 1, (24,)),
        ((2, 3, 4), 24, 2, (2, 12)),
        ((64, 3, 3, 3), 9, 1, (64, 3, 9)),
        ((64, 3, 3, 3), 1024, 2, (64, 27)),
        ((5,), 2, 1, (5,)),
        ((2, 3, 4), None, 1, (2, 3, 4)),
        ((1, 3), None, 1, (1, 3)),
        ((), None, 1, (1,)),
        ((0, 3), 8, 1, (0, 3)),
    ],
)
def test_merged_shapes(shape: tuple[int, ...], merge: int | None, keep: int, expected: tuple[int, ...]) -> None:
    assert Blocking(merge=merge, min_axes=keep).merged(shape) == expected


@pytest.mark.parametrize(
    "shape", [(1, 6), (6, 1), (1, 1), (1, 4, 3, 3), (8, 1, 3, 3), (5, 4, 1, 1), (5, 2, 3)], ids=str
)
def test_without_dropping_ones_two_axes_are_the_first_by_all_others(shape: tuple[int, ...]) -> None:
    merged = Blocking(merge=10**6, min_axes=2, drop_ones=False).merged(shape)
    assert merged == (shape[0], math.prod(shape[1:]))


def blocks_by_hand(x: Tensor, size: int | None) -> list[Tensor]:
    """The blocks of x in row-major order of their grid, cut by slicing alone."""
    spans = [range(0, d, size or d) for d in x.shape]
    lengths = [min(size or d, d) for d in x.shape]
    corners = itertools.product(*spans)
    return [x[tuple(slice(c, c + n) for c, n in zip(corner, lengths, strict=True))] for corner in corners]


@given(shape=shapes, blocking=blockings)
def test_pieces_are_the_blocks_of_a_parameter_in_row_major_order(shape: tuple[int, ...], blocking: Blocking) -> None:
    merged = blocking.merged(shape)
    assert math.prod(merged) == math.prod(shape)
    x = torch.arange(math.prod(shape)).reshape(merged)
    found: dict[int, Tensor] = {}
    for grid in blocking.grids(shape):
        cut = grid.in_parameter(x)[0].reshape(-1, *grid.shape)
        assert len(cut) == len(grid.keys) == math.prod(grid.count)
        assert not found.keys() & set(grid.keys)
        found.update(zip(grid.keys, cut, strict=True))
        assert grid.is_parameter == (grid.shape == merged)
    expected = blocks_by_hand(x, blocking.size) if x.numel() else []
    assert sorted(found) == list(range(len(expected)))
    for key, block in enumerate(expected):
        assert torch.equal(found[key], block)
    seen = torch.cat([block.flatten() for block in found.values()]) if found else torch.empty(0)
    assert sorted(seen.tolist()) == list(range(x.numel()))


@given(shape=full_shapes, blocking=blockings)
def test_pieces_of_a_parameter_differ_in_their_tiles(shape: tuple[int, ...], blocking: Blocking) -> None:
    """At most two lengths an axis, full and rest: at most 2^order shapes, whatever the number of blocks."""
    tiles = [grid.shape for grid in blocking.grids(shape)]
    assert len(tiles) == len(set(tiles)) <= 2 ** len(blocking.merged(shape))
    assert all(n <= (blocking.size or n) for tile in tiles for n in tile)


@given(shape=full_shapes, blocking=blockings)
def test_cut_is_a_view(shape: tuple[int, ...], blocking: Blocking) -> None:
    x = torch.zeros(blocking.merged(shape))
    for grid in blocking.grids(shape):
        grid.in_parameter(x)[0].add_(1)
    assert bool((x == 1).all())


def stacks_of(shapes: list[tuple[int, ...]], blocking: Blocking) -> list[Stack]:
    found: dict[tuple[int, ...], list[tuple[int, BlockGrid]]] = {}
    for owner, shape in enumerate(shapes):
        for grid in blocking.grids(shape):
            found.setdefault(grid.shape, []).append((owner, grid))
    return [Stack(tile, torch.float64, torch.device("cpu"), tuple(grids)) for tile, grids in found.items()]


def awkward(x: Tensor, layout: int) -> Tensor:
    """The same values in another memory layout: transposed, or with gaps."""
    if layout == 1 and x.ndim:
        return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))
    if layout == 2 and x.ndim:
        return torch.stack([x, x], dim=-1)[..., 0]
    return x


@pytest.mark.slow
@given(
    shapes=st.lists(full_shapes, min_size=1, max_size=4),
    blocking=blockings,
    layout=st.integers(0, 2),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_gather_and_scatter_are_inverse(
    shapes: list[tuple[int, ...]], blocking: Blocking, layout: int, dtype: torch.dtype
) -> None:
    tensors = [awkward(torch.randn(shape).to(dtype), layout) for shape in shapes]
    before = [x.clone() for x in tensors]
    merged = [blocking.merged(shape) for shape in shapes]
    buffers = {i: torch.full(m, torch.nan, dtype=torch.float64) for i, m in enumerate(merged)}
    blocks = [blocks_by_hand(x.double().reshape(m), blocking.size) for x, m in zip(tensors, merged, strict=True)]
    for stack in stacks_of(shapes, blocking):
        rows = stack.gather(tensors)
        assert rows.shape == (len(stack.param_ids), *stack.block) and rows.dtype == torch.float64
        for row, owner, key in zip(rows, stack.param_ids, stack.keys, strict=True):
            assert torch.equal(row, blocks[owner][key])
        stack.scatter(rows, buffers)
    for i, (x, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert torch.equal(buffers[i].reshape(shape), x.double())
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


@given(shapes=st.lists(full_shapes, min_size=1, max_size=4), blocking=blockings, data=st.data())
def test_selecting_parameters_selects_their_rows(
    shapes: list[tuple[int, ...]], blocking: Blocking, data: st.DataObject
) -> None:
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    active = np.array(data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes))), dtype=np.bool_)
    for stack in stacks_of(shapes, blocking):
        part, rows = stack.select(active), np.flatnonzero(active[stack.param_ids])
        if len(rows):
            assert torch.equal(part.gather(tensors), stack.gather(tensors)[rows])
            assert [stack.keys[row] for row in rows.tolist()] == list(part.keys)
        else:
            assert not part.grids


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"size": 0}, ("size", 1, 0)),
        ({"merge": -1}, ("merge", 1, -1)),
        ({"min_axes": 0}, ("min_axes", 1, 0)),
        ({"min_axes": 2}, ("min_axes", "merge", 2)),
        ({"drop_ones": False}, ("drop_ones", "merge", False)),
        ({"merge_from": "first"}, ("merge_from", "merge", "first")),
        ({"size": 2.5}, ("size", 2.5)),
        ({"sice": 2}, ("sice", 2)),
    ],
)
def test_faults_name_the_field(data: dict[str, object], says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        validated(Blocking, data)
