"""State of a chain whose basis changes along several axes at once, against its definition, and what that costs."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from eigengraft.preconditioners import RMS, Momentum
from eigengraft.preconditioners.algebra.basis_change import Turn, transport
from eigengraft.preconditioners.algebra.products import rotate
from eigengraft.slots import State

from ...trajectories import normal
from .test_products import Products, defined

CHAIN = (Momentum(), RMS())
FIRST, SECOND = "inner.momentum/m", "inner.rms/v"


def bases(block: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> dict[int, Tensor]:
    """Orthonormal bases `[2, d, d]` of every axis."""
    return {axis: torch.linalg.qr(normal(2, d, d, seed=seed + axis))[0].to(dtype) for axis, d in enumerate(block)}


def moments(block: tuple[int, ...]) -> dict[str, Tensor]:
    return {FIRST: normal(2, *block, seed=1), SECOND: normal(2, *block, seed=2).square()}


def moved(
    block: tuple[int, ...], turns: dict[int, Turn], how: Literal["exact", "marginals", "permute", "none"]
) -> dict[str, Tensor]:
    tensors = moments(block)
    transport(CHAIN, State(tensors, block, "inner"), turns, how)
    return tensors


@pytest.mark.parametrize("block", [(7,), (9, 4), (6, 5, 3), (6, 5, 3, 3)], ids=str)
def test_all_axes_turn_as_each_is_defined_to(block: tuple[int, ...]) -> None:
    """Rounding of float64 over all sums: 1e-12 of entries of about 1."""
    old, new = bases(block, 10), bases(block, 20)
    order = {
        axis: torch.stack([torch.randperm(d, generator=seeded(axis)) for _ in range(2)]) for axis, d in enumerate(block)
    }
    rotations = {axis: old[axis].mT @ new[axis] for axis in old}
    before, first = moments(block), defined(moments(block)[FIRST], {axis: r.mT for axis, r in rotations.items()})
    second = {
        "exact": defined(before[SECOND], {axis: r.square().mT for axis, r in rotations.items()}),
        "permute": defined(
            before[SECOND], {axis: torch.eye(len(o[0]), dtype=torch.float64)[o] for axis, o in order.items()}
        ),
        "none": before[SECOND],
    }
    for how in ("exact", "permute", "none"):
        found = moved(block, {axis: Turn(new[axis], old[axis], order[axis]) for axis in old}, how)
        torch.testing.assert_close(found[FIRST], before[FIRST] if how == "none" else first, rtol=0, atol=1e-12)
        torch.testing.assert_close(found[SECOND], second[how], rtol=0, atol=1e-12)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_basis_that_stays_moves_nothing() -> None:
    block = (6, 5)
    old = bases(block, 10)
    with Products() as counted:
        found = moved(block, {axis: Turn(q.clone(), q) for axis, q in old.items()}, "exact")
    assert counted.operations == 0
    assert all(torch.equal(found[name], value) for name, value in moments(block).items())


@pytest.mark.parametrize(
    ("block", "how", "expected"),
    [
        ((8, 2), "permute", "by parts"),  # 2 d^2 rest twice is less than 2 d^3 + 2 d^2 rest
        ((4, 32), "permute", "whole"),
        ((8, 2), "exact", "whole"),  # R is needed for the squares, which are one more product
    ],
)
def test_a_rotation_is_made_where_it_saves_operations(
    block: tuple[int, int], how: Literal["exact", "permute"], expected: str
) -> None:
    d, rest = block
    old, new = bases(block, 10)[0], bases(block, 20)[0]
    with Products() as counted:
        moved(block, {0: Turn(new, old, torch.arange(d).expand(2, d))}, how)
    product, rotation = 2 * 2 * d * d * rest, 2 * 2 * d**3
    assert (
        counted.operations
        == {"by parts": 2 * product, "whole": rotation + (2 if how == "exact" else 1) * product}[expected]
    )


COPIES = {(64, 48, 3, 3): 1, (24, 40, 3): 1, (24, 20, 3): 0, (96, 90, 20): 0, (64, 48): 0}


@pytest.mark.parametrize(("block", "copies"), COPIES.items(), ids=str)
def test_rotations_copy_a_block_only_for_short_last_axes(block: tuple[int, ...], copies: int) -> None:
    x, matrices = normal(2, *block, seed=1), bases(block, 10)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        rotate(x, matrices)
    copied = [
        event
        for event in profile.events()
        if event.name == "aten::copy_" and _numel(event.input_shapes[0]) == x.numel()
    ]
    assert len(copied) == copies


def _numel(shape: list[int]) -> int:
    return torch.Size(shape).numel()
