"""Operations on many tensors at once, against the same operation on each of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eigengraft.numerics import (
    DOT,
    differs_from_rounded,
    equal_stacks,
    in_dtypes_of,
    over_stacks,
    scale_tensors_,
    squares_are_finite,
)

from ..trajectories import normal

MIXED = ((3, 2), (3, 2), (70, 80), (3, 2), (), ())
"""Shapes of small tensors, equal and not, of a large one, and of numbers."""


def tensors(dtype: torch.dtype) -> list[Tensor]:
    return [normal(*shape, seed=seed).to(dtype) for seed, shape in enumerate(MIXED)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scaling_rounds_as_a_product_with_a_number_does(dtype: torch.dtype) -> None:
    found = tensors(dtype)
    scale_tensors_(found, 1 - 1 / 3e4)
    assert all(torch.equal(x, y * (1 - 1 / 3e4)) for x, y in zip(found, tensors(dtype), strict=True))


def test_tensors_of_several_dtypes_are_scaled_too() -> None:
    mixed = [torch.ones(2, dtype=dtype) for dtype in (torch.float64, torch.float32)]
    scale_tensors_(mixed, 0.1)
    assert [float(x[0]) for x in mixed] == [0.1, float(torch.tensor(0.1))]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e20])
@pytest.mark.parametrize("place", range(len(MIXED)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_without_finite_squares_is_found_wherever_it_is(bad: float, place: int, dtype: torch.dtype) -> None:
    """The square of 1e20 is larger than any number of float32."""
    given = tensors(dtype)
    assert squares_are_finite(given)
    given[place].view(-1)[-1] = bad
    assert not squares_are_finite(given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.9])
def test_a_large_tensor_without_finite_squares_is_found(bad: float, dtype: torch.dtype) -> None:
    """Its squares are summed by a dot product. bad: in units of the largest number of the dtype."""
    given = torch.ones(DOT, dtype=dtype)
    assert squares_are_finite([given])
    assert squares_are_finite([given.view(2, -1).mT])  # not contiguous
    given[-1] = bad * torch.finfo(dtype).max
    assert not squares_are_finite([given])
    assert not squares_are_finite([given.view(2, -1).mT])


def test_a_sum_of_squares_that_overflows_is_found() -> None:
    """65,536 squares of 1e17 are 6.6e38 together, above the largest number of float32, 3.4e38."""
    assert squares_are_finite([torch.full((DOT,), 1e16)])
    assert not squares_are_finite([torch.full((DOT,), 1e17)])


def test_large_numbers_of_float64_have_finite_squares() -> None:
    assert squares_are_finite([torch.full((2,), 1e150, dtype=torch.float64)] * 3)
    assert not squares_are_finite([torch.full((2,), 1e160, dtype=torch.float64)] * 3)
    assert squares_are_finite([])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "turned": lambda x: x.mT,
    "cut": lambda x: x[:, 1:],
    "shifted": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),  # by half of 32 bits
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("shape", [(3, 5), (130, 64), (127, 65)], ids=str)
def test_values_that_do_not_round_to_their_partner_are_found(shape: Any, view: Any, dtype: torch.dtype) -> None:
    """Small tensors together, large ones as 64-bit numbers, others entry by entry: one other bit is enough."""
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    rounded = [view(x.to(dtype)) for x in values]
    values = [view(x).contiguous() for x in values]
    assert differs_from_rounded(values, rounded) == []
    rounded[1][-1, -1] = torch.nextafter(rounded[1][-1, -1], torch.tensor(9.0, dtype=dtype))
    assert 1 in differs_from_rounded(values, rounded)
    assert len(differs_from_rounded(values, rounded)) == (3 if rounded[0].numel() <= 4096 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_of_stacks_are_those_of_single_tensors(dtype: torch.dtype) -> None:
    xs, numbers = tensors(dtype), normal(len(MIXED), seed=9).to(dtype)
    ys = [x * 3 for x in xs]
    found = over_stacks(lambda x, y, number: x - y * number, xs, ys, numbers)
    assert all(torch.equal(z, x - y * n) for z, x, y, n in zip(found, xs, ys, numbers, strict=True))


def test_equal_tensors_are_stacked_and_large_ones_are_not_copied() -> None:
    xs = tensors(torch.float32)
    found = list(equal_stacks(xs, torch.arange(len(xs))))
    assert [indices for indices, _ in found] == [[0, 1, 3], [2], [4, 5]]
    assert [numbers.shape for _, (_, numbers) in found] == [(3, 1, 1), (1, 1, 1), (2,)]
    assert found[1][1][0].data_ptr() == xs[2].data_ptr()
    assert over_stacks(torch.neg, []) == []


def test_tensors_are_cast_to_the_dtypes_of_others() -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    xs = [torch.full((2,), 0.1, dtype=kind) for kind in kinds]
    others = [torch.zeros(2, dtype=kind) for kind in (torch.float32, torch.float32, torch.float64, torch.float64)]
    found = in_dtypes_of(xs, others)
    assert [x.dtype for x in found] == [x.dtype for x in others]
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(found, xs, strict=True))
    assert found[0] is xs[0] and in_dtypes_of(xs, xs) is xs
