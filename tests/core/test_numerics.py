"""Decompositions do not depend on where in a stack, and so where in memory, a matrix begins."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eigengraft.numerics import (
    apply_aligned,
    block_norm,
    copy_blocks,
    finite_blocks,
    in_registers,
    products,
    safe_ratio,
    to_power,
    transposed,
    where_blocks,
)
from eigengraft.preconditioners.algebra.products import add_symmetric
from eigengraft.preconditioners.roots.bounds import GuaranteedBound

from ..trajectories import normal, rotation

SIDES = (5, 17, 37, 53, 64, 90, 147)
"""Matrices with and without rows, and starts, that fill whole cache lines."""


def stack(d: int, n: int, dtype: torch.dtype, columns: int | None = None) -> Tensor:
    """The same symmetric matrix of condition 1e4 n times, `[n, d, d]`, or so many of its columns."""
    values, q = torch.logspace(0, -4, d, dtype=torch.float64), rotation(d, seed=d)
    return ((q * values) @ q.T)[:, :columns].to(dtype).expand(n, -1, -1).contiguous()


def divided(x: Tensor, factor: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor.triu() + torch.eye(factor.shape[-1], dtype=x.dtype), x, upper=True)


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "eigh": torch.linalg.eigh,
    "qr": torch.linalg.qr,
    "geqrf": torch.geqrf,
    "householder": lambda a: torch.linalg.householder_product(*torch.geqrf(a)),
    "cholesky": lambda a: torch.linalg.cholesky_ex(a + torch.eye(a.shape[-1], dtype=a.dtype)),
    "svd": torch.linalg.svd,
    "triangular": lambda a: divided(a, a),
}


def results(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_all_places_in_a_stack_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Alone, in a stack of six, and in a slice of that stack; with the strides of the plain call."""
    for d in SIDES:
        a = stack(d, 6, dtype)
        alone = results(apply_aligned(DECOMPOSITIONS[name], a[:1].clone()))
        for part in (a, a[1:4], a[5:]):
            found, plain = results(apply_aligned(DECOMPOSITIONS[name], part)), results(DECOMPOSITIONS[name](part))
            for ours, one, theirs in zip(found, alone, plain, strict=True):
                assert torch.equal(ours, one.expand_as(ours)), d
                assert ours.stride() == theirs.stride() and ours.dtype == theirs.dtype


def test_tall_matrices_and_pairs_of_stacks_give_the_same_bits() -> None:
    """Householder vectors of d x 5 matrices, and triangular solves with a stack of other matrices."""
    for d in SIDES:
        tall = stack(d, 6, torch.float32, columns=5)
        q = apply_aligned(DECOMPOSITIONS["householder"], tall)
        assert torch.equal(q, q[:1].expand_as(q))
        y = apply_aligned(divided, tall, stack(d, 6, torch.float32))
        assert torch.equal(y, y[:1].expand_as(y))


@pytest.mark.parametrize(("d", "calls"), [(16, [6]), (17, [1] * 6)])
def test_aligned_stacks_are_decomposed_in_one_call(d: int, calls: list[int]) -> None:
    """Matrices that fill cache lines are given as they are, without a copy."""
    a, seen = stack(d, 6, torch.float32), []

    def decompose(x: Tensor) -> Tensor:
        seen.append(len(x))
        assert len(x) == 1 or x is a
        return x

    assert torch.equal(apply_aligned(decompose, a), a) and seen == calls


def test_empty_stacks_and_empty_matrices_are_given_as_they_are() -> None:
    for shape in ((0, 5, 5), (3, 0, 0)):
        assert apply_aligned(torch.clone, torch.empty(shape)).shape == shape


