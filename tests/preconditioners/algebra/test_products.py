"""Products along axes of blocks against their definition, whatever order, form and dtype they are taken in."""

from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eigengraft import RecipeError, numerics
from eigengraft.preconditioners import Eigenbasis, Momentum, Shampoo
from eigengraft.preconditioners.algebra.products import (
    add_symmetric,
    kronecker,
    mode_product,
    mode_products,
    rotate,
    short_runs,
    symmetric_product,
)
from eigengraft.preconditioners.polar.spectral import NewtonSchulz
from eigengraft.preconditioners.statistics import Gram, InputGram, Power
from eigengraft.slots import State
from eigengraft.step_context import StepContext
from eigengraft.testing import check_stage

from ...refusals import refused
from ...trajectories import normal

BLOCKS = [(5, 4), (6, 5, 3, 3), (4, 3, 7, 7), (3, 70, 2), (2, 3, 4), (8, 4, 20), (5, 1, 3), (3, 2, 2, 2, 9)]


def defined(x: Tensor, matrices: dict[int, Tensor]) -> Tensor:
    """Axis after axis by tensordot, blocks apart."""
    found = []
    for row, block in enumerate(x):
        for axis, matrix in matrices.items():
            own = matrix[row].diag() if matrix.ndim == 2 else matrix[row]
            block = torch.tensordot(own, block, dims=([1], [axis])).movedim(0, axis)
        found.append(block)
    return torch.stack(found)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_rotations_are_products_along_each_axis(block: tuple[int, ...], blocks: int) -> None:
    """All axes, and all but one in turn, of which one has a diagonal and one fewer rows than columns."""
    x = normal(blocks, *block, seed=1)
    full = {axis: normal(blocks, d, d, seed=2 + axis) for axis, d in enumerate(block)}
    full[1] = full[1][:, : max(1, block[1] - 1)]
    for left_out in (None, *range(len(block))):
        matrices = {axis: matrix for axis, matrix in full.items() if axis != left_out}
        if left_out == 0:
            matrices[len(block) - 1] = normal(blocks, block[-1], seed=9)
        expected = defined(x, matrices)
        for found in (rotate(x, matrices), mode_products(x, matrices)):
            assert found.shape == expected.shape and found.is_contiguous()
            assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))  # sums of float64
        for axis, matrix in matrices.items():
            assert torch.allclose(mode_product(x, matrix, axis), defined(x, {axis: matrix}), rtol=0, atol=1e-11)


def test_roots_whose_product_overflows_leave_zeros_zeros() -> None:
    """Roots of damping alone, as those of parameters without gradients, on short axes beside each other."""
    roots = {axis: torch.eye(d).expand(1, d, d) * 1e20 for axis, d in enumerate((3, 2, 4))}
    assert torch.equal(mode_products(torch.zeros(1, 3, 2, 4), roots), torch.zeros(1, 3, 2, 4))


def test_short_axes_beside_each_other_are_joined() -> None:
    def runs(block: tuple[int, ...], axes: Collection[int] | None = None) -> list[list[int]]:
        return short_runs(block, frozenset(range(len(block)) if axes is None else axes))

    assert runs((256, 256, 3, 3)) == [[0], [1], [2, 3]]
    assert runs((64, 3, 7, 7)) == [[0], [1], [2, 3]]
    assert runs((8, 8, 2)) == [[0], [1, 2]] and runs((16, 16, 16)) == [[0], [1], [2]]
    assert runs((256, 3, 3), axes=(0, 2)) == [[0], [1], [2]] and runs((3, 3, 256)) == [[0, 1], [2]]


def test_kronecker_products_are_those_of_torch() -> None:
    factors = [normal(2, m, n, seed=m) for m, n in ((3, 2), (4, 4), (2, 5))]
    assert torch.allclose(kronecker(factors)[1], torch.kron(torch.kron(*(f[1] for f in factors[:2])), factors[2][1]))


STAGES = {
    "eigenbasis": Eigenbasis(inner=(Momentum(),), precision="bfloat16", statistic=Gram(precision="bfloat16")),
    "shampoo": Shampoo(precision="bfloat16", statistic=Gram(precision="bfloat16")),
}


@pytest.mark.parametrize("product", [mode_products, rotate])
@pytest.mark.parametrize("block", [(24, 40), (8, 3, 3, 5)])
def test_products_with_blocks_are_rounded_to_bfloat16(product: Callable[..., Tensor], block: tuple[int, ...]) -> None:
    x = normal(2, *block, seed=0)
    bases = {axis: torch.linalg.qr(normal(2, d, d, seed=1 + axis))[0] for axis, d in enumerate(block)}
    wanted = product(x, bases)
    found = product(x.float(), {axis: q.float() for axis, q in bases.items()}, "bfloat16")
    assert found.dtype == torch.float32
    error = float((found.double() - wanted).norm() / wanted.norm())
    # a block, each basis and each result are rounded by at most 2^-9 of an entry: three roundings an axis, in root mean
    # square less than all of them together
    assert 2**-12 < error < 3 * len(block) * 2**-9


