"""Views of parameters as matrices, against matrices that are selected index by index."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eigengraft.blocking import Batches, BlockGrid, Blocking, Matrices, ModuleFacts, Modules, Whole
from eigengraft.blocking.blocks import Box
from eigengraft.distributed.layouts import regions

from ..refusals import refused
from ..views import matrices_by_hand


@st.composite
def views(draw: Any) -> tuple[Matrices, tuple[int, ...]]:
    """A view and the shape of a parameter that has it."""
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    sections = draw(st.sampled_from([0, 2, 3]))
    heads = [draw(st.integers(1, 3)) for _ in range(sections or 1)]
    parts = [head * draw(st.integers(1, 3)) for head in heads]
    chosen = tuple(draw(st.sampled_from([0, head])) for head in heads)
    groups = draw(st.integers(1, 3)) if sections else 1
    divided = bool(sections) or any(chosen)
    view = Matrices(
        batch=len(batch),
        outputs=draw(st.sampled_from(["first", "last"])),
        side=draw(st.sampled_from(["outputs", "inputs"])) if divided else "outputs",
        sections=tuple(parts) if sections else (),
        groups=groups,
        heads=chosen if any(chosen) else None,
    )
    others = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    first = (view.outputs == "first") == (view.side == "outputs")
    length = sum(parts) * groups
    return view, (*batch, *([length, *others] if first else [*others, length]))


@st.composite
def blockings(draw: Any) -> Blocking:
    size = draw(st.sampled_from([None, 1, 2, 3, 5]))
    merge = draw(st.sampled_from([None, 1, 4, 12, 100]))
    if merge is None:
        return Blocking(size=size)
    merge_from = draw(st.sampled_from(["last", "first"]))
    return Blocking(size=size, merge=merge, merge_from=merge_from, min_axes=draw(st.integers(1, 2)))


def blocks_by_hand(matrix: Tensor, blocking: Blocking) -> list[Tensor]:
    """The blocks of a matrix that is a parameter of its own, in row-major order."""
    x = matrix.reshape(blocking.merged(tuple(matrix.shape)))
    corners = itertools.product(*(range(0, d, blocking.size or d) for d in x.shape))
    return [x[tuple(slice(c, c + (blocking.size or d)) for c, d in zip(own, x.shape, strict=True))] for own in corners]


def gathered(grid: BlockGrid, x: Tensor) -> Tensor:
    """The blocks of a grid, copied out of x."""
    out = torch.empty((len(grid.keys), *grid.shape), dtype=x.dtype)
    pairs = zip(grid.in_blocks(out), grid.in_parameter(x.reshape(grid.merged)), strict=True)
    for target, source in pairs:
        target.copy_(source)
    return out


@pytest.mark.slow
@settings(max_examples=150)
@given(case=views(), blocking=blockings(), start=st.integers(0, 99), length=st.integers(1, 99))
def test_blocks_are_those_of_separate_parameters_wherever_they_lie(
    case: tuple[Matrices, tuple[int, ...]], blocking: Blocking, start: int, length: int
) -> None:
    """Also what a block and any box of the parameter, such as a shard, have in common, is the same in both."""
    view, shape = case
    x = torch.arange(math.prod(shape)).reshape(shape)
    matrices = matrices_by_hand(x, view)
    assert Counter(tuple(matrix.shape) for matrix in matrices) == Counter(view.each(shape))
    expected = [(k, block) for k, matrix in enumerate(matrices) for block in blocks_by_hand(matrix, blocking)]
    low = [(start * (axis + 7)) % d for axis, d in enumerate(shape)]
    box = Box(tuple(low), tuple(min(d, a + 1 + length % d) for a, d in zip(low, shape, strict=True)))
    held = x[tuple(itertools.starmap(slice, zip(box.start, box.stop, strict=True)))]
    found = {}
    for grid in blocking.grids(shape, view):
        for index, (key, own, block) in enumerate(zip(grid.keys, grid.matrices, gathered(grid, x), strict=True)):
            alone = grid.block(index)
            assert torch.equal(gathered(alone, x)[0], block) and alone.keys == (key,) and alone.matrices == (own,)
            found[key] = own, block
            pairs = [(region.in_block(block), held[region.box.within(box)]) for region in regions(shape, alone, box)]
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
            assert sum(len(ours.flatten()) for ours, _ in pairs) == np.isin(block.numpy(), held.numpy()).sum()
    assert sorted(found) == list(range(len(expected)))
    for key, (own, block) in enumerate(expected):
        assert found[key][0] == own and torch.equal(found[key][1], block)


def test_equal_heads_of_all_groups_are_one_grid() -> None:
    """So that they are copied by one kernel, however many there are."""
    view = Matrices(groups=8, sections=(48, 16, 16), heads=16)
    assert [len(grid.keys) for grid in Blocking().grids((8 * 80, 64), view)] == [24, 8, 8]
    assert [len(grid.keys) for grid in Blocking(size=512).grids((6, 1024, 2048), Matrices(batch=1))] == [6 * 2 * 4]


FACTS = {"convolution": ModuleFacts(True), "other": ModuleFacts(False), "unknown": ModuleFacts()}


@pytest.mark.parametrize(
    ("shape", "facts", "batch", "decided"),
    [
        ((64, 32), "unknown", 0, True),
        ((64, 32, 3), "convolution", 0, True),
        ((64, 32, 3, 3), "convolution", 0, True),
        ((8, 4, 4), "other", 1, True),
        ((2, 8, 64, 32), "other", 2, True),
        ((8, 64, 32), "unknown", 1, True),
        ((64, 32, 3, 3), "unknown", 0, True),
        ((64, 32, 3), "unknown", 0, False),
        ((2, 8, 64, 32), "unknown", 2, False),
    ],
)
def test_batches_are_of_what_is_no_convolution(shape: tuple[int, ...], facts: str, batch: int, decided: bool) -> None:
    choice = Batches().of(shape, FACTS[facts])
    assert (choice.matrices, choice.decided) == (Matrices(batch=batch), decided)
    assert bool(choice.why) == (len(shape) > 2)
    assert Whole().of(shape, FACTS[facts]).matrices == Matrices()


def test_modules_tell_or_leave_it_to_batches() -> None:
    told = Matrices(sections=(8, 4, 4), heads=(4, 4, 0))
    facts = ModuleFacts(False, told, "a fused projection")
    assert Modules().of((16, 5), facts) == (told, "a fused projection", True)
    assert Modules(heads=False).of((16, 5), facts).matrices == Matrices(sections=(8, 4, 4))
    only_heads = ModuleFacts(False, Matrices(side="inputs", heads=4), "heads")
    assert Modules(heads=False).of((16, 8), only_heads).matrices == Matrices()
    assert Modules().of((4, 16, 5), ModuleFacts(False)).matrices == Matrices(batch=1)
    with refused(ValueError, "modules", "eigengraft.compose"):
        Modules().of((16, 5), ModuleFacts())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sections": [4]}, ("sections", 1)),
        ({"sections": [4, 0]}, ("sections", 1)),
        ({"groups": 2}, ("groups", 2)),
        ({"side": "inputs"}, ("side",)),
        ({"sections": [4, 4], "heads": [2]}, ("heads", 2)),
        ({"heads": 0}, ("heads", 0)),
        ({"heads": -2}, ("heads", -2)),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], says: tuple[object, ...]) -> None:
    with refused(ValueError, *says):
        Matrices.model_validate(fields)


@pytest.mark.parametrize(
    ("view", "shape", "says"),
    [
        (Matrices(batch=1), (4,), ("view", 2, 1, "shape")),
        (Matrices(heads=2), (4,), ("view", 2, "shape")),
        (Matrices(sections=(3, 2)), (6, 4), ("view", 6, 0)),
        (Matrices(sections=(3, 2), groups=2, outputs="last"), (6, 4), (4, 1)),
        (Matrices(heads=4), (6, 4), ("view", 6, 4)),
        (Matrices(sections=(6, 4), heads=(3, 3)), (10, 4), ("view", 4, 3)),
    ],
)
def test_parameters_without_these_matrices_are_refused(
    view: Matrices, shape: tuple[int, ...], says: tuple[object, ...]
) -> None:
    for call in (lambda: list(Blocking().grids(shape, view)), lambda: view.of(shape, ModuleFacts())):
        with refused(ValueError, *says):
            call()