def test_finite_blocks_are_found_where_the_sum_is_no_number() -> None:
    """A sum that overflows, and infinities that cancel, say nothing of the other blocks."""
    x = torch.ones(4, 3, 2)
    assert finite_blocks(x).all()
    huge = x * 3e38
    assert finite_blocks(huge).all() and not huge.sum().isfinite()
    x[1, 0, 0], x[1, 1, 0], x[3, 2, 1] = math.inf, -math.inf, math.nan
    assert finite_blocks(x).tolist() == [True, False, True, False]
    assert torch.equal(where_blocks(finite_blocks(x), x, 0.0)[1], torch.zeros(3, 2))
    assert where_blocks(torch.tensor([True, True]), x[:2], 0.0).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_do_not_depend_on_what_follows(dtype: torch.dtype) -> None:
    """Kernels of pow take the rest of a tensor, after whole registers, by other instructions."""
    x = torch.rand(512, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for exponent in (-0.25, 0.3):
        known = to_power(x, exponent)
        assert torch.allclose(known, x.pow(exponent), rtol=4 * torch.finfo(dtype).eps, atol=0)
        assert all(torch.equal(to_power(x[:n], exponent), known[:n]) for n in range(1, 70))
    assert to_power(x[:6].view(2, 3), 0.3).shape == (2, 3)


@pytest.mark.parametrize("shape", [(3, 300, 260), (2, 5, 4), (2, 256, 256)])
def test_blocks_are_copied_whatever_their_strides(shape: tuple[int, ...]) -> None:
    """Large matrices by columns are copied one by one."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    for given in (x, x.mT.contiguous().mT):
        assert torch.equal(copy_blocks(torch.empty(shape), given), x)
    assert torch.equal(transposed(x), x.mT) and transposed(x).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [40, 64])
def test_a_product_with_one_column_is_the_same_in_a_stack_of_one(d: int, dtype: torch.dtype) -> None:
    a = torch.randn(4, d, d, dtype=dtype, generator=torch.Generator().manual_seed(d))
    for left, right in ((a, a[..., :1].contiguous()), (a[:, :1].contiguous(), a)):
        full = products(left, right)
        torch.testing.assert_close(full, torch.matmul(left, right))
        for row in range(4):
            assert torch.equal(products(left[row : row + 1].clone(), right[row : row + 1].clone())[0], full[row])


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_statistic_of_a_column_is_the_same_in_a_stack_of_one(beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    y, total = torch.randn(3, 40, 1, generator=generator), torch.randn(3, 40, 40, generator=generator)
    total = torch.full_like(total, torch.nan) if beta == 0 else total + total.mT
    full = add_symmetric(total.clone(), y, y, beta, 0.1)
    torch.testing.assert_close(full, (beta * total if beta else 0) + 0.1 * y * y.mT)
    assert torch.equal(full, full.mT)
    for row in range(3):
        own = y[row : row + 1].clone()
        assert torch.equal(add_symmetric(total[row : row + 1].clone(), own, own, beta, 0.1)[0], full[row])


def test_a_bound_is_the_same_in_a_stack_of_one() -> None:
    """Inverse roots amplify its last bit by the condition number of the matrix."""
    x = torch.randn(5, 40, 40, generator=torch.Generator().manual_seed(0))
    a = x @ x.mT
    full = GuaranteedBound().upper(a)
    assert all(torch.equal(GuaranteedBound().upper(a[row : row + 1].clone())[0], full[row]) for row in range(5))


def test_norms_do_not_depend_on_how_rows_are_stored() -> None:
    """A tall update is computed as the transpose of a wide one; ranks receive it row by row."""
    x = torch.randn(40, 104, generator=torch.Generator().manual_seed(0)).mT
    assert torch.equal(block_norm(x), block_norm(x.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_do_not_depend_on_their_place(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 1961, dtype=dtype, generator=torch.Generator().manual_seed(0)).unbind(0)
    full = in_registers(torch.atan2, x, y)
    torch.testing.assert_close(full, torch.atan2(x, y))
    for part in (slice(0, 7), slice(3, 70), slice(1900, 1961)):
        assert torch.equal(in_registers(torch.atan2, x[part].clone(), y[part].clone()), full[part])
    columns = torch.stack([x, y], dim=1).unbind(1)
    torch.testing.assert_close(in_registers(torch.atan2, *columns), torch.atan2(*columns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e-10, 1.0, 1e10, 1e18, 1e37])
def test_norms_neither_over_nor_underflow_and_are_the_same_in_every_stack(size: float, dtype: torch.dtype) -> None:
    size = size if dtype == torch.float32 else size**8
    unit = normal(3, 40, 5, seed=1).to(dtype)
    x = torch.stack([unit[0] * size, unit[1], unit[2] * 0])
    norms = block_norm(x)
    exact = torch.linalg.vector_norm(unit[0].double()) * size
    torch.testing.assert_close(norms[0].double(), exact, rtol=1e-6, atol=0)
    assert torch.equal(norms, torch.cat([block_norm(own[None]) for own in x])) and norms[2] == 0


def test_norms_of_blocks_that_are_not_finite_are_not() -> None:
    norms = block_norm(torch.tensor([[1.0, math.nan], [1.0, math.inf], [3.0, 4.0]]))
    assert not norms[:2].isfinite().any() and norms[2] == 5


def test_a_ratio_is_zero_where_the_denominator_is_too_small() -> None:
    small = torch.finfo(torch.float32).tiny
    found = safe_ratio(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([4.0, 0.0, small, 2.0]))
    assert found.tolist() == [0.25, 0.0, 0.0, 0.0]