def test_contributions_to_statistics_are_rounded_to_bfloat16() -> None:
    x, axes = normal(3, 24, 40, seed=0), (0, 1)
    context = StepContext(np.ones(3, dtype=np.int64), np.zeros(3), np.arange(3))
    made = {}
    for precision in ("bfloat16", "input"):
        statistic = Gram(precision=precision)
        made[precision] = {
            f"update/factor.{axis}": x.new_zeros(3, x.shape[1 + axis], x.shape[1 + axis]) for axis in axes
        }
        statistic.observe(State(made[precision], (24, 40), "update"), x, context, axes, _no_powers)
    for key, wanted in made["input"].items():
        error = float((made["bfloat16"][key] - wanted).norm() / wanted.norm())
        assert 2**-12 < error < 3 * 2**-9  # two factors and a result, each rounded by at most 2^-9


def _no_powers(axis: int, exponent: Fraction) -> Power:
    raise AssertionError("a Gram reads no other factor")


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_stages_with_products_in_bfloat16_keep_the_laws(name: str) -> None:
    check_stage(STAGES[name])


def test_a_statistic_without_products_refuses_their_dtype() -> None:
    with refused(RecipeError, "precision", "bfloat16"):
        Gram(precision="bfloat16", axes={"entries": "diagonal"})
    with refused(RecipeError, "precision", "bfloat16"):
        InputGram(precision="bfloat16")


SIDES = (5, 255, 256, 300, 513)
"""Of symmetric products: those by panels, from 256 on, and those that are not."""


def wide(side: int, stacked: int = 2, rest: int = 40) -> Tensor:
    return torch.randn(stacked, side, rest, generator=torch.Generator().manual_seed(side))


class Products(TorchDispatchMode):
    """Counts the operations of matrix products: two for each entry and term."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.dtypes = 0, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func.overloadpacket in (aten.bmm, aten.addmm_, aten.baddbmm_, aten.baddbmm):
            left, right = args[-2:]
            self.operations += 2 * left.numel() * right.shape[-1]
            self.dtypes.add(left.dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_running_mean_of_products_is_that_of_float64(side: int, dtype: torch.dtype) -> None:
    x = wide(side).to(dtype)
    before = symmetric_product(x, x)
    after = add_symmetric(before.clone(), x, 2 * x, beta=0.9, alpha=0.1)
    exact = 1.1 * x.double() @ x.double().mT
    # sums of 40 products, each rounded: 40 units of rounding of the largest entry, which is about 80
    torch.testing.assert_close(after.double(), exact, rtol=0, atol=40 * 80 * torch.finfo(dtype).eps)
    if side >= 256:
        assert torch.equal(after[:, :128, 128:], after[:, 128:, :128].mT)


@pytest.mark.parametrize("side", SIDES)
def test_a_matrix_does_not_depend_on_the_others_of_its_stack(side: int) -> None:
    x = wide(side, stacked=3)
    together = symmetric_product(x, x)
    for row in range(3):
        alone = symmetric_product(x[row : row + 1].clone(), x[row : row + 1].clone())
        assert torch.equal(together[row], alone[0])


def test_strides_of_the_factors_change_nothing() -> None:
    x = wide(300)
    turned = x.mT.contiguous().mT
    torch.testing.assert_close(symmetric_product(turned, turned), symmetric_product(x, x), rtol=1e-5, atol=1e-4)


def test_what_was_there_is_not_read_without_a_weight() -> None:
    x = wide(300)
    total = torch.full((2, 300, 300), float("nan"))
    assert torch.equal(add_symmetric(total, x, x, beta=0), symmetric_product(x, x))


@pytest.mark.parametrize(
    ("side", "dtype", "share"), [(512, "float32", 0.625), (255, "float32", 1), (512, "bfloat16", 1)]
)
def test_operations_are_those_of_the_lower_panels(
    side: int, dtype: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "_cpu_has_bfloat16", lambda: True)
    x = wide(side).to(getattr(torch, dtype))
    with Products() as counted:
        symmetric_product(x, x)
    assert counted.operations == share * 2 * 2 * side * side * 40


def test_products_in_bfloat16_are_rounded_once() -> None:
    x = wide(800, rest=16).bfloat16()
    exact = x.double() @ x.double().mT
    # a rounding of the result, 2^-9, and sums in float32
    torch.testing.assert_close(symmetric_product(x, x).double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("has", [True, False], ids=["instructions", "none"])
def test_products_in_bfloat16_are_the_same_where_a_machine_has_none(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors and results are rounded, sums are in float32; without instructions no product is one of bfloat16."""
    monkeypatch.setattr(numerics, "_cpu_has_bfloat16", lambda: has)
    x, q = wide(24, rest=16), wide(24, rest=24)
    y, rounded = x.bfloat16(), x.bfloat16().double()
    with Products() as counted:
        found = {
            "rotated": rotate(x, {0: q}, "bfloat16"),
            "square": symmetric_product(y, y),
            "sum": add_symmetric(torch.ones(2, 24, 24, dtype=torch.bfloat16), y, y, beta=0.5, alpha=2.0),
        }
        polar = NewtonSchulz(precision="bfloat16").polar(x)
    exact = {"rotated": q.bfloat16().double() @ rounded, "square": rounded @ rounded.mT}
    exact["sum"] = 0.5 + 2 * exact["square"]
    assert counted.dtypes == {torch.bfloat16 if has else torch.float32}
    for name, value in exact.items():  # one rounding of the result, 2^-9, and what sums in float32 lose
        torch.testing.assert_close(found[name].double(), value, rtol=2**-8, atol=1e-4)
    # five steps with five roundings each of numbers up to 1
    torch.testing.assert_close(polar, NewtonSchulz().polar(x), rtol=0, atol=25 * 2**-9)
